"""A part of the operator sweep that fits a test run; the whole is `python -m tests.ops.sweep`.

All operators with float32 and their first two samples in the interpreter, and every sixth operator in TorchScript,
forward, backward, in place and into `out=`. Each test is one worker process, so a crash fails one test.
"""

import functools

import pytest

from torch_ltc.testing.gaps import Gaps
from torch_ltc.testing.records import Unit
from torch_ltc.testing.report import Report
from torch_ltc.testing.suite import repeat_command
from torch_ltc.testing.workers import run_units, supported

CHUNKS = {"interpreter": 16, "torchscript": 4}
EVERY = {"interpreter": 1, "torchscript": 6}
SAMPLES = 2
TIME_LIMIT_S = 60.0


@functools.cache
def operators() -> list[str]:
    return [each.name for each in supported() if "float32" in each.dtypes]


@pytest.mark.parametrize(
    ("backend", "chunk"), [(backend, chunk) for backend, count in CHUNKS.items() for chunk in range(count)]
)
def test_operators_equal_eager(backend: str, chunk: int) -> None:
    names = operators()[:: EVERY[backend]][chunk :: CHUNKS[backend]]
    units = [Unit(name, "float32", backend, max_samples=SAMPLES) for name in names]
    results = run_units(units, jobs=1, chunk_size=len(units), time_limit_s=TIME_LIMIT_S)
    report = Report(backend, Gaps({}), repeat_command, list(results), complete=False, strict=True)
    assert report.passed, report.text()


def test_database_has_the_operators_we_count_on() -> None:
    # Fewer than this means that the sweep silently shrank: torch 2.13 has 677 operators with float32.
    assert len(operators()) > 600
