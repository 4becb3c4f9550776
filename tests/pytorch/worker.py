"""`python -m tests.pytorch.worker`: a process that runs tests of one file, and writes a journal while it does.

Reads names of tests from standard input, up to an empty line; with `--names` it lists those of the file, and runs the
first of a sample. A test that takes too long ends the process: the parent sees in the journal which one was under way.
The process ends too, with what its tests have started, when the parent that has it at the other end of a pipe is gone.
"""

import argparse
import faulthandler
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

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
    names = _names()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # PyTorch's test module reads the command line.
    sys.argv[1:] = []
    faulthandler.enable()
    faulthandler.dump_traceback_later(LOAD_S, exit=True)
    by_name = _tests(options.file)
    if options.names is not None:
        names = chosen(list(by_name), options.sample, options.seed)[:BATCH]
        part = options.names.with_suffix(".part")
        part.write_text("\n".join(by_name))
        part.replace(options.names)
    with options.journal.open("a", encoding="utf-8", buffering=1) as journal:
        journal.write(f"{LOADED}\n")

        def begin(word: str) -> None:
            journal.write(f"{word}\n")
            faulthandler.dump_traceback_later(options.time_limit, exit=True)

        for name in names:
            begin(f"{BEGIN}{name}")
            journal.write(by_name[name](lambda: begin(DEVICE)).line() + "\n")
    faulthandler.cancel_dump_traceback_later()


def _names() -> list[str]:
    """The names on standard input; an empty line behind them says that a parent stays at the other end."""
    names = []
    for line in sys.stdin:
        if line == "\n":
            Thread(target=_end_with_parent, daemon=True).start()
            break
        names.append(line.rstrip("\n"))
    return names


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _tests(path: Path) -> dict[str, Test]:
    """The tests of a file by name, each as a function that runs it; it calls its argument before the device begins."""
    if path.parent.name == "lazy":
        return {lazy.name_of(test): partial(lazy.run, test) for test in lazy.tests(lazy.load(path))}
    return {pair.name: partial(harness.run_pair, pair) for pair in harness.pairs(harness.load(path))}


if __name__ == "__main__":
    main()
