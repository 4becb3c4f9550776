"""Captured programs on a stand-in for the graphs of a device: what was recorded happens once, whatever is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from tests.support.graphs import StandInGraphs
from torch_ltc import metrics
from torch_ltc.config import settings
from torch_ltc.debug.history import history
from torch_ltc.events import CaptureEvent, ExecuteEvent, subscribe
from torch_ltc.execute import capture


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGraphs]:
    """The CPU has graphs."""
    made = StandInGraphs()
    monkeypatch.setitem(capture._by_device, "cpu", made)
    torch_ltc.ir_cache.reset()
    history.clear()
    with settings.scope(backend="interpreter"):
        yield made
        torch_ltc.sync(wait=True)
    torch_ltc.ir_cache.reset()


@pytest.fixture
def seen() -> Iterator[list[CaptureEvent | ExecuteEvent]]:
    """Events of captures and executions."""
    events: list[CaptureEvent | ExecuteEvent] = []
    stops = [subscribe(events.append, kind) for kind in (CaptureEvent, ExecuteEvent)]
    yield events
    for stop in stops:
        stop()


def captures(events: list[CaptureEvent | ExecuteEvent]) -> list[CaptureEvent]:
    """The captures among the events."""
    return [event for event in events if isinstance(event, CaptureEvent)]


def train(device: str, make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 12) -> list[Tensor]:
    """Losses and final parameters of a small training with dropout, new batches, and a schedule of the rate."""
    torch.manual_seed(3)
    torch.ltc.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
    batches = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(steps)]
    torch.manual_seed(5)
    torch.ltc.manual_seed(5)
    model.to(device)
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return [item.cpu() for item in (*losses, *(p.detach() for p in model.parameters()))]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw_single"])
def test_training_is_equal_to_eager(name: str, graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]) -> None:
    make: Callable[[nn.Module], torch.optim.Optimizer] = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        "adamw_single": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False),
    }[name]
    expected = train("cpu", make)
    got = train("ltc", make)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
    assert any(event.graphs for event in captures(seen))
    replays = sum(isinstance(event, ExecuteEvent) and event.captured for event in seen)
    assert replays >= 6
    assert metrics.counter_value("GraphReplay") >= replays
    assert "captured as" in str(torch_ltc.explain())


def test_an_output_that_is_still_held_keeps_its_value(graphs: StandInGraphs) -> None:
    kept, expected = [], []
    for step in range(10):
        x = torch.full((3,), float(step)).to("ltc")
        y = x * 2 + 1
        torch_ltc.sync()
        kept.append(y)
        expected.append([2.0 * step + 1] * 3)
    assert [y.tolist() for y in kept] == expected
    assert graphs.made


def test_an_output_that_is_read_while_the_next_execution_is_queued_has_its_value(graphs: StandInGraphs) -> None:
    last = None
    for step in range(20):
        y = torch.full((3,), float(step)).to("ltc") * 3
        torch_ltc.sync()
        if last is not None:
            assert last.tolist() == [3.0 * (step - 1)] * 3
        last = y


def test_a_value_that_goes_round_is_read_before_it_is_written(graphs: StandInGraphs) -> None:
    state = torch.ones(4, device="ltc")
    expected = torch.ones(4)
    for _ in range(12):
        state = state * 1.5 + state.flip(0)
        torch_ltc.sync()
        expected = expected * 1.5 + expected.flip(0)
    assert torch.equal(state.cpu(), expected)
    assert graphs.made


def test_inputs_that_move_and_are_written_are_written_where_they_are(graphs: StandInGraphs) -> None:
    for step in range(10):
        x = torch.arange(6.0).to("ltc")
        x[1:4].add_(step + 1.0)
        view = x.view(2, 3)
        view.mul_(2)
        torch_ltc.sync()
        expected = torch.arange(6.0)
        expected[1:4].add_(step + 1.0)
        expected.mul_(2)
        assert torch.equal(x.cpu(), expected)


def test_a_call_that_cannot_be_captured_runs_between_graphs(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    graphs.refused = frozenset({"aten::cumsum"})
    x = torch.arange(5.0).to("ltc")
    for step in range(10):
        y = (x + 1).cumsum(0).sqrt() + x
        assert torch.equal(y.cpu(), (torch.arange(5.0) + 1).cumsum(0).sqrt() + torch.arange(5.0)), step
    assert [(event.graphs, event.refusal) for event in captures(seen)] == [(2, "")]
    assert "1 calls between graphs" in captures(seen)[0].text


def test_random_numbers_are_those_of_the_seed_whatever_is_replayed(graphs: StandInGraphs) -> None:
    def draw(count: int) -> list[list[float]]:
        torch.ltc.manual_seed(11)
        return [torch.rand(3, device="ltc").add(1).tolist() for _ in range(count)]

    with settings.scope(cuda_graphs="off"):
        expected = draw(10)
    assert draw(10) == expected
    assert draw(10) == expected
    assert graphs.made


def test_nothing_is_captured_when_it_is_off(graphs: StandInGraphs) -> None:
    with settings.scope(cuda_graphs="off"):
        x = torch.ones(3, device="ltc")
        for _ in range(6):
            (x * 5).tolist()
    assert not graphs.made
