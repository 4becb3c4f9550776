"""Many replays in a row: the losses of a training with jit and graphs are those without, and memory does not grow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.replays import train
from tests.support.graphs import StandInGraphs, graphs_on_the_cpu
from torch_ltc import metrics
from torch_ltc.config import settings


@pytest.fixture(autouse=True)
def graphs() -> Iterator[StandInGraphs]:
    """The CPU has graphs."""
    with settings.scope(backend="interpreter"), graphs_on_the_cpu() as made:
        yield made


@pytest.mark.parametrize("replays", [120, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_replays_with_changing_batches_rates_and_dropout_are_equal_to_recorded_steps(
    replays: int, graphs: StandInGraphs
) -> None:
    expected, _ = train(replays, captured=False)
    assert not graphs.captures
    before = metrics.counter_value("GraphReplay") or 0
    got, sizes = train(replays, captured=True)
    assert got == expected
    assert (metrics.counter_value("GraphReplay") or 0) - before >= replays - 10
    # The worker may not have let go of the last batch when the bytes are counted.
    batch_bytes = 16 * 32 * 4 + 16 * 8
    assert max(sizes) - min(sizes) <= batch_bytes
    assert graphs.alive() <= 4
