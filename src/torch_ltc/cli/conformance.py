"""`ltc conformance NAME`: what of PyTorch a backend gets right, and how much of it it takes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch_ltc.cli.command import Command
from torch_ltc.cli.output import PROGRESS_EVERY_S, print_json
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
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable; all by default")
    parser.add_argument("--max-samples", type=int, metavar="N", help="only the first N samples of each operator")
    parser.add_argument("--sample", type=int, metavar="N", help="only sample number N")
    parser.add_argument("--variant", choices=[each.value for each in Variant], help="only one form of the operators")
    parser.add_argument("--quick", action="store_true", help="a fixed part, under a minute unless compiling is slow")
    parser.add_argument("--semantics-only", action="store_true", help="no operators")
    parser.add_argument("--operators-only", action="store_true", help="no semantics")
    parser.add_argument("--forward-only", action="store_true", help="no backward pass, in-place form or out=")
    parser.add_argument("--one-by-one", action="store_true", help="each sample in a program of its own from the start")
    parser.add_argument("--strict", action="store_true", help="a program that the backend does not take is a failure")
    parser.add_argument("--every", type=int, default=default.every, metavar="N", help="only each N-th operator")
    parser.add_argument("--jobs", type=int, default=default.jobs, metavar="N", help="worker processes; 0: run here")
    parser.add_argument(
        "--chunk-size", type=int, default=default.chunk_size, metavar="N", help="units of one worker process"
    )
    parser.add_argument(
        "--time-limit",
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


def _run(options: argparse.Namespace) -> int:
    report = conformance(
        options.backend,
        progress=progress_printer(),
        only=options.only or (),
        dtypes=options.dtype or (),
        max_samples=options.max_samples,
        sample=options.sample,
        variant=options.variant,
        quick=options.quick,
        semantics_only=options.semantics_only,
        operators_only=options.operators_only,
        forward_only=options.forward_only,
        together=not options.one_by_one and options.sample is None,
        strict=options.strict,
        every=options.every,
        jobs=options.jobs,
        chunk_size=options.chunk_size,
        time_limit_s=options.time_limit,
        device=options.device,
    )
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


COMMAND = Command(
    name="conformance",
    help="compare a backend with eager PyTorch: operators and semantics",
    description=(
        "Compare a backend with eager PyTorch: every operator of PyTorch's test database, and small cases on views, "
        "writes, aliasing, dtypes, random numbers, failures, threads and training. Exit status 0 if nothing is "
        "wrong that is not in a table of known gaps."
    ),
    add_options=_add_options,
    run=_run,
)
