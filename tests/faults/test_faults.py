"""One call fails, at every place and in every way; `make faults` runs more calls of each place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cases import cases_of, places, run_case, survey
from tests.faults.places import Injector
from tests.faults.workloads import WORKLOADS, Workload

# These compile for long, or start processes.
_QUICK = [workload for workload in WORKLOADS if workload.name not in ("captured functional", "compiler process")]


@pytest.fixture(scope="module")
def injector() -> Iterator[Injector]:
    """All places."""
    with places() as made:
        yield made


@pytest.mark.parametrize("workload", _QUICK, ids=lambda workload: workload.name)
def test_nothing_is_lost_when_the_last_call_of_a_place_fails(workload: Workload, injector: Injector) -> None:
    counts = survey(workload, injector)
    assert counts
    wrong = [
        f"{case}: {outcome.wrong} {outcome.errors}"
        for case in cases_of(workload, counts, injector, most=1)
        if (outcome := run_case(case, injector)).wrong
    ]
    assert not wrong, "\n".join(wrong)
