"""`python -m tests.pytorch.worker`: a process that runs tests of one file, and writes a journal while it does.

Reads names of tests from standard input; with `--names` it lists those of the file, and runs the first of a sample. A
test that takes too long ends the process: the parent sees in the journal which one was under way.
"""

import argparse
import faulthandler
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.pytorch import harness, lazy
from tests.pytorch.records import BATCH, BEGIN, DEVICE, LOADED, Record, chosen

Test = Callable[[Callable[[], None]], Record]

LOAD_S = 300.0
"""Seconds that a file may take to load."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, required=True)
    parser.add_argument("--names", type=Path, help="write the names of all tests to this file")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, nargs="*", default=())
    options = parser.parse_args()
    names = sys.stdin.read().split()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # PyTorch's test module reads the command line.
    sys.argv[1:] = []
    faulthandler.enable()
    faulthandler.dump_traceback_later(LOAD_S, exit=True)
    by_name = _tests(options.file)
    if options.names is not None:
        names = chosen(list(by_name), options.sample, options.seed)[:BATCH]
        options.names.write_text("\n".join(by_name))
    with options.journal.open("a", encoding="utf-8", buffering=1) as journal:
        journal.write(f"{LOADED}\n")

        def begin(word: str) -> None:
            journal.write(f"{word}\n")
            faulthandler.dump_traceback_later(options.time_limit, exit=True)

        for name in names:
            begin(f"{BEGIN}{name}")
            journal.write(by_name[name](lambda: begin(DEVICE)).line() + "\n")
    faulthandler.cancel_dump_traceback_later()


def _tests(path: Path) -> dict[str, Test]:
    """The tests of a file by name, each as a function that runs it; it calls its argument before the device begins."""
    if path.parent.name == "lazy":
        return {lazy.name_of(test): partial(lazy.run, test) for test in lazy.tests(lazy.load(path))}
    return {pair.name: partial(harness.run_pair, pair) for pair in harness.pairs(harness.load(path))}


if __name__ == "__main__":
    main()
