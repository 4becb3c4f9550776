"""`python -m tests.ops.sweep`: every operator of PyTorch's test database on the device, against CPU eager.

A thin layer above `torch_ltc.testing`: several backends in one run, and a backend that does not take a program fails.
Exit status 1 if a failure is not a known gap, or if a known gap is gone.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_ltc.cli.conformance import progress_printer
from torch_ltc.errors import LtcError
from torch_ltc.testing import Report, conformance
from torch_ltc.testing.records import DTYPES, Variant

BACKENDS = ("interpreter", "torchscript")
CHUNK_SIZE = 100


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # One thread in each process: the samples are tiny, and the order of summation must not depend on the machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    reports: list[Report] = []
    for backend in options.backend or BACKENDS:
        try:
            reports.append(_sweep(backend, options))
        except LtcError as error:
            print(error, file=sys.stderr)
            return 2
        print(reports[-1].text(everything=options.all), end="\n\n")
    passed = all(report.passed for report in reports)
    if options.json is not None:
        options.json.write_text(json.dumps({"passed": passed, "reports": [each.json() for each in reports]}, indent=1))
    return 0 if passed else 1


def _sweep(backend: str, options: argparse.Namespace) -> Report:
    return conformance(
        backend,
        progress=progress_printer(),
        operators_only=True,
        strict=True,
        only=options.only or (),
        dtypes=options.dtype or (),
        device=options.device,
        max_samples=options.max_samples,
        sample=options.sample,
        variant=options.variant,
        forward_only=options.forward_only,
        together=options.together,
        every=options.every,
        jobs=options.jobs,
        chunk_size=options.chunk_size,
        time_limit_s=options.time_limit,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.sweep", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="operators by full name or pattern; repeatable")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable; all by default")
    parser.add_argument(
        "--backend",
        action="append",
        help="a name, module:Class or file.py:Class; repeatable; two built-in ones by default",
    )
    parser.add_argument("--device", default="ltc", help='"cpu" compares eager with itself, which tests the sweep')
    parser.add_argument("--max-samples", type=int, metavar="N", help="only the first N samples of each operator")
    parser.add_argument("--sample", type=int, metavar="N", help="only sample number N")
    parser.add_argument("--variant", choices=[each.value for each in Variant], help="only one form of the operator")
    parser.add_argument("--forward-only", action="store_true", help="no backward pass, in-place form or out=")
    parser.add_argument("--together", action="store_true", help="the samples of an operator in one program at first")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th operator")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes at once (2); 0: run here")
    parser.add_argument("--chunk-size", type=int, default=CHUNK_SIZE, metavar="N", help="units of a worker process")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="for one unit (120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all reports to FILE")
    parser.add_argument("--all", action="store_true", help="print every failure, not one of each kind")
    return parser


if __name__ == "__main__":
    sys.exit(main())
