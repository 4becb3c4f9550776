"""`ltc run SCRIPT`: an unmodified script on the lazy device."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torch_ltc import api
from torch_ltc.cli.cuda_names import cuda_names
from torch_ltc.cli.output import command, note
from torch_ltc.cli.placement import placement
from torch_ltc.cli.recordings import last_run, write_recording
from torch_ltc.cli.script import run_script, torch_state
from torch_ltc.config import SETTINGS, settings
from torch_ltc.debug.doctor import examine
from torch_ltc.debug.doctor.figures import setting
from torch_ltc.debug.history import history
from torch_ltc.debug.recording import Finding, Recording
from torch_ltc.debug.report import write_report
from torch_ltc.errors import LtcError, SettingError
from torch_ltc.formatting import count_text
from torch_ltc.libraries.choice import always_in_libraries

SEVERITIES = ("error", "warning", "hint")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", metavar="NAME", help="compile with this backend; `ltc backends` lists them")
    parser.add_argument(
        "--map-cuda",
        action="store_true",
        help='"cuda", .cuda() and torch.cuda mean the lazy device: for scripts that ask for a GPU',
    )
    parser.add_argument(
        "--no-placement",
        "--no-default-device",
        action="store_true",
        help="leave every tensor where the script has it: for scripts that say themselves what is on 'ltc'",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="NAME=VALUE",
        help="change a setting, as --set tiers=blocking; repeatable; docs/settings.md lists them",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report of the run, a page, to FILE")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the recording of the run to FILE; by default to the cache folder, where other commands find it",
    )
    parser.add_argument("--quiet", action="store_true", help="no line about the run at its end")
    parser.add_argument("-m", action="store_true", dest="as_module", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


@command(
    "run",
    "run a script on the lazy device, and record what happens",
    "Run an unmodified script on the lazy device: modules are placed there when they are called or given to an "
    "optimizer, and what they compute is there; data sets and arrays stay where they are. With --map-cuda, a script "
    "that asks for a GPU gets the lazy device instead, and says itself what is there. At the end the recording of the "
    "run is written for `ltc doctor`, `ltc explain`, `ltc report` and `ltc dump`. The exit status is the script's own.",
    _add_options,
    epilog=(
        "examples:\n"
        "  ltc run train.py --epochs 3\n"
        "  ltc run --map-cuda --report report.html train.py\n"
        "  ltc run --backend inductor --set fallback=error -m package.train"
    ),
)
def _run(options: argparse.Namespace) -> int:
    changes = dict(parse_setting(text) for text in options.changes)
    if options.backend is not None:
        changes["backend"] = options.backend
    with torch_state(options.script, options.arguments, options.as_module):
        # Not for a while: what happens when the process ends follows the settings too.
        for name, value in changes.items():
            setattr(settings, name, value)
        history.clear()
        with ExitStack() as stack:
            if options.map_cuda:
                stack.enter_context(cuda_names())
            elif not options.no_placement:
                stack.enter_context(placement())
            stack.enter_context(always_in_libraries())
            status = run_script(options.script, options.as_module)
        status = _wait(status)
        try:
            recording = history.recording()
        except Exception as error:
            # Whatever is wrong with what we keep, the script has run, and its status counts.
            note(f"what happened could not be put together: {error!r}")
            return status or 1
    return _finish(options, recording, status)


def _wait(status: int) -> int:
    """Return when everything that was recorded has run, as eager would have run it; an error that nobody has seen fails
    the run."""
    try:
        api.sync(wait=True)
        api.wait_device_ops()
    except LtcError as error:
        print(f"error: {error}", file=sys.stderr)
        return status or 1
    return status


def _finish(options: argparse.Namespace, recording: Recording, status: int) -> int:
    """Write what was asked for, and say how it went. The script's status is worth more than ours."""
    findings = examine(recording)
    path = options.record or last_run()
    try:
        if path is not None:
            write_recording(path, recording)
    except OSError as error:
        note(f"cannot write what was recorded: {error}")
        # Nobody asked for the recording of the last run in the cache folder.
        status = status if options.record is None else status or 1
        path = None
    try:
        if options.report is not None:
            write_report(options.report, recording, findings)
    except OSError as error:
        note(f"cannot write the report: {error}")
        status = status or 1
    if not options.quiet:
        named = "" if options.record is None else f" {shlex.quote(str(options.record))}"
        note(summary(recording, findings) + (f"; see: ltc doctor{named}" if path is not None else ""))
    return status


def summary(recording: Recording, findings: Sequence[Finding]) -> str:
    """A recording in one line."""
    compiles = sum(not row.loaded for row in recording.compiles)
    loads = len(recording.compiles) - compiles
    parts = [
        count_text(recording.steps, "step"),
        count_text(len(recording.programs) + recording.dropped_programs, "program"),
        count_text(compiles, "compile"),
        *([count_text(loads, "load")] if loads else []),
        count_text(sum(row.count for row in recording.syncs if row.kind == "sync"), "sync"),
        *compiled_runs(recording),
    ]
    found = Counter(finding.severity for finding in findings)
    parts += [count_text(found[severity], severity) for severity in SEVERITIES if found[severity]]
    return ", ".join(parts)


def compiled_runs(recording: Recording) -> list[str]:
    """The part of the runs that the backend's executables ran, as text; nothing where nothing is to be compiled."""
    backend = setting(recording, "backend")
    runs = sum(row.runs for row in recording.programs)
    if not runs or backend in ("", "interpreter"):
        return []
    where = "in compiled code" if backend == "auto" else f"on {backend}"
    return [f"{runs - sum(row.interpreted for row in recording.programs):,} of {count_text(runs, 'run')} {where}"]


def parse_setting(text: str) -> tuple[str, str | int | bool]:
    """The name and the value of "NAME=VALUE"; raises SettingError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingError(f"--set takes NAME=VALUE, got {text!r}", hint="one of " + ", ".join(SETTINGS))
    known = SETTINGS.get(name)
    if known is None:
        near = difflib.get_close_matches(name, SETTINGS, 1)
        others = "one of " + ", ".join(SETTINGS)
        raise SettingError(f"there is no setting '{name}'", hint=f"--set {near[0]}={value}" if near else others)
    try:
        return name, known.parse(value)
    except SettingError as error:
        raise SettingError(f"the setting '{name}' cannot be {value!r}", hint=f"give it {known.allowed()}") from error
