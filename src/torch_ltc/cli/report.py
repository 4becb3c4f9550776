"""`ltc report`: the page of a recording."""

from __future__ import annotations

import argparse
import webbrowser
from collections import Counter
from pathlib import Path

from torch_ltc.cli.command import Command, add_json
from torch_ltc.cli.output import print_json
from torch_ltc.cli.recordings import add_recording, read_recording
from torch_ltc.debug.doctor import examine
from torch_ltc.debug.report import write_report
from torch_ltc.errors import RecordingError


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_recording(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (%(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    recording = read_recording(options.recording)
    findings = examine(recording)
    try:
        write_report(options.output, recording, findings)
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


COMMAND = Command(
    name="report",
    help="make a page of a recording: timeline, programs, syncs, recompiles, memory",
    description=(
        "Make one self-contained page of a recording, with the doctor's findings on top, a timeline, the programs and "
        "their text, syncs, fallbacks, recompiles with their reasons, memory, settings and versions."
    ),
    add_options=_add_options,
    run=_run,
)
