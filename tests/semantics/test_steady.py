"""Replays in one go: calls that are a compiled function of tensors do what they did, as long as nothing has changed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import LONG_S, run_threads
from tests.support.backends import FunctionalBackend, registered
from torch_ltc import events, metrics
from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.execute import in_place
from torch_ltc.execute.executor import executor
from torch_ltc.native.library import extension
from torch_ltc.program.instruction import Program

pytestmark = pytest.mark.skipif(extension is None, reason="the extension is not built")


class InPlace(FunctionalBackend):
    """Writes inputs that a program updates in place, and gives results that lie as recorded."""

    name = "in_place"
    repeats_layouts = True
    # Changes what the function returns.
    change: Callable[[list[Any]], Any] | None = None

    def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
        """As the base class."""
        function = super().compile(program)

        def run(*given: Any) -> Any:
            results = list(function(*given))
            for place, update in enumerate(program.updates, len(program.outputs)):
                results[place] = given[update.input].copy_(results[place])
            return results if self.change is None else self.change(results)

        return run


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[InPlace]:
    """Compiled before the first run; whatever runs is short."""
    monkeypatch.setattr(in_place, "_SHORT_S", LONG_S)
    made = InPlace()
    with registered(made), settings.scope(backend="in_place", tiers="blocking"):
        yield made
        torch_ltc.sync(wait=True)


def warm(step: Any, *args: Any) -> None:
    """Call it until it is replayed in one go."""
    for _ in range(10):
        step(*args)
        torch_ltc.wait_device_ops()
    assert is_steady(step)


def is_steady(step: Any) -> bool:
    return any(calls.plan is not None and calls.plan.steady is not None for calls in step._calls.values())


def misses(step: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is replayed, or recorded, in another way from now on."""
    found: list[Any] = []
    find = type(step)._find
    monkeypatch.setattr(type(step), "_replay", lambda self, calls, leaves: (found.append(leaves), (False, None))[1])
    monkeypatch.setattr(type(step), "_find", lambda self, *given: (found.append(given), find(self, *given))[1])
    return found


def test_values_that_are_held_stay() -> None:
    step = torch_ltc.jit(lambda x: x * 2 + 1)
    inputs = [torch.full((4,), float(n)).to("ltc") for n in range(6)]
    warm(step, inputs[0])
    results = [step(x) for x in inputs]
    assert [result.tolist() for result in results] == [[2.0 * n + 1] * 4 for n in range(6)]


def test_nothing_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch_ltc.jit(lambda x: x * 2 + 1)
    x = torch.ones(4).to("ltc")
    warm(step, x)
    found = misses(step, monkeypatch)
    assert step(x).tolist() == [3.0] * 4
    assert not found


