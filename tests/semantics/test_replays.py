"""Many replays in a row: the losses of a training with jit and graphs are those without, and memory does not grow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_ltc
from benchmarks.replays import train
from tests.support.graphs import StandInGraphs
from torch_ltc import metrics
from torch_ltc.config import settings
from torch_ltc.execute import capture


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGraphs]:
    """The CPU has graphs."""
    made = StandInGraphs()
    monkeypatch.setitem(capture._by_device, "cpu", made)
    torch_ltc.ir_cache.reset()
    with settings.scope(backend="interpreter"):
        yield made
        torch_ltc.sync(wait=True)
    torch_ltc.ir_cache.reset()


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
