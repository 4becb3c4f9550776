"""Replays of short programs run on the thread that asks for them, and do what they would do on the worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import LONG_S, modes_of_the_thread, run_threads, threads_of_runs
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.execute import in_place
from torch_ltc.execute.executor import executor


def warm(step: Callable[..., Any], *args: Any) -> None:
    """Call it until it is replayed, and known to be short."""
    for _ in range(40):
        step(*args)
        torch_ltc.wait_device_ops()


@pytest.fixture(params=("interpreter", "torchscript", "auto"), autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each backend, compiled before its first run; whatever runs is short, on a slow machine, too."""
    monkeypatch.setattr(in_place, "_SHORT_S", LONG_S)
    with settings.scope(backend=request.param, tiers="blocking"):
        yield


def test_a_short_program_runs_on_the_calling_thread() -> None:
    step = torch_ltc.jit(lambda x: x * 2 + 1)
    x = torch.arange(4.0).to("ltc")
    warm(step, x)
    with threads_of_runs() as threads:
        results = [step(x) for _ in range(5)]
    assert threads == [threading.get_ident()] * 5
    for result in results:
        torch.testing.assert_close(result.cpu(), torch.arange(4.0) * 2 + 1, rtol=0, atol=0)


def test_a_program_waits_for_what_is_queued_before_it() -> None:
    state = torch.zeros(4).to("ltc")

    @torch_ltc.jit
    def step(x: Tensor) -> Tensor:
        return state + x

    x = torch.ones(4).to("ltc")
    warm(step, x)
    held = threading.Event()
    waiting = executor.submit(lambda: held.wait(LONG_S))
    state.add_(1)
    with threads_of_runs() as threads:
        result = step(x)
        held.set()
        torch_ltc.wait_device_ops()
    waiting.result()
    assert threading.get_ident() not in threads
    assert result.tolist() == [2.0] * 4


@modes_of_the_thread
def test_modes_of_the_thread_do_not_change_what_runs(mode: Callable[[], Any]) -> None:
    weight = torch.randn(4, 4)
    on_device = weight.to("ltc")
    step = torch_ltc.jit(lambda x: x @ on_device * 2)
    x = torch.randn(3, 4)
    given = x.to("ltc")
    warm(step, given)
    with mode():
        warm(step, given)
        result = step(given)
    got = result.cpu()
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, x @ weight * 2, rtol=0, atol=0)


def test_a_failing_program_loses_its_results_and_nothing_else() -> None:
    table = torch.arange(12.0).reshape(4, 3).to("ltc")
    step = torch_ltc.jit(lambda index: table.index_select(0, index) * 2)
    right = torch.tensor([0, 3]).to("ltc")
    wrong = torch.tensor([0, 9]).to("ltc")
    warm(step, right)
    with pytest.raises((LtcError, IndexError, RuntimeError), match="index"):
        step(wrong).cpu()
    torch_ltc.sync(wait=True)
    assert step(right).tolist() == [[0.0, 2.0, 4.0], [18.0, 20.0, 22.0]]


def test_a_listener_may_record_and_read_what_was_just_computed() -> None:
    step = torch_ltc.jit(lambda x: x + 1)
    x = torch.ones(2).to("ltc")
    warm(step, x)
    seen: list[Any] = []

    def listen(event: events.ExecuteEvent) -> None:
        # Its own program runs, too.
        if not seen:
            seen.append(event.program)
            seen.append((x * 3).tolist())

    stop = events.subscribe(listen, events.ExecuteEvent)
    try:
        assert step(x).tolist() == [2.0, 2.0]
    finally:
        torch_ltc.wait_device_ops()
        stop()
    assert seen[1:] == [[3.0, 3.0]]


def test_threads_that_replay_at_once_get_their_own_results() -> None:
    steps = [torch_ltc.jit(lambda x, n=n: x + n) for n in range(4)]
    x = torch.zeros(3).to("ltc")
    for step in steps:
        warm(step, x)
    wrong: list[Any] = []

    def work(number: int) -> None:
        for _ in range(50):
            result = steps[number](x).tolist()
            if result != [float(number)] * 3:
                wrong.append((number, result))

    run_threads(4, work)
    assert not wrong


def test_a_thread_that_reads_runs_short_programs_itself() -> None:
    x = torch.arange(4.0).to("ltc")
    # In one place: what is alive at a read belongs to the program.
    compute: Callable[[], list[float]] = lambda: (x * 2 + 1).tolist()  # noqa: E731
    for _ in range(40):
        compute()
    with threads_of_runs() as threads:
        for _ in range(5):
            assert compute() == [1.0, 3.0, 5.0, 7.0]
    assert threads == [threading.get_ident()] * 5


def test_a_read_waits_for_what_is_queued_before_it() -> None:
    x = torch.zeros(4).to("ltc")
    for _ in range(20):
        (x + 1).tolist()
    held = threading.Event()
    waiting = executor.submit(lambda: held.wait(LONG_S))
    x.add_(5)
    torch_ltc.sync()
    threading.Timer(0.05, held.set).start()
    assert (x + 1).tolist() == [6.0] * 4
    waiting.result()


def test_a_failing_read_in_place_has_the_line_of_its_call() -> None:
    table = torch.arange(12.0).reshape(4, 3).to("ltc")

    def pick(index: Tensor) -> list[Any]:
        found: list[Any] = (table.index_select(0, index) * 2).tolist()
        return found

    right, wrong = torch.tensor([0, 3]).to("ltc"), torch.tensor([0, 9]).to("ltc")
    for _ in range(20):
        pick(right)
    with pytest.raises((LtcError, IndexError, RuntimeError), match=r"(?s)index.*test_replay_here.py:\d+ in .*pick"):
        pick(wrong)
    assert pick(right)[0] == [0.0, 2.0, 4.0]