def test_arguments_that_share_memory_are_not_replayed_as_those_that_do_not() -> None:
    kept = torch.full((4,), 2.0).to("ltc")

    def compute(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y + kept

    step = torch_ltc.jit(compute)
    x, y = torch.ones(4).to("ltc"), torch.ones(4).to("ltc")
    warm(step, x, y)
    assert step(y, y).tolist() == [6.0] * 4
    assert step(y, kept).tolist() == [8.0] * 4
    assert step(kept, y).tolist() == [12.0] * 4
    assert [x[0].item(), y[0].item(), kept[0].item()] == [11.0, 3.0, 3.0]


def test_tensors_that_share_memory_and_arguments_are_returned() -> None:
    def compute(x: Tensor) -> Any:
        y = x + 1
        return y[0], y, x, y, "text"

    step = torch_ltc.jit(compute)
    x = torch.arange(4.0).to("ltc")
    warm(step, x)
    first, whole, given, again, text = step(x)
    assert (given is x, text) == (True, "text")
    assert whole is not again
    whole.add_(1)
    assert (first.item(), again.tolist()) == (2.0, [2.0, 3.0, 4.0, 5.0])
    assert first._base is None
    assert step(x)[1].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_inputs_are_written_in_place() -> None:
    total = torch.zeros(3).to("ltc")

    def add(x: Tensor) -> Tensor:
        total.add_(x)
        return total * 2

    step = torch_ltc.jit(add)
    x = torch.ones(3).to("ltc")
    warm(step, x)
    before = total.tolist()[0]
    assert step(x).tolist() == [2 * before + 2] * 3
    assert total.tolist() == [before + 1] * 3


def test_changes_are_seen() -> None:
    factor = torch.full((3,), 2.0).to("ltc")
    options = {"shift": 1.0}
    step = torch_ltc.jit(lambda x: x * factor + options["shift"])
    x = torch.ones(3).to("ltc")
    for _ in range(10):
        assert step(x).tolist() == [3.0] * 3
    options["shift"] = 5.0
    assert step(x).tolist() == [7.0] * 3
    factor.mul_(2)
    assert step(x).tolist() == [9.0] * 3
    factor.data = torch.zeros(3).to("ltc")
    assert step(x).tolist() == [5.0] * 3


def test_other_arguments_and_modes_are_other_calls() -> None:
    step = torch_ltc.jit(lambda x: x * 2)
    x = torch.ones(3).to("ltc")
    warm(step, x)
    assert step(torch.ones(4).to("ltc")).tolist() == [2.0] * 4
    assert step(torch.ones(6).to("ltc")[::2]).tolist() == [2.0] * 3
    assert step(torch.ones(3, dtype=torch.float64).to("ltc")).dtype is torch.float64
    assert step(torch.ones(3)).tolist() == [2.0] * 3
    weight = torch.ones(3).to("ltc").requires_grad_()
    step(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3
    with torch.inference_mode():
        assert step(x).is_inference()
    assert not step(x).is_inference()


def test_what_is_pending_and_queued_comes_first() -> None:
    step = torch_ltc.jit(lambda x: x * 2)
    x = torch.ones(3).to("ltc")
    warm(step, x)
    x.add_(1)
    assert step(x).tolist() == [4.0] * 3
    warm(step, x)
    held = threading.Event()
    waiting = executor.submit(lambda: held.wait(LONG_S))
    x.add_(1)
    torch_ltc.sync()
    result = step(x)
    held.set()
    waiting.result()
    assert result.tolist() == [6.0] * 3


def test_a_failing_run_loses_its_results_and_nothing_else() -> None:
    table = torch.arange(12.0).reshape(4, 3).to("ltc")
    step = torch_ltc.jit(lambda index: table.index_select(0, index) * 2)
    right, wrong = torch.tensor([0, 3]).to("ltc"), torch.tensor([0, 9]).to("ltc")
    warm(step, right)
    with pytest.raises((LtcError, IndexError, RuntimeError), match="index"):
        step(wrong).cpu()
    torch_ltc.sync(wait=True)
    assert step(right).tolist() == [[0.0, 2.0, 4.0], [18.0, 20.0, 22.0]]


def test_results_in_another_form_are_installed_as_at_any_run(backend: InPlace) -> None:
    total = torch.zeros(3).to("ltc")

    def add(x: Tensor) -> Tensor:
        total.add_(x)
        return total + 1

    step = torch_ltc.jit(add)
    x = torch.ones(3).to("ltc")
    warm(step, x)
    before = total.tolist()[0]
    backend.change = lambda results: tuple(result.clone() for result in results)
    try:
        assert step(x).tolist() == [before + 2] * 3
    finally:
        backend.change = None
    assert step(x).tolist() == [before + 3] * 3


def test_an_interrupt_reaches_the_caller(backend: InPlace) -> None:
    step = torch_ltc.jit(lambda x: x * 2)
    x = torch.ones(3).to("ltc")
    warm(step, x)

    def interrupt(results: list[Any]) -> Any:
        raise KeyboardInterrupt

    backend.change = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            step(x)
    finally:
        backend.change = None
    with pytest.raises(LtcError):
        torch_ltc.sync(wait=True)
    assert step(x).tolist() == [2.0] * 3


def test_replays_are_told_and_counted() -> None:
    step = torch_ltc.jit(lambda x: x * 2)
    x = torch.ones(3).to("ltc")
    warm(step, x)
    with metrics.recorded() as block:
        for _ in range(5):
            step(x)
    assert block.counters["Execute::in_place"] == 5
    assert block.counters["lazy::mul.Tensor"] == 5
    assert block.metrics["SyncTime::jit"]["total_samples"] == 5
    heard: list[Any] = []
    stops = [events.subscribe(heard.append, kind) for kind in (events.ExecuteEvent, events.SyncEvent)]
    step(x)
    for stop in stops:
        stop()
    assert [type(event) for event in heard] == [events.ExecuteEvent, events.SyncEvent]
    assert "test_steady" in str(heard[1].source)


def test_settings_and_closures_count(tmp_path: Any) -> None:
    step = torch_ltc.jit(lambda x: x * 2)
    x = torch.ones(3).to("ltc")
    warm(step, x)
    ran: list[int] = []
    torch_ltc.add_step_closure(lambda: ran.append(1))
    step(x)
    assert ran == [1]
    with settings.scope(save_tensors_file=str(tmp_path / "programs.txt")):
        step(x)
    assert "mul" in (tmp_path / "programs.txt").read_text()


def test_threads_get_their_own_results() -> None:
    step = torch_ltc.jit(lambda x: x + 1)
    inputs = [torch.full((3,), float(n)).to("ltc") for n in range(4)]
    warm(step, inputs[0])
    wrong: list[Any] = []

    def work(number: int) -> None:
        for _ in range(50):
            result = step(inputs[number]).tolist()
            if result != [number + 1.0] * 3:
                wrong.append((number, result))

    run_threads(4, work)
    assert not wrong


def test_nothing_is_kept_alive() -> None:
    weight = torch.ones(3).to("ltc")

    def compute(x: Tensor) -> Tensor:
        return x * weight

    step = torch_ltc.jit(compute)
    x = torch.ones(3).to("ltc")
    warm(step, x)
    before = torch.ltc.memory_allocated()
    for _ in range(20):
        step(x)
    assert torch.ltc.memory_allocated() == before
    reference = weakref.ref(compute)
    del step, compute
    gc.collect()
    assert reference() is None
