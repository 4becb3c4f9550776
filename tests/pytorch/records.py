"""What is known of one test: its name, what became of it, and why; and which tests of a file are run."""

import enum
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

BATCH = 400
"""Tests of one process: a fresh one after that many keeps memory bounded."""
LOADED = "loaded"
BEGIN = "begin "
DEVICE = "device"
"""Lines of a journal beside records: the file is loaded, a test begins, the CPU has passed and the device begins."""

LATE = "an error that depends on data came at the sync"
LATE_WARNING = "the warning of a kernel came at the sync"
"""How the message of a test begins that passes, but for the moment of an error or a warning."""


class Outcome(enum.Enum):
    """What became of a test; the value is the word in results and tables."""

    PASS = "pass"
    FAIL = "fail"
    CRASH = "crash"
    TIMEOUT = "timeout"
    CPU_ONLY = "cpu-only"
    """Passes on the CPU, and PyTorch has it for the CPU alone."""
    SKIPPED = "skipped"
    """Skipped, or expected to fail, on the CPU too."""
    CPU_FAILS = "cpu fails"
    """Does not pass on the CPU with this PyTorch: it says nothing about the device."""


BAD = (Outcome.FAIL, Outcome.CRASH, Outcome.TIMEOUT)
COUNTED = (Outcome.PASS, *BAD, Outcome.CPU_ONLY)
"""The outcomes of tests that pass on the CPU."""


@dataclass(frozen=True)
class Record:
    """The result of one test, a line of a journal."""

    name: str
    outcome: Outcome
    message: str = ""
    trace: str = ""
    cpu_s: float = 0.0
    device_s: float = 0.0

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps({**vars(self), "outcome": self.outcome.value})

    @classmethod
    def parse(cls, line: str) -> "Record":
        """The record that a line holds."""
        values = json.loads(line)
        return cls(**{**values, "outcome": Outcome(values["outcome"])})


def chosen(names: Sequence[str], sample: int, seeds: Sequence[int]) -> list[str]:
    """Some tests of a file, `sample` by each seed; all of them where `sample` is 0 or there are no more.

    A seed draws from what the seeds before it have left, so that each adds as many. They are in the order of the draw:
    what a run has done that was stopped is a fair sample too.
    """
    if not 0 < sample < len(names):
        return sorted(names)
    left, drawn = list(names), list[str]()
    for seed in seeds:
        drawn += random.Random(seed).sample(left, min(sample, len(left)))
        left = sorted(set(names).difference(drawn))
    return drawn
