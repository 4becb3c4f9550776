"""`ltc explain`: why programs were compiled, and where the program waited."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from torch_ltc.cli.command import Command, add_json
from torch_ltc.cli.output import print_json
from torch_ltc.cli.recordings import add_recording, find_program, read_recording
from torch_ltc.debug.explain import explain_recording


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_recording(parser)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--program", type=int, metavar="N", help="only this program")
    chosen.add_argument("--last", choices=("compile", "sync"), help="only the last compilation, or the last sync")
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    recording = read_recording(options.recording)
    program = None if options.program is None else find_program(recording, options.program)
    text = explain_recording(recording, options.program, options.last)
    if not options.json:
        print(text.rstrip())
        return 0
    compiles = [row for row in recording.compiles if not row.loaded]
    if program is not None:
        compiles = [row for row in compiles if row.program == program.identity]
    elif options.last == "compile":
        compiles = compiles[-1:]
    elif options.last == "sync":
        compiles = []
    print_json({"text": text, "compiles": [asdict(row) for row in compiles]})
    return 0


COMMAND = Command(
    name="explain",
    help="say why programs were compiled, in terms of your code",
    description=(
        "Say why each program of a run was compiled: the nearest known program, the first thing in which the new one "
        "differs from it, your line, what has become a run-time input, and what to change."
    ),
    add_options=_add_options,
    run=_run,
)
