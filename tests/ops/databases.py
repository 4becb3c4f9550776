"""`python -m tests.ops.databases`: every module and optimizer of PyTorch's test databases, against CPU eager.

Exit status 1 if something differs that is not a known gap, or if a known gap is gone.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

# One thread: the order of summation must not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import warnings

import torch

from tests.ops import modules, optimizers

SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.databases", description=__doc__)
    parser.add_argument("names", nargs="*", help="modules as nn.Linear, optimizers as Adam; all by default")
    parser.add_argument("--max-samples", type=int, metavar="N", help="only the first N samples of each module")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th module")
    parser.add_argument("--modules", action="store_true", help="modules alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = set(options.names)
    names = _of(modules.MODULES, chosen)[:: options.every]
    failures = list(
        _failures(modules.sweep(names, options.max_samples), modules.KNOWN_GAPS, options.max_samples is None)
    )
    if not options.modules:
        failures += _failures(optimizers.sweep(_of(optimizers.OPTIMIZERS, chosen)), optimizers.KNOWN_GAPS, True)
    for line in failures:
        print(line)
    print("FAILED" if failures else "passed")
    return 1 if failures else 0


def _of(database: Mapping[str, object], chosen: set[str]) -> list[str]:
    return [name for name in database if not chosen or name in chosen]


def _failures(results: Iterator[tuple[str, list[str]]], gaps: Mapping[str, str], complete: bool) -> Iterator[str]:
    for name, found in results:
        print(f"{name}: {len(found)} differences" if found else f"{name}: equal", flush=True)
        if name not in gaps:
            yield from found[:SHOWN]
        elif complete and not found:
            yield f"{name}: the known gap is gone: {gaps[name]}"


if __name__ == "__main__":
    sys.exit(main())
