"""A part of the operator sweep that fits a test run; the whole is `python -m tests.ops.sweep`.

All operators with float32 and their first two samples in the interpreter, and every sixth operator in TorchScript,
forward, backward, in place and into `out=`. Each test is one worker process, so a crash fails one test.
"""

import functools

import pytest

from tests.ops.records import Unit
from tests.ops.summary import Summary
from tests.ops.workers import run_units, supported

CHUNKS = {"interpreter": 16, "torchscript": 4}
EVERY = {"interpreter": 1, "torchscript": 6}
SAMPLES = 2
TIME_LIMIT_S = 60.0


@functools.cache
def operators() -> list[str]:
    return [name for name, dtypes in supported() if "float32" in dtypes]


@pytest.mark.parametrize(
    ("backend", "chunk"), [(backend, chunk) for backend, count in CHUNKS.items() for chunk in range(count)]
)
def test_operators_equal_eager(backend: str, chunk: int) -> None:
    names = operators()[:: EVERY[backend]][chunk :: CHUNKS[backend]]
    units = [Unit(name, "float32", backend, max_samples=SAMPLES) for name in names]
    reports = run_units(units, jobs=1, chunk_size=len(units), time_limit_s=TIME_LIMIT_S)
    summary = Summary(complete=False, reports=list(reports))
    assert summary.passed(), summary.text()


def test_database_has_the_operators_we_count_on() -> None:
    # Fewer than this means that the sweep silently shrank: torch 2.13 has 677 operators with float32.
    assert len(operators()) > 600
