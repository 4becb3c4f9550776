"""`python -m tests.ops.sweep`: every operator of PyTorch's test database on the device, against CPU eager.

Owns the command line: which units to run, progress, output and exit status (1 if a failure is not a known gap, or if a
known gap is gone).
"""

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.ops.records import BACKENDS, DTYPES, Report, Unit, Variant
from tests.ops.summary import Summary
from tests.ops.workers import run_units, supported

CHUNK_SIZE = 100
"""Units of one worker process: large enough that starting it does not matter, small enough to bound its memory."""
PROGRESS_EVERY_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # One thread in each process: the samples are tiny, and the order of summation must not depend on the machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    units = select_units(options)
    if not units:
        print("No operator matches: see --only, --dtype and --backend.", file=sys.stderr)
        return 2
    restricted = (options.max_samples, options.sample, options.variant)
    summary = Summary(complete=all(each is None for each in restricted))
    reports = run_units(units, jobs=options.jobs, chunk_size=options.chunk_size, time_limit_s=options.time_limit)
    for report in _with_progress(reports, len(units)):
        summary.reports.append(report)
        if options.json is not None and len(summary.reports) == len(units):
            options.json.write_text(json.dumps(summary.json(), indent=1))
    print(summary.text())
    return 0 if summary.passed() else 1


def select_units(options: argparse.Namespace) -> list[Unit]:
    """The units that the options ask for, backend by backend."""
    chosen = [
        (name, dtypes)
        for number, (name, dtypes) in enumerate(supported())
        if number % options.every == 0 and _matches(name, options.only)
    ]
    template = Unit("", "", "", options.device, options.max_samples, options.sample, options.variant)
    return [
        replace(template, operator=name, dtype=dtype, backend=backend)
        for backend in options.backend or BACKENDS
        for name, dtypes in chosen
        for dtype in options.dtype or DTYPES
        if dtype in dtypes
    ]


def _matches(name: str, patterns: Sequence[str] | None) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.sweep", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="operators by full name or pattern; repeatable")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable; all by default")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="repeatable; both by default")
    parser.add_argument("--device", default="ltc", help='"cpu" compares eager with itself, which tests the sweep')
    parser.add_argument("--max-samples", type=int, metavar="N", help="only the first N samples of each operator")
    parser.add_argument("--sample", type=int, metavar="N", help="only sample number N")
    parser.add_argument("--variant", choices=[each.value for each in Variant], help="only one form of the operator")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th operator")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes at once (2); 0: run here")
    parser.add_argument("--chunk-size", type=int, default=CHUNK_SIZE, metavar="N", help="units of a worker process")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="for one unit (120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all reports to FILE")
    return parser


def _with_progress(reports: Iterator[Report], total: int) -> Iterator[Report]:
    """Passes reports on and says on stderr how far they are: one line that is rewritten, or a line now and then."""
    interactive = sys.stderr.isatty()
    started_s = shown_s = time.monotonic()
    failed = 0
    for number, report in enumerate(reports, start=1):
        failed += bool(report.failures)
        now_s = time.monotonic()
        if now_s - shown_s > (0.2 if interactive else PROGRESS_EVERY_S) or number == total:
            shown_s = now_s
            line = f"{100 * number // total:3d} % {number}/{total} failed {failed} {now_s - started_s:.0f} s"
            unit = report.unit
            line = f"{line} {unit.backend} {unit.dtype} {unit.operator}"
            print(f"\r{line:<110.110}" if interactive else line, end="" if interactive else "\n", file=sys.stderr)
        yield report
    if interactive:
        print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
