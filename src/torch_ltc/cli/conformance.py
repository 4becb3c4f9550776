"""`ltc conformance NAME`: correctness and coverage of a backend, against eager PyTorch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from torch_ltc.cli.output import PROGRESS_EVERY_S, command, print_json
from torch_ltc.testing import Options, Result, State, conformance
from torch_ltc.testing.records import DTYPES, Variant
from torch_ltc.testing.report import name_of

REWRITE_EVERY_S = 0.2
_STDOUT = Path("-")


def _add_options(parser: argparse.ArgumentParser) -> None:
    default = Options()
    parser.add_argument(
        "backend", metavar="NAME", help="a backend's name, package.module:ClassName, or path/to/file.py:ClassName"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PAT",
        help="operators by full name or pattern, semantics cases as semantics/NAME; repeatable",
    )
    parser.add_argument("--dtype", action="append", dest="dtypes", choices=DTYPES, help="repeatable; all by default")
    parser.add_argument("--max-samples", type=int, metavar="N", help="only the first N samples of each operator")
    parser.add_argument("--sample", type=int, metavar="N", help="only sample number N")
    parser.add_argument("--variant", choices=[each.value for each in Variant], help="only one form of the operators")
    parser.add_argument("--quick", action="store_true", help="a fixed part, under a minute unless compiling is slow")
    parser.add_argument("--semantics-only", action="store_true", help="no operators")
    parser.add_argument("--operators-only", action="store_true", help="no semantics")
    parser.add_argument("--forward-only", action="store_true", help="no backward pass, in-place form or out=")
    parser.add_argument(
        "--one-by-one", action="store_false", dest="together", help="each sample in a program of its own from the start"
    )
    parser.add_argument("--strict", action="store_true", help="a program that the backend does not take is a failure")
    parser.add_argument("--every", type=int, default=default.every, metavar="N", help="only each N-th operator")
    parser.add_argument("--jobs", type=int, default=default.jobs, metavar="N", help="worker processes; 0: run here")
    parser.add_argument(
        "--chunk-size", type=int, default=default.chunk_size, metavar="N", help="units of one worker process"
    )
    parser.add_argument(
        "--time-limit",
        dest="time_limit_s",
        type=float,
        default=default.time_limit_s,
        metavar="SECONDS",
        help=f"for an operator with one dtype, or a case ({default.time_limit_s:.0f})",
    )
    parser.add_argument("--device", default=default.device, help='"cpu" compares eager with itself')
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=_STDOUT,
        metavar="FILE",
        help="write everything to FILE, or without FILE print it instead of text",
    )
    parser.add_argument("--all", action="store_true", help="print every failure and every semantics case")


@command(
    "conformance",
    "compare a backend with eager PyTorch: operators and semantics",
    "Compare a backend with eager PyTorch: every operator of PyTorch's test database, and small cases on views, "
    "writes, aliasing, dtypes, random numbers, failures, threads and training. Exit status 0 if nothing is wrong that"
    " is not in a table of known gaps.",
    _add_options,
)
def _run(options: argparse.Namespace) -> int:
    given = {each.name: getattr(options, each.name) for each in fields(Options)}
    # One sample is repeated as a program of its own.
    given["together"] = options.together and options.sample is None
    chosen = {name: value for name, value in given.items() if value is not None}
    report = conformance(options.backend, progress=progress_printer(), **chosen)
    if options.json is _STDOUT:
        print_json(report.json())
        return 0 if report.passed else 1
    if options.json is not None:
        options.json.write_text(json.dumps(report.json(), indent=1), encoding="utf-8")
    print(report.text(everything=options.all))
    return 0 if report.passed else 1


def progress_printer() -> Callable[[Result, int, int], None]:
    """Says on stderr how far a run is: one line that is rewritten, or a line now and then."""
    interactive = sys.stderr.isatty()
    started_s = shown_s = time.monotonic()
    wrong = 0

    def show(result: Result, number: int, total: int) -> None:
        nonlocal shown_s, wrong
        wrong += result.state is State.WRONG
        now_s = time.monotonic()
        if now_s - shown_s < (REWRITE_EVERY_S if interactive else PROGRESS_EVERY_S) and number < total:
            return
        shown_s = now_s
        line = f"{100 * number // total:3d} % {number}/{total} wrong {wrong} {now_s - started_s:.0f} s"
        line = f"{line} {name_of(result.unit)}"
        end = "" if interactive and number < total else "\n"
        print(f"\r{line:<110.110}" if interactive else line, end=end, file=sys.stderr, flush=True)

    return show
