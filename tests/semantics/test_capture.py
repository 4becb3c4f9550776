"""Captured programs on a stand-in for the graphs of a device: what was recorded happens once, whatever is replayed."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from tests.support.backends import FunctionalBackend, record, registered
from tests.support.graphs import StandInGraphs, graphs_on_the_cpu
from torch_ltc import metrics
from torch_ltc.backends import interpreter
from torch_ltc.config import settings
from torch_ltc.device import uploads
from torch_ltc.errors import LtcWarning
from torch_ltc.events import CaptureEvent, ExecuteEvent, GraphsDroppedEvent, subscribe
from torch_ltc.execute import capture, captured_program
from torch_ltc.execute.graph_cache import graph_cache
from torch_ltc.lowering.interface import Arguments
from torch_ltc.program.instruction import Call
from torch_ltc.record.buffer import buffer_of
from torch_ltc.testing import conformance


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGraphs]:
    """The CPU has graphs."""
    monkeypatch.setattr(graph_cache, "_warned", False)
    with settings.scope(backend="interpreter"), graphs_on_the_cpu() as made:
        yield made


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


def test_calls_with_changing_numbers_leave_the_rest_captured(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The calls of an optimizer that works on one tensor at a time are not worth graphs; forward and backward are one.
    monkeypatch.setattr(capture, "_MOST_GRAPHS", 2)
    monkeypatch.setattr(captured_program, "_MANY_GRAPHS", 2)
    monkeypatch.setattr(captured_program, "_LEAST_OPERANDS", 12)
    make: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(  # noqa: E731
        model.parameters(), lr=0.01, foreach=False
    )
    expected = train("cpu", make)
    got = train("ltc", make)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert {event.graphs for event in captures(seen)} == {1}
    assert "calls between graphs" in captures(seen)[0].text


@pytest.mark.parametrize(
    ("direct", "expected"),
    [
        ({2}, "2 * 6"),
        ({0, 8}, "* 7 *"),
        # One or two graphs, however short.
        (set(range(8)), "* * * * * * * * 1"),
        # Three, of which those of one call are not worth it.
        ({1, 3}, "* * * * 5"),
        ({2, 5}, "2 * 2 * 3"),
    ],
)
def test_few_calls_between_others_are_worth_no_graph_where_there_are_many(
    direct: set[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_program, "_MANY_GRAPHS", 2)
    monkeypatch.setattr(captured_program, "_LEAST_OPERANDS", 4)
    program, _ = record(lambda x: [x := x + x for _ in range(9)], torch.ones(2))
    segments = captured_program.segments_of(list(program.calls), direct)
    assert [call for segment in segments for call in segment.calls] == list(program.calls)
    assert all(len(segment.calls) == 1 for segment in segments if segment.direct)
    assert " ".join("*" if segment.direct else str(len(segment.calls)) for segment in segments) == expected


def test_a_program_of_calls_that_cannot_be_captured_is_left_alone(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    x = torch.ones(3).to("ltc")
    for step in range(8):
        assert (x * float(step)).tolist() == [step] * 3
    assert [event.graphs for event in captures(seen)] == [0]
    assert re.search(r"aten::mul.* at .*test_capture.py:\d+.*: all of its calls", captures(seen)[0].refusal)


def test_an_output_that_is_still_held_keeps_its_value(graphs: StandInGraphs) -> None:
    kept, expected = [], []
    for step in range(10):
        x = torch.full((3,), float(step)).to("ltc")
        y = x * 2 + 1
        torch_ltc.sync()
        kept.append(y)
        expected.append([2.0 * step + 1] * 3)
    assert [y.tolist() for y in kept] == expected
    assert graphs.captures


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
    assert graphs.captures


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


def test_an_output_that_the_next_replay_writes_to_does_not_spoil_its_output(graphs: StandInGraphs) -> None:
    def run(device: str) -> list[Tensor]:
        found = []
        for _ in range(5):
            values = [torch.full((3,), 0.5 + i, device=device) for i in range(4)]
            # Each program ends with an output to which the next one, which is the same, writes; and so a view of it.
            last = torch.full((2, 3), 9.0, device=device)
            for value in values:
                last.add_(0.25)
                last[1].mul_(2)
                value.add_(last.sum(0))
                last = torch.stack([value, value]).sqrt()
                found.append(value.sum().item())
            found += [*values, last]
        return [torch.as_tensor(each).cpu() for each in found]

    expected = run("cpu")
    for found, wanted in zip(run("ltc"), expected, strict=True):
        assert torch.equal(found, wanted)


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
    assert re.search(r"the first aten::cumsum at .*test_capture.py:\d+", captures(seen)[0].text)
    assert re.search(r"captured as 2 graphs: .*aten::cumsum at .*; \d replays", str(torch_ltc.explain()))


def test_a_call_that_fails_while_others_are_captured_loses_what_depends_on_it_alone(graphs: StandInGraphs) -> None:
    x = torch.arange(4).to("ltc")
    with settings.scope(cuda_graphs="always"):
        for factor in (2, 0):
            # The number changes: its call runs by itself, and a graph of the others is tried after it.
            divisors = x * factor
            quotients, kept = 8 // divisors[1:], x + 5
            torch_ltc.sync()
            assert not factor or quotients.tolist() == [4, 2, 1]
        with pytest.raises(RuntimeError, match=r"aten::floor_divide.*ZeroDivisionError") as error:
            quotients.tolist()
        assert f"{Path(__file__).name}:" in str(error.value)
        assert kept.tolist() == [5, 6, 7, 8]
        assert divisors.tolist() == [0] * 4


def test_a_call_that_fails_between_graphs_loses_what_depends_on_it_alone(
    graphs: StandInGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs.refused = frozenset({"aten::cumsum"})
    run = captured_program.run_call

    def failing(call: Call, value_of: Any, arguments: Arguments) -> dict[int, Any]:
        if call.name == "aten::cumsum" and graphs.captures:
            raise RuntimeError("no sums")
        return run(call, value_of, arguments)

    monkeypatch.setattr(captured_program, "run_call", failing)
    x = torch.arange(4.0).to("ltc")
    with settings.scope(cuda_graphs="always"):
        for step in range(3):
            before, sums, after = x + step, (x * 2).cumsum(0) + 1, x + 5
            torch_ltc.sync()
            if step < 2:
                assert sums.tolist() == [1, 3, 7, 13]
            else:
                with pytest.raises(RuntimeError, match=r"aten::cumsum.*no sums"):
                    sums.tolist()
            assert before.tolist() == [step, step + 1, step + 2, step + 3]
            assert after.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("way", ["out=", "resize_"])
def test_an_output_whose_memory_is_resized_is_not_written_by_the_next_replay(way: str, graphs: StandInGraphs) -> None:
    x, kept = torch.arange(12.0).to("ltc"), []
    with settings.scope(cuda_graphs="always"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(12):
            y = torch.ones(2, device="ltc") * 2 + 3
            torch_ltc.sync(wait=True)
            assert y.tolist() == [5, 5], step
            if step % 2:
                kept.append(y)
                torch.add(x, step, out=y) if way == "out=" else y.resize_(12).copy_(x + step)
    assert graphs.captures > 1
    for place, tensor in enumerate(kept):
        assert tensor.tolist() == [n + 1 + 2 * place for n in range(12)]


def test_random_numbers_are_those_of_the_seed_whatever_is_replayed(graphs: StandInGraphs) -> None:
    def draw(count: int) -> list[list[float]]:
        torch.ltc.manual_seed(11)
        return [torch.rand(3, device="ltc").add(1).tolist() for _ in range(count)]

    with settings.scope(cuda_graphs="off"):
        expected = draw(10)
    assert draw(10) == expected
    assert draw(10) == expected
    assert graphs.captures


def test_nothing_is_captured_when_it_is_off(graphs: StandInGraphs) -> None:
    with settings.scope(cuda_graphs="off"):
        x = torch.ones(3, device="ltc")
        for _ in range(6):
            (x * 5).tolist()
    assert not graphs.captures


# ---- memory ---------------------------------------------------------------------------------------------------------


def run_often(factor: float, times: int = 6) -> None:
    """Run one of several programs, often enough to be captured."""
    shape = int(factor)
    x = torch.ones(shape).to("ltc")
    for _ in range(times):
        assert (x * 2 + x).tolist() == [3.0] * shape
        torch_ltc.sync(wait=True)


def test_graphs_that_were_not_used_for_longest_are_dropped(graphs: StandInGraphs) -> None:
    dropped: list[GraphsDroppedEvent] = []
    stop = subscribe(dropped.append, GraphsDroppedEvent)
    with settings.scope(graph_bytes=2500):
        run_often(1)
        run_often(2)
        assert torch.ltc.memory_stats()["graphs.count"] == 2
        assert torch.ltc.memory_stats()["graphs.bytes"] >= 2000
        assert "in 2 captured programs" in torch.ltc.memory_summary()
        run_often(1)
        run_often(3)
        assert graphs.alive() == 2
        assert [(event.programs, event.reason) for event in dropped] == [(1, "the setting graph_bytes")]
        captures = graphs.captures
        run_often(1)
        assert graphs.captures == captures
        # The one that was dropped is left alone for a while, and captured again when it goes on running.
        run_often(2)
        assert graphs.captures == captures
        run_often(2, 30)
        assert graphs.captures == captures + 1
    stop()
    assert metrics.counter_value("GraphDropped") >= 2


def test_graphs_of_programs_that_are_forgotten_hold_no_memory(graphs: StandInGraphs) -> None:
    run_often(1)
    assert graphs.alive() == 1
    torch_ltc.ir_cache.reset()
    torch_ltc.sync(wait=True)
    assert graphs.alive() == 0
    assert torch.ltc.memory_stats()["graphs.count"] == 0


def test_graphs_that_a_program_let_go_of_are_not_counted(graphs: StandInGraphs) -> None:
    run_often(1)
    assert torch.ltc.memory_stats()["graphs.count"] == 1
    with settings.scope(cuda_graphs="off"):
        run_often(1, 1)
    assert (graphs.alive(), torch.ltc.memory_stats()["graphs.count"]) == (0, 0)
    run_often(1)
    assert torch.ltc.memory_stats()["graphs.bytes"] >= 1000


def test_capturing_without_memory_drops_other_graphs_and_says_so_once(graphs: StandInGraphs) -> None:
    graphs.room_bytes = 1000
    run_often(1)
    with pytest.warns(LtcWarning, match="graphs of 1 programs .* were dropped"):
        run_often(2)
    assert graphs.alive() == 1
    run_often(3)
    assert graphs.alive() == 1


def test_a_program_whose_graphs_never_fit_is_left_alone(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    graphs.room_bytes = 10
    run_often(1, 12)
    assert [event.refusal for event in captures(seen)] == ["there is no memory for its graphs"]


def test_a_call_without_memory_drops_graphs_and_runs_again(
    graphs: StandInGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_often(1)
    run = interpreter.run_recorded_call

    def scarce(call: Call, values: list[Any], arguments: Arguments) -> None:
        if call.name == "aten::sqrt" and graphs.alive():
            raise torch.OutOfMemoryError("no room")
        run(call, values, arguments)

    monkeypatch.setattr(interpreter, "run_recorded_call", scarce)
    with pytest.warns(LtcWarning, match="graphs of 1 programs"):
        assert torch.full((2,), 4.0).to("ltc").sqrt().tolist() == [2.0, 2.0]
    assert graphs.alive() == 0


@pytest.mark.parametrize("way", ["to", "copy_"])
def test_an_upload_without_memory_drops_graphs_and_is_tried_again(
    graphs: StandInGraphs, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    run_often(1)
    target = torch.empty(2, device="ltc")
    original = uploads._upload

    def scarce(source: Tensor, copy: uploads.Copy, non_blocking: bool) -> Tensor:
        if graphs.alive():
            raise torch.OutOfMemoryError("no room")
        return original(source, copy, non_blocking)

    monkeypatch.setattr(uploads, "_upload", scarce)
    source = torch.full((2,), 4.0)
    with pytest.warns(LtcWarning, match="graphs of 1 programs"):
        made = source.to("ltc") if way == "to" else target.copy_(source)
        assert made.tolist() == [4.0, 4.0]
    assert graphs.alive() == 0


def _shifted(x: Tensor) -> Tensor:
    return (x * 2).relu() + 1


def test_results_of_a_replay_stay_when_an_execution_without_graphs_lies_between(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    held = []
    for number in range(16):
        x = torch.full((3,), float(number)).to("ltc")
        with settings.scope(cuda_graphs="off" if number == 10 else "always"):
            held.append(_shifted(x))
            torch_ltc.sync()
    assert [y.tolist() for y in held] == [[2.0 * number + 1] * 3 for number in range(16)]
    assert captures(seen)


def test_results_of_a_replay_stay_when_an_execution_has_lost_an_input(graphs: StandInGraphs) -> None:
    table, rows = torch.ones(4, 3).to("ltc"), torch.tensor(9).to("ltc")
    held = []
    for number in range(8):
        held.append(_shifted(torch.full((3,), float(number)).to("ltc")))
        torch_ltc.sync()
    with pytest.raises(torch_ltc.errors.LtcError):
        lost = nn.functional.embedding(rows, table)
        torch_ltc.sync(wait=True)
    lost = _shifted(lost)
    with pytest.raises(torch_ltc.errors.LtcError):
        lost.tolist()
    for number in range(8, 12):
        held.append(_shifted(torch.full((3,), float(number)).to("ltc")))
        torch_ltc.sync()
    assert [y.tolist() for y in held] == [[2.0 * number + 1] * 3 for number in range(12)]


def test_results_without_elements_that_are_resized_later_have_memory_of_their_own(graphs: StandInGraphs) -> None:
    kept = []
    for step in range(8):
        empty = torch.empty((1, 0), device="ltc")
        total = empty.sum()
        torch_ltc.sync()
        torch.full((2,), float(step), out=empty)
        torch_ltc.sync()
        kept.append((empty, total))
    assert [empty.tolist() for empty, _ in kept] == [[float(step)] * 2 for step in range(8)]
    assert graphs.captures


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("held", [True, False])
def test_inputs_of_which_a_program_sees_more_than_their_elements_are_captured(
    count: int, held: bool, graphs: StandInGraphs
) -> None:
    kept, made = [], []
    for step in range(8):
        x = torch.arange(step, step + 3.0).to("ltc")
        part = torch.empty(0, device="ltc").set_(x.untyped_storage(), 0, (count,), (1,))
        torch_ltc.sync()
        made.append((part.as_strided((3,), (1,)) + 1).tolist())
        kept += [x, part] if held else [x]
    assert made == [[step + 1.0, step + 2.0, step + 3.0] for step in range(8)]
    assert graphs.captures


def test_a_slot_is_loaded_from_memory_that_is_smaller_or_larger(graphs: StandInGraphs) -> None:
    made = []
    for step in range(8):
        x = torch.arange(step, step + 2.0 + step % 3).to("ltc")
        part = torch.empty(0, device="ltc").set_(x.untyped_storage(), 0, (1,), (1,))
        torch_ltc.sync()
        made.append(part.as_strided((2,), (1,)).mul_(2).tolist())
        assert x[1].item() == 2 * step + 2
    assert made == [[2.0 * step, 2.0 * step + 2] for step in range(8)]
    assert graphs.captures


def test_inputs_and_results_whose_elements_share_memory_are_captured(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    kept, expected = [], []
    for step in range(10):
        row = torch.tensor([[float(step)]]).to("ltc").expand(3, 4)
        torch_ltc.sync()
        made = (row + 1).sum(0, keepdim=True)
        wide = made[:, :1].expand(3, 4)
        torch_ltc.sync()
        kept.append(wide)
        expected.append([[3.0 * (step + 1)] * 4] * 3)
    assert [wide.tolist() for wide in kept] == expected
    assert graphs.captures
    assert not any(event.refusal for event in captures(seen))


def test_calls_of_solvers_are_never_captured(graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]) -> None:
    graphs.refused = frozenset({"aten::linalg_cholesky_ex", "aten::_linalg_eigh"})
    plain = torch.eye(3) * 4
    x = plain.to("ltc")
    for _ in range(8):
        factor = torch.linalg.cholesky_ex(x + 1).L * 2
        values = torch.linalg.eigh(factor @ factor.mT).eigenvalues + 1
        expected = torch.linalg.cholesky_ex(plain + 1).L * 2
        assert torch.equal(values.cpu(), torch.linalg.eigh(expected @ expected.mT).eigenvalues + 1)
    # The first attempt succeeds: nothing had to fail in order to be left out.
    assert [(event.graphs, event.refusal) for event in captures(seen)] == [(3, "")]
    assert graphs.captures == 3
    assert "2 calls between graphs" in captures(seen)[0].text


def test_a_slot_that_cannot_be_made_does_not_fail_the_step(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Any, tensors: Any) -> None:
        raise RuntimeError("no such slot")

    monkeypatch.setattr(captured_program._Slot, "load", load)
    for step in range(8):
        x = torch.full((3,), float(step)).to("ltc")
        assert (x * 2 + 1).tolist() == [2.0 * step + 1] * 3
    assert [event.refusal for event in captures(seen)] == ["RuntimeError: no such slot"]


def test_captured_programs_pass_the_cases_of_the_conformance_suite(graphs: StandInGraphs) -> None:
    with settings.scope(cuda_graphs="always"):
        report = conformance("interpreter", semantics_only=True, quick=True, jobs=0)
    # A graph of a device raises no errors that depend on data, as the stand-in does.
    wrong = {result.unit.case for result in report if result.failures}
    assert wrong <= {"error_in_the_middle", "error_and_writes"}, report.text()
    assert graphs.captures > 50


def test_memory_stays_where_it_is_when_a_program_is_captured(graphs: StandInGraphs) -> None:
    # What is captured is known by its addresses: another tensor may get one that is free.
    x = torch.zeros(1000).to("ltc")
    held = buffer_of(x)
    where = held.data.data_ptr()
    for _ in range(6):
        x.add_(1)
        torch_ltc.sync(wait=True)
    assert graphs.captures
    assert held.data.data_ptr() == where
    assert x.sum().item() == 6000


def test_a_program_that_resizes_memory_is_left_alone(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    for _ in range(8):
        out = torch.empty(0).to("ltc")
        torch.ltc.manual_seed(5)
        torch.randn(3, out=out)
        torch.manual_seed(5)
        assert torch.equal(out.cpu(), torch.randn(3))
    assert [event.refusal.partition(": ")[2] for event in captures(seen)] == ["it may move memory to another place"]


def test_a_program_whose_call_resizes_a_target_is_left_alone(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    data = torch.tensor([[3.0, 1.0, 3.0]])
    for _ in range(8):
        x, out = data.to("ltc"), (torch.empty(0).to("ltc"), torch.empty(0, dtype=torch.int64).to("ltc"))
        torch_ltc.sync()
        torch.mode(x, 1, out=out)
        assert out[0].tolist() == [3.0]
    assert all("it may move memory" in event.refusal for event in captures(seen))


def test_running_statistics_are_captured(graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    model = copy.deepcopy(plain).to("ltc")
    batches = [torch.randn(4, 2, 6, 6) for _ in range(8)]
    for batch in batches:
        for each, images in ((plain, batch), (model, batch.to("ltc"))):
            each.zero_grad()
            each(images).sum().backward()
        torch_ltc.sync()
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert graphs.captures
    assert not any(event.refusal for event in captures(seen))


def test_a_program_that_looks_at_its_data_is_left_alone(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    x = torch.eye(3).to("ltc")
    for _ in range(8):
        assert torch.linalg.pinv(x * 2).tolist() == (torch.eye(3) / 2).tolist()
    assert ["it reads data on the host" in event.refusal for event in captures(seen)] == [True]


def test_a_program_without_calls_is_run(graphs: StandInGraphs) -> None:
    with settings.scope(cuda_graphs="always"):
        for _ in range(4):
            assert torch.arange(3.0).to("ltc").view(3, 1).tolist() == [[0.0], [1.0], [2.0]]
            assert torch.eye(3).to("ltc").to_sparse().to_dense().tolist() == torch.eye(3).tolist()


class _OnDevice(FunctionalBackend):
    """Compiled code that takes its numbers as tensors of the device."""

    name = "on_device"
    numbers_on_device = True


def test_changing_numbers_of_compiled_code_lie_in_memory_that_its_graph_reads(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    x = torch.arange(4.0)
    given = x.to("ltc")
    with registered(_OnDevice()), settings.scope(backend="on_device", tiers="blocking"):
        for step in range(1, 14):
            first, second = 0.1 * step, 0.1 * (step if step < 9 else -step)
            got = given * first + given * second
            torch.testing.assert_close(got.cpu(), x * first + x * second, rtol=0, atol=0)
        torch_ltc.sync(wait=True)
    # Numbers that were equal share memory, until they are not.
    assert [event.graphs for event in captures(seen)] == [1, 1]
    runs = [event for event in seen if isinstance(event, ExecuteEvent)]
    assert sum(event.captured for event in runs) >= 8


def test_adam_of_compiled_code_is_captured(graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]) -> None:
    def run(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        batch = torch.randn(3, 4)
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(batch.to(device)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = run("cpu")
    with registered(_OnDevice()), settings.scope(backend="on_device", tiers="blocking"):
        got = run("ltc")
        torch_ltc.sync(wait=True)
    torch.testing.assert_close(got, expected)
    assert {event.graphs for event in captures(seen)} == {1}
    assert not any(event.refusal for event in captures(seen))


def test_numbers_of_compiled_code_that_lie_on_the_host_are_not_captured(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture.Capture, "_may_vary", lambda self, computation: False)
    x = torch.ones(3).to("ltc")
    with registered(_OnDevice()), settings.scope(backend="on_device", tiers="blocking"):
        for step in range(1, 10):
            assert (x * (0.5 * step) + x).tolist() == [0.5 * step + 1] * 3
    assert any("takes its run-time numbers from the host" in event.refusal for event in captures(seen))


def test_compiled_code_around_calls_to_other_ranks_is_not_captured(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "collectives_of", lambda program: program.calls[-1:])
    x = torch.ones(3).to("ltc")
    with registered(_OnDevice()), settings.scope(backend="on_device", tiers="blocking"):
        for _ in range(9):
            assert (x * 2).exp().shape == (3,)
            torch_ltc.sync(wait=True)
    (event,) = captures(seen)
    assert re.search(r"aten::exp at .*: compiled code cannot be captured around calls that talk to", event.refusal)


def test_a_program_that_writes_to_a_target_of_the_right_size_is_captured(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    x, target = torch.ones(3).to("ltc"), torch.empty(3).to("ltc")
    for step in range(9):
        torch.add(x, x, out=target)
        assert target.tolist() == [2.0] * 3, step
    assert [event.graphs for event in captures(seen)] == [1]


def test_draws_of_captured_programs_go_on_after_the_failed_capture_of_another(graphs: StandInGraphs) -> None:
    graphs.refused = frozenset({"aten::cumsum"})

    def run(device: str) -> list[Any]:
        seed = torch.ltc.manual_seed if device == "ltc" else torch.manual_seed
        seed(3)
        x = torch.arange(4.0).to(device)
        found = []
        for step in range(12):
            found.append((torch.rand(3, device=device) * 2).tolist())
            if step > 4:
                # Captured in two graphs in the end, of which the first has the draws.
                found.append((torch.rand(4, device=device) + x.cumsum(0)).tolist())
        return found

    assert run("ltc") == run("cpu")
    assert graphs.lost_states
    assert graphs.captures > 2


def test_a_program_whose_call_resizes_a_result_is_left_alone(
    graphs: StandInGraphs, seen: list[CaptureEvent | ExecuteEvent]
) -> None:
    data = torch.arange(6.0).view(2, 3)
    x = data.to("ltc")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(8):
            made, plain = x + 1, data + 1
            torch.mm(x, x.t(), out=made)
            torch.mm(data, data.t(), out=plain)
            assert torch.equal(made.cpu(), plain)
    assert not graphs.captures
    assert all("it may move memory" in event.refusal for event in captures(seen))
