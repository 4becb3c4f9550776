"""`ltc dump`: the text of recorded programs, and the difference of two."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path

from torch_ltc.cli.command import Command, add_json
from torch_ltc.cli.output import coloured, print_json, table
from torch_ltc.cli.recordings import find_program, read_recording
from torch_ltc.debug.recording import ProgramRow, Recording
from torch_ltc.errors import RecordingError
from torch_ltc.formatting import count_text, duration_text
from torch_ltc.program.difference import difference, difference_text
from torch_ltc.program.text import source_text
from torch_ltc.source import Source

# As in the listing: a line makes values, "%3:f32[2] = ...", of others, "%1".
_MADE = re.compile(r"%(\d+):")
_USED = re.compile(r"%(\d+)(?![\d:])")
_STYLES = {"+": "good", "-": "error", "@": "hint"}


def _add_options(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(title="what to do", metavar="show|diff", required=True)
    show = words.add_parser(
        "show",
        help="print programs",
        description="List the programs of a recording, or print one of them.",
    )
    show.add_argument(
        "names",
        nargs="*",
        metavar="[RECORDING] [PROGRAM]",
        help="a file, the last run by default, and the number of a program",
    )
    show.add_argument("--all", action="store_true", help="print all programs")
    show.add_argument("--dot", action="store_true", help="print a graph for Graphviz")
    add_json(show)
    show.set_defaults(what=_show)
    diff = words.add_parser(
        "diff",
        help="print the difference of two programs",
        description="Print in what program B differs from program A. Exit status 1 if they differ.",
    )
    diff.add_argument(
        "names",
        nargs="+",
        metavar="[RECORDING] A B",
        help="a file, the last run by default, and the numbers of two programs",
    )
    diff.add_argument("--context", type=int, default=3, metavar="N", help="lines around each change (%(default)s)")
    add_json(diff)
    diff.set_defaults(what=_diff)


def _run(options: argparse.Namespace) -> int:
    status: int = options.what(options)
    return status


def _read(names: list[str], least: int, most: int) -> tuple[Recording, list[ProgramRow]]:
    """The recording and the programs that the arguments name: the last of them are numbers."""
    numbers: list[int] = []
    rest = list(names)
    while rest and len(numbers) < most and rest[-1].isdecimal():
        numbers.insert(0, int(rest.pop()))
    if len(rest) > 1 or len(numbers) < least:
        raise RecordingError(
            f"expected a file and {least or 'up to ' + str(most)} numbers of programs, got {' '.join(names)!r}",
            hint="`ltc dump show` lists the programs",
        )
    recording = read_recording(Path(rest[0]) if rest else None)
    return recording, [find_program(recording, number) for number in numbers]


# ---- show -----------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    recording, programs = _read(options.names, 0, 1)
    shown = list(recording.programs) if options.all else programs
    if options.json:
        print_json([asdict(row) for row in shown or recording.programs])
    elif not shown and not options.dot:
        print(_overview(recording))
    else:
        show = _dot if options.dot else _listing
        print("\n\n".join(show(row) for row in shown or recording.programs))
    return 0


def _overview(recording: Recording) -> str:
    if not recording.programs:
        return "no programs were recorded"
    rows: list[tuple[str, ...]] = [
        ("program", "calls", "inputs", "outputs", "syncs", "compiles", "run time", "backend", "synced at")
    ]
    for row in recording.programs:
        figures = (row.identity, row.calls, row.inputs, row.outputs, row.syncs, row.compiles)
        rows.append((*map(str, figures), duration_text(row.run_s), row.backend, source_text(row.site, "short")))
    return table(rows, "rrrrrrr")


def _listing(row: ProgramRow) -> str:
    head = f"program {row.identity}: {count_text(row.calls, 'call')}, synced at {source_text(row.site, 'short')}"
    lines = [coloured(head, "strong")]
    width = min(max((len(line.text) for line in row.lines), default=0), 90)
    for line in row.lines:
        where = coloured(f"# {source_text(line.source, 'short')}", "faint")
        lines.append(f"{line.text.ljust(width)}  {where}")
    if not row.lines:
        lines.append("its text was not kept")
    return "\n".join(lines)


def _dot(row: ProgramRow) -> str:
    made: dict[str, int] = {}
    parts = [f"digraph program_{row.identity} {{", '  node [shape=box, fontname="monospace"];']
    for index, line in enumerate(row.lines):
        label = f"{line.text}\\n{source_text(line.source, 'short')}".replace('"', '\\"')
        parts.append(f'  n{index} [label="{label}"];')
        parts += [f"  n{made[number]} -> n{index};" for number in _USED.findall(line.text) if number in made]
        made.update(dict.fromkeys(_MADE.findall(line.text), index))
    return "\n".join([*parts, "}"])


# ---- diff -----------------------------------------------------------------------------------------------------------


def _diff(options: argparse.Namespace) -> int:
    _, (first, second) = _read(options.names, 2, 2)
    for row in (first, second):
        if not row.lines:
            raise RecordingError(f"the text of program {row.identity} was not kept", hint="choose another")
    old, new = _lines(first), _lines(second)
    found = difference(old, new)
    if options.json:
        print_json({"same": found.same, "summary": found.summary(), **asdict(found)})
    else:
        names = (f"program {first.identity}", f"program {second.identity}")
        text = difference_text(old, new, names=names, context=options.context)
        print("\n".join(_in_colour(line) for line in text.splitlines()))
    return 0 if found.same else 1


def _lines(row: ProgramRow) -> list[tuple[str, Source]]:
    return [(line.text, line.source) for line in row.lines]


def _in_colour(line: str) -> str:
    style = _STYLES.get(line[:1])
    return line if style is None else coloured(line, style)


COMMAND = Command(
    name="dump",
    help="print the programs of a recording, or the difference of two",
    description="Print the programs of a recording as text, each call with the line that recorded it.",
    add_options=_add_options,
    run=_run,
)
