"""`ltc doctor`: what is wrong with a run, where, and what to do."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from torch_ltc.cli.command import Command, add_json
from torch_ltc.cli.output import coloured, print_json
from torch_ltc.cli.recordings import add_recording, read_recording
from torch_ltc.debug.doctor import examine, findings_text

SERIOUS = ("error", "warning")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_recording(parser)
    parser.add_argument("--strict", action="store_true", help="exit with status 1 for a hint, too")
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    findings = examine(read_recording(options.recording))
    if options.json:
        print_json([asdict(finding) for finding in findings])
    else:
        print(_in_colours(findings_text(findings)).rstrip())
    counted = findings if options.strict else [finding for finding in findings if finding.severity in SERIOUS]
    return 1 if counted else 0


def _in_colours(text: str) -> str:
    """Lines that begin with a severity, in its colour."""
    lines = []
    for line in text.splitlines():
        word = line.split(" ", 1)[0].rstrip(":").lower()
        lines.append(coloured(line, word) if word in (*SERIOUS, "hint") else line)
    return "\n".join(lines)


COMMAND = Command(
    name="doctor",
    help="say what is wrong with a run, at which line, and what to do",
    description=(
        "Look through a recording for what makes a run slow or wrong: reads in the loop, programs that are compiled "
        "again and again, operations that run eagerly, memory that is never freed. Exit status 1 if there is an error "
        "or a warning."
    ),
    add_options=_add_options,
    run=_run,
)
