"""The backend "auto": forms of a program are measured on real executions, and the fastest is kept. Speeds are those of
stand-ins on a clock that stands still otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from tests.support.backends import FunctionalBackend, RecordedBackend, SymbolicBackend
from tests.support.graphs import StandInGraphs
from torch_ltc import events
from torch_ltc.compile.jobs import CompileJob
from torch_ltc.config import settings
from torch_ltc.debug.doctor import examine
from torch_ltc.debug.history import history
from torch_ltc.errors import CompileError
from torch_ltc.execute import capture, run
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program

INTERPRETER_S, CAPTURED_S = 1.0, 0.25
# Executions before and while two forms are measured, and the first one that runs in the form that was kept.
HOT, MEASURED = 1, 10


class Clock:
    """Time that passes when told so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Measured runs take what the interpreter, graphs and backends of known speed say."""
    made = Clock()

    def taking(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            made.now += 0.0 if result is None else seconds
            return result

        return call

    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=made.perf_counter))
    monkeypatch.setattr(run, "_run_reference", taking(run._run_reference, INTERPRETER_S))
    monkeypatch.setattr(run, "_run_captured", taking(run._run_captured, CAPTURED_S))
    monkeypatch.setattr(registry, "_measured", {})
    torch_ltc.ir_cache.reset()
    history.clear()
    with settings.scope(backend="interpreter"):
        yield made
        torch_ltc.sync(wait=True)
    torch_ltc.ir_cache.reset()


@pytest.fixture
def of_speed(clock: Clock) -> Iterator[Callable[..., Backend]]:
    """Makes a backend that takes as long as it is told, and lets "auto" measure it."""
    names: list[str] = []

    def make(name: str, seconds: float, base: type[Any] = RecordedBackend, measured: Any = "equal") -> Backend:
        class OfSpeed(base):  # type: ignore[misc]
            def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
                function = super().compile(program)

                def run_slowly(*given: Any) -> Sequence[Any]:
                    clock.now += seconds
                    result: Sequence[Any] = function(*given)
                    return result

                return run_slowly if base is not SymbolicBackend else function

        OfSpeed.name = name
        names.append(name)
        return registry.register(OfSpeed(), measured=measured)

    with settings.scope(backend="interpreter"):
        yield make
        torch_ltc.sync(wait=True)
    for name in names:
        registry.unregister(name)


@pytest.fixture
def seen() -> Iterator[SimpleNamespace]:
    """Executions and choices."""
    found = SimpleNamespace(runs=[], choices=[])
    stops = [
        events.subscribe(found.runs.append, events.ExecuteEvent),
        events.subscribe(found.choices.append, events.ChoiceEvent),
    ]
    yield found
    for stop in stops:
        stop()


def step(x: Tensor) -> Tensor:
    return (x * 2).relu() + 1


def steps(count: int, x: Tensor | None = None) -> list[list[float]]:
    x = torch.arange(-2.0, 2.0).to("ltc") if x is None else x
    with settings.scope(backend="auto"):
        return [step(x).tolist() for _ in range(count)]


def backends(found: SimpleNamespace) -> list[str]:
    return [("captured " if event.captured else "") + event.backend for event in found.runs]


def test_the_fastest_form_is_kept(of_speed: Callable[..., Backend], seen: SimpleNamespace) -> None:
    of_speed("slow", 2.0)
    of_speed("fast", 0.5)
    assert steps(24) == [[1.0, 1.0, 1.0, 3.0]] * 24
    assert backends(seen)[0] == "interpreter"
    assert backends(seen)[1:16] == ["interpreter", "slow", "fast"] * 5
    assert backends(seen)[16:] == ["fast"] * 8
    (choice,) = seen.choices
    assert choice.kept == "fast"
    assert choice.timings == (("interpreter", 1.0), ("slow", 2.0), ("fast", 0.5))


def test_the_interpreter_is_kept_where_compiled_code_is_slower(
    of_speed: Callable[..., Backend], seen: SimpleNamespace
) -> None:
    of_speed("slow", 2.0)
    steps(16)
    assert seen.choices[0].kept == "interpreter"
    assert backends(seen)[HOT + MEASURED :] == ["interpreter"] * 5


def test_of_equally_fast_forms_compiled_code_is_kept(of_speed: Callable[..., Backend], seen: SimpleNamespace) -> None:
    of_speed("equal", INTERPRETER_S * 1.02)
    steps(12)
    assert seen.choices[0].kept == "equal"


def test_short_runs_are_timed_more_often(of_speed: Callable[..., Backend], seen: SimpleNamespace) -> None:
    of_speed("short", 0.001)
    steps(30)
    assert backends(seen)[1:17].count("short") == 11
    assert backends(seen)[1:17].count("interpreter") == 5


def test_nothing_runs_twice(of_speed: Callable[..., Backend], seen: SimpleNamespace) -> None:
    backend = of_speed("fast", 0.5)
    x = torch.zeros(3).to("ltc")
    with settings.scope(backend="auto"):
        for _ in range(20):
            x.add_(1).mul_(1)
            torch_ltc.sync()
        assert x.tolist() == [20.0] * 3
    assert backend.runs == backends(seen).count("fast")  # type: ignore[attr-defined]
    assert len(seen.runs) == 20


def test_a_form_that_cannot_be_compiled_is_left_out(of_speed: Callable[..., Backend], seen: SimpleNamespace) -> None:
    class Refuses(RecordedBackend):
        def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
            raise CompileError("never")

    of_speed("refuses", 0.1, Refuses)
    with pytest.warns(torch_ltc.errors.LtcWarning, match="never"):
        steps(12)
    assert set(backends(seen)) == {"interpreter"}
    # There was nothing to measure.
    assert not seen.choices


def test_captured_forms_take_part(
    of_speed: Callable[..., Backend], seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(capture._by_device, "cpu", StandInGraphs())
    of_speed("fast", 0.5)
    assert steps(32) == [[1.0, 1.0, 1.0, 3.0]] * 32
    (choice,) = seen.choices
    assert choice.kept == "captured interpreter"
    assert dict(choice.timings) == {"interpreter": 1.0, "fast": 0.5, "captured interpreter": 0.25}
    assert set(backends(seen)[-8:]) == {"captured interpreter"}


def test_launching_counts_more_than_waiting_for_the_device(
    of_speed: Callable[..., Backend], clock: Clock, seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(capture._by_device, "cpu", StandInGraphs())
    of_speed("fast", 1.125)
    run_captured = run._run_captured
    computing_s = 0.0

    def launch(*args: Any, **kwargs: Any) -> Any:
        nonlocal computing_s
        outcome = run_captured(*args, **kwargs)
        computing_s = 0.0 if outcome is None else INTERPRETER_S
        return outcome

    def wait(_: torch.device) -> None:
        nonlocal computing_s
        clock.now += computing_s
        computing_s = 0.0

    monkeypatch.setattr(run, "_run_captured", launch)
    monkeypatch.setattr(run, "wait_for_device", wait)
    steps(32)
    (choice,) = seen.choices
    # It takes longest, and leaves the host free for most of it.
    assert dict(choice.timings) == {"interpreter": 1.0, "fast": 1.125, "captured interpreter": 1.25}
    assert choice.kept == "captured interpreter"


def test_results_that_are_held_keep_their_values_whatever_is_measured(
    of_speed: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(capture._by_device, "cpu", StandInGraphs())
    of_speed("fast", 0.1)
    of_speed("functional", 0.05, FunctionalBackend)
    held = []
    with settings.scope(backend="auto"):
        for number in range(48):
            x = torch.full((3,), float(number)).to("ltc")
            held.append(step(x))
            torch_ltc.sync()
        assert [y.tolist() for y in held] == [[2.0 * number + 1] * 3 for number in range(48)]


def test_close_forms_are_measured_only_if_asked_for(of_speed: Callable[..., Backend], seen: SimpleNamespace) -> None:
    of_speed("fast", 0.5)
    of_speed("close", 0.1, measured="close")
    steps(16)
    assert "close" not in backends(seen)
    with settings.scope(numerics="close"):
        steps(24)
    assert [choice.kept for choice in seen.choices] == ["fast", "close"]
    assert backends(seen)[-1] == "close"


def test_a_form_that_comes_late_is_measured_against_the_kept_one(
    of_speed: Callable[..., Backend], seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompileJob, "_compile_out_of_process", lambda self: None)
    of_speed("fast", 0.5)
    late = of_speed("late", 0.125, measured="close")
    late.compiles_out_of_process = True
    started: list[CompileJob] = []
    begin = CompileJob.start

    def hold_back(job: CompileJob) -> None:
        if job.backend is late:
            started.append(job)
        else:
            begin(job)

    monkeypatch.setattr(CompileJob, "start", hold_back)
    with settings.scope(numerics="close", tiers="background"):
        steps(4)
        torch_ltc.wait_for_compiles()
        steps(20)
        assert [choice.kept for choice in seen.choices] == ["fast"]
        begin(started[0])
        torch_ltc.wait_for_compiles()
        steps(16)
    assert [choice.kept for choice in seen.choices] == ["fast", "late"]
    assert dict(seen.choices[1].timings) == {"fast": 0.5, "late": 0.125}
    assert backends(seen)[-1] == "late"


def test_programs_of_one_symbolic_key_share_the_choice(of_speed: Callable[..., Backend], seen: SimpleNamespace) -> None:
    of_speed("symbolic", 0.0, SymbolicBackend)
    for size in range(4, 40):
        steps(1, torch.ones(size).to("ltc"))
    # What fits is run, whether it was measured or not.
    assert backends(seen)[-1] == "symbolic"
    assert not seen.choices
    steps(40, torch.ones(50).to("ltc"))
    assert [choice.kept for choice in seen.choices] == ["symbolic"]
    seen.runs.clear()
    steps(12, torch.ones(51).to("ltc"))
    assert backends(seen) == ["symbolic"] * 12
    assert len(seen.choices) == 1


def test_a_chosen_backend_is_not_measured(of_speed: Callable[..., Backend], seen: SimpleNamespace) -> None:
    of_speed("slow", 2.0)
    x = torch.arange(-2.0, 2.0).to("ltc")
    with settings.scope(backend="slow"):
        for _ in range(16):
            step(x).tolist()
    assert not seen.choices
    assert backends(seen)[2:] == ["slow"] * 14


def test_explain_and_the_report_show_the_timings(of_speed: Callable[..., Backend]) -> None:
    of_speed("fast", 0.5)
    steps(14)
    text = "fast, chosen by measurement: interpreter 1.00 s, fast 500 ms"
    assert f"runs on {text}" in torch_ltc.explain()
    (row,) = [row for row in history.recording().programs if row.choice]
    assert row.choice == text
    assert f"it runs on {text}" in torch_ltc.explain(row.identity)


def test_the_doctor_names_programs_that_compiled_code_does_not_help(of_speed: Callable[..., Backend]) -> None:
    of_speed("slow", 2.0)
    steps(40)
    (row,) = [row for row in history.recording().programs if row.choice]
    # The clock of the test is not the one of the history.
    row = replace(row, run_s=100.0)
    recording = replace(history.recording(), programs=(row,), spans=(), duration_s=100.0)
    (finding,) = [finding for finding in examine(recording) if finding.rule == "compiled code is no faster"]
    assert "interpreter 1.00 s, slow 2.00 s" in finding.evidence
    assert "numerics" in finding.fix


def test_training_is_equal_to_eager() -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(24):
            x, y = torch.randn(6, 8).to(device), torch.randint(0, 4, (6,)).to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    with settings.scope(backend="auto"):
        assert train("ltc") == train("cpu")
