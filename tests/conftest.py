"""Settings for all tests: programs are compiled when they are due, and nothing is kept on disk.

So that a test can count what was compiled and see what ran. `LTC_TEST_TIERS=background` runs them with the default
instead: what they compute must be the same. Tests of what is compiled when (`WHEN_DUE`) stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

TIERS = os.environ.get("LTC_TEST_TIERS", "blocking")

# Tests that count compilations, or that look at a run of a certain number which is to be the backend's.
WHEN_DUE = (
    "semantics/test_api.py::test_a_program_becomes_hot",
    "semantics/test_api.py::test_compiled_programs_are_bounded",
    "semantics/test_backend_failures.py",
    "semantics/test_backend_refusals.py",
    "semantics/test_backends.py",
    "semantics/test_coverage.py::test_a_training_step_is_one_program",
    "semantics/test_programs.py",
    "semantics/test_promotion.py",
    "semantics/test_long_programs.py::test_compiled_long_program",
    # The memory that compiling takes for a while is not to fall between two measurements.
    "semantics/test_long_programs.py::test_a_million_chained_operations",
    "models/test_steady_state.py",
    "debug/test_explain.py",
    "debug/test_history.py",
    "unit/test_memory.py::test_a_compiled_program_without_memory",
    "unit/test_nan.py::test_compiled_programs_are_searched_too",
    "unit/test_repro.py",
    "unit/test_validate.py",
)
# Tests of the same kind that look at a run which they share with others: left out.
SHARED = (
    "models/test_optimizers.py::test_steady_step_is_one_program_compiled_once",
    "models/test_training.py::test_compiles_stop_after_the_third_step",
)


def _is_one_of(request: pytest.FixtureRequest, names: tuple[str, ...]) -> bool:
    return any(f"tests/{name}" in request.node.nodeid for name in names)


@pytest.fixture(autouse=True)
def tiers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The settings, here and for processes that a test starts."""
    if TIERS != "blocking" and _is_one_of(request, SHARED):
        pytest.skip("looks at what was compiled when")
    chosen = "blocking" if _is_one_of(request, WHEN_DUE) else TIERS
    monkeypatch.setenv("LTC_TIERS", chosen)
    monkeypatch.setenv("LTC_CACHE_DIR", "off")
    # One line of a test often compiles one program after the other.
    monkeypatch.setenv("LTC_RECOMPILES", "allow")
    # Imported late: some tests look at what importing the package does.
    settings = pytest.importorskip("torch_ltc.config").settings
    with settings.scope(tiers=chosen, cache_dir="off", recompiles="allow"):
        # A program that another test has recorded first has the lines of that test.
        pytest.importorskip("torch_ltc").ir_cache.reset()
        yield
    if chosen == "background":
        # What one test has begun must not disturb the next.
        pytest.importorskip("torch_ltc").wait_for_compiles()
