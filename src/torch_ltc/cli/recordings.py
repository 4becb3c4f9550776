"""Recordings in files, and the commands that read them: `ltc doctor`, `explain`, `report`, `dump`."""

from __future__ import annotations

import argparse
import re
import shlex
import webbrowser
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from torch_ltc.cli.output import add_json, coloured, command, count, print_json, table
from torch_ltc.config import cache_folder
from torch_ltc.debug.doctor import examine, findings_text
from torch_ltc.debug.explain import explain_recording
from torch_ltc.debug.recording import ProgramRow, Recording, anonymous, from_json
from torch_ltc.debug.report import write_report
from torch_ltc.debug.report.ranks import RankReport, write_merged
from torch_ltc.errors import RecordingError
from torch_ltc.formatting import count_text, duration_text
from torch_ltc.private_files import write_private_file
from torch_ltc.program.difference import difference, difference_text
from torch_ltc.program.text import source_text
from torch_ltc.source import Source

_LAST_RUN = "last_run.json"
_HINT = "run something first: ltc run SCRIPT, or name a file that was written with --record FILE"


def last_run() -> Path | None:
    """The file of the last run; None when nothing is kept on disk."""
    folder = cache_folder()
    return Path(folder) / _LAST_RUN if folder else None


def add_recording(parser: argparse.ArgumentParser) -> None:
    """The argument that names a recording."""
    parser.add_argument(
        "recording",
        nargs="?",
        type=Path,
        metavar="RECORDING",
        help="a file that `ltc run --record FILE` or LTC_REPORT=FILE.json wrote; by default that of the last `ltc run`",
    )


def read_recording(path: Path | None) -> Recording:
    """The recording in a file, by default that of the last run; raises RecordingError."""
    found = last_run() if path is None else path
    if found is None:
        raise RecordingError("no run is kept, because the setting 'cache_dir' is 'off'", hint="name a file")
    try:
        text = found.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        what = f"there is no file {str(found)!r}" if path is not None else f"no run is kept in {found.parent}"
        raise RecordingError(what, hint=_HINT) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"cannot read {found}: {error}", hint=_HINT) from error
    return from_json(text, str(found))


def write_recording(path: Path, recording: Recording) -> None:
    """Write it in one step, so that who reads meanwhile finds the old file or the new one; raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The text of programs and the lines of the user's code are nobody else's business.
    write_private_file(path, recording.to_json().encode())


def find_program(recording: Recording, identity: int) -> ProgramRow:
    """The program of this number; raises RecordingError when there is none."""
    for row in recording.programs:
        if row.identity == identity:
            return row
    known = ", ".join(str(row.identity) for row in recording.programs[:20])
    more = ", ..." if len(recording.programs) > 20 else ""
    raise RecordingError(f"the recording has no program {identity}", hint=f"one of: {known}{more}")


SERIOUS = ("error", "warning")


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    add_recording(parser)
    parser.add_argument("--strict", action="store_true", help="exit with status 1 for a hint, too")
    add_json(parser)


@command(
    "doctor",
    "say what is wrong with a run, at which line, and what to do",
    "Look through a recording for what makes a run slow or wrong: reads in the loop, programs that are compiled again"
    " and again, operations that run eagerly, memory that is never freed. Exit status 1 if there is an error or a "
    "warning.",
    _doctor_options,
)
def _doctor(options: argparse.Namespace) -> int:
    recording = read_recording(options.recording)
    findings = examine(recording)
    if options.json:
        print_json([asdict(finding) for finding in findings])
    else:
        print(coloured(_named(recording), "strong"))
        print(_in_colours(findings_text(findings)).rstrip())
    counted = findings if options.strict else [finding for finding in findings if finding.severity in SERIOUS]
    return 1 if counted else 0


def _named(recording: Recording) -> str:
    """The run that a recording is of, in a line."""
    command = shlex.join(recording.command) or "a session without a script"
    return f"The run of {command}, {recording.started.replace('T', ' ')}, {duration_text(recording.duration_s)}."


def _in_colours(text: str) -> str:
    """Lines that begin with a severity, in its colour."""
    lines = []
    for line in text.splitlines():
        word = line.split(" ", 1)[0].rstrip(":").lower()
        lines.append(coloured(line, word) if word in (*SERIOUS, "hint") else line)
    return "\n".join(lines)


def _explain_options(parser: argparse.ArgumentParser) -> None:
    add_recording(parser)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--program", type=int, metavar="N", help="only this program")
    chosen.add_argument("--last", choices=("compile", "sync"), help="only the last compilation, or the last sync")
    add_json(parser)


@command(
    "explain",
    "say why programs were compiled, in terms of your code",
    "Say why each program of a run was compiled: the nearest known program, the first thing in which the new one "
    "differs from it, your line, what has become a run-time input, and what to change.",
    _explain_options,
)
def _explain(options: argparse.Namespace) -> int:
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


def _report_options(parser: argparse.ArgumentParser) -> None:
    add_recording(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (%(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="make one page of the recordings of several ranks, with a table that compares them",
    )
    parser.add_argument(
        "--anonymous",
        action="store_true",
        help="leave out the command and the names of files, functions, modules and folders: for others to see",
    )
    add_json(parser)


@command(
    "report",
    "make a page of a recording: timeline, programs, syncs, recompiles, memory",
    "Make one self-contained page of a recording, with the doctor's findings on top, a timeline, the programs and "
    "their text, syncs, fallbacks, recompiles with their reasons, memory, settings and versions.",
    _report_options,
)
def _report(options: argparse.Namespace) -> int:
    if options.merge:
        named = [(path.stem, read_recording(path)) for path in options.merge]
    else:
        named = [("", read_recording(options.recording))]
    if options.anonymous:
        named = [(name, anonymous(recording)) for name, recording in named]
    reports = [RankReport(name, recording, examine(recording)) for name, recording in named]
    findings = [finding for report in reports for finding in report.findings]
    try:
        if options.merge:
            write_merged(options.output, reports)
        else:
            write_report(options.output, reports[0].recording, findings)
    except OSError as error:
        raise RecordingError(f"cannot write {options.output}: {error}", hint="name another file with -o") from error
    path = options.output.resolve()
    if options.json:
        found = Counter(finding.severity for finding in findings)
        print_json({"report": str(path), "size_bytes": path.stat().st_size, "findings": dict(found)})
    else:
        print(path)
    if options.open:
        webbrowser.open(path.as_uri())
    return 0


# As in the listing: a line makes values, "%3:f32[2] = ...", of others, "%1".
_MADE = re.compile(r"%(\d+):")
_USED = re.compile(r"%(\d+)(?![\d:])")
_STYLES = {"+": "good", "-": "error", "@": "hint"}


def _dump_options(parser: argparse.ArgumentParser) -> None:
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
    diff.add_argument("--context", type=count, default=3, metavar="N", help="lines around each change (%(default)s)")
    add_json(diff)
    diff.set_defaults(what=_diff)


@command(
    "dump",
    "print the programs of a recording, or the difference of two",
    "Print the programs of a recording as text, each call with the line that recorded it.",
    _dump_options,
)
def _dump(options: argparse.Namespace) -> int:
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
