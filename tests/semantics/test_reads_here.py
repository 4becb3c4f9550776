"""A thread that reads runs the program that it waits for, and the program does what it would do on the worker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import LONG_S, lazy, modes_of_the_thread, run_threads, threads_of_runs
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.execute.executor import executor
from torch_ltc.record.recorder import recorder


@pytest.fixture(autouse=True)
def nothing_is_compiled_first() -> Iterator[None]:
    """The worker compiles."""
    with settings.scope(tiers="background"):
        yield


@torch.library.custom_op("torch_ltc_tests_reads::interrupts", mutates_args=(), device_types="cpu")
def interrupts(tensor: Tensor) -> Tensor:
    """Adds one, and the user presses Ctrl-C meanwhile."""
    signal.raise_signal(signal.SIGINT)
    return tensor + 1


@interrupts.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


@pytest.mark.parametrize("backend", ["interpreter", "torchscript", "auto"])
def test_a_program_runs_on_the_thread_that_reads_its_result(backend: str) -> None:
    x = lazy(torch.arange(4.0))
    with settings.scope(backend=backend), threads_of_runs() as threads:
        results = [(x * number + 1).sum().item() for number in range(5)]
    assert results == [6.0 * number + 4 for number in range(5)]
    assert threads == [threading.get_ident()] * 5


def test_a_call_that_is_not_recorded_and_the_program_before_it_run_on_the_calling_thread() -> None:
    x = lazy(torch.arange(4.0))
    with settings.scope(fallback="allow"), threads_of_runs() as threads:
        assert torch.nonzero(x * 2).flatten().tolist() == [1, 2, 3]
    assert threads == [threading.get_ident()]


def test_a_program_that_is_queued_behind_another_runs_on_the_worker() -> None:
    x = lazy(torch.ones(4))
    held = threading.Event()
    waiting = executor.submit(lambda: held.wait(LONG_S))
    opener = threading.Timer(0.05, held.set)
    opener.start()
    with threads_of_runs() as threads:
        assert (x + 1).sum().item() == 8
    opener.join()
    waiting.result()
    assert threading.get_ident() not in threads


def test_a_program_that_has_to_be_compiled_first_runs_on_the_worker() -> None:
    x = lazy(torch.arange(4.0))
    with settings.scope(backend="torchscript", tiers="off"), threads_of_runs() as threads:
        for _ in range(3):
            assert (x * 7 - 1).cos().sum().item() == (torch.arange(4.0) * 7 - 1).cos().sum().item()
    assert threads[0] != threading.get_ident()
    assert threads[1:] == [threading.get_ident()] * 2


def test_a_program_that_takes_long_runs_on_the_worker() -> None:
    x = lazy(torch.ones(2000, 2000))
    with threads_of_runs() as threads:
        assert (x + 1).sum().item() == 8e6
    assert threading.get_ident() not in threads


@pytest.fixture
def interrupted() -> Iterator[None]:
    """Interrupts raise, also where the tests run in the background of a shell, which has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_comes_when_the_program_is_over_and_no_update_is_lost() -> None:
    weight = lazy(torch.ones(2))
    loss = interrupts(weight).sum()
    weight.mul_(3)
    with pytest.raises(KeyboardInterrupt):
        loss.item()
    assert weight.tolist() == [3.0, 3.0]
    assert loss.item() == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_before_the_program_runs_leaves_it_to_the_worker() -> None:
    x = lazy(torch.ones(2))
    y = x + 1

    def interrupt(event: events.SyncEvent) -> None:
        stop()
        signal.raise_signal(signal.SIGINT)

    stop = events.subscribe(interrupt, events.SyncEvent)
    with threads_of_runs() as threads:
        with pytest.raises(KeyboardInterrupt):
            y.tolist()
        torch_ltc.wait_device_ops()
    assert threading.get_ident() not in threads
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kind", [events.SyncEvent, events.ExecuteEvent])
def test_a_listener_may_read_what_the_thread_is_reading(kind: type[events.Event]) -> None:
    x = lazy(torch.ones(2))
    y = x + 1
    seen: list[Any] = []

    def listen(event: events.Event) -> None:
        if not seen:
            seen.append(None)
            seen[0] = [y.tolist(), (x * 5).tolist()]

    stop = events.subscribe(listen, kind)
    try:
        assert y.tolist() == [2.0, 2.0]
    finally:
        stop()
    assert seen == [[[2.0, 2.0], [5.0, 5.0]]]


def test_a_listener_may_sync_while_the_queue_is_full_of_what_the_thread_reads() -> None:
    x = lazy(torch.ones(2))
    y = x + 1
    made: list[Tensor] = []

    def listen(event: events.Event) -> None:
        if not made:
            made.append(x * 5)
            torch_ltc.sync()

    with settings.scope(queue_bound=1):
        stop = events.subscribe(listen, events.SyncEvent)
        try:
            assert y.tolist() == [2.0, 2.0]
        finally:
            stop()
    assert made[0].tolist() == [5.0, 5.0]


@modes_of_the_thread
def test_modes_of_the_thread_do_not_change_what_runs(mode: Callable[[], Any]) -> None:
    weight, x = torch.randn(4, 4), torch.randn(3, 4)
    on_device, given = weight.to("ltc"), x.to("ltc")
    result = given @ on_device * 2
    with mode():
        enabled = torch.is_grad_enabled()
        got = result.cpu()
        assert torch.is_grad_enabled() is enabled
    torch.testing.assert_close(got, x @ weight * 2, rtol=0, atol=0)


def test_threads_that_read_at_once_get_their_own_results_in_order() -> None:
    state = lazy(torch.zeros(1))
    wrong: list[Any] = []

    def work(number: int) -> None:
        x = lazy(torch.full((3,), float(number)))
        for turn in range(60):
            if (x + turn).tolist() != [float(number + turn)] * 3:
                wrong.append((number, turn))
            state.add_(1)

    run_threads(4, work)
    assert not wrong
    assert state.item() == 240


def test_reading_element_by_element_leaves_no_program_of_views() -> None:
    rows = lazy(torch.arange(6.0).view(2, 3)) * 2
    rows.sum().item()
    row = rows[1]
    assert [float(row[i]) for i in range(3)] == [6.0, 8.0, 10.0]
    assert rows[0].t().tolist() == [0.0, 2.0, 4.0]
    assert recorder.empty
    # A view that somebody holds is one still.
    row[1:].add_(1)
    assert rows.tolist() == [[0.0, 2.0, 4.0], [6.0, 9.0, 11.0]]


def test_a_read_leaves_a_program_that_does_something() -> None:
    rows, total = lazy(torch.arange(3.0)), lazy(torch.zeros(()))
    total += rows[2]
    assert [float(rows[i]) for i in range(3)] == [0.0, 1.0, 2.0]
    assert not recorder.empty
    assert total.item() == 2.0


def test_a_program_that_is_read_after_each_sync_runs_on_the_thread_that_syncs() -> None:
    x, here = lazy(torch.arange(4.0)), threading.get_ident()

    def step(read: bool) -> bool:
        """True when the program ran on this thread before it was read."""
        with threads_of_runs() as threads:
            y = (x * 2 + 1).sum()
            torch_ltc.sync()
            found = threads == [here]
            if read:
                assert y.item() == 16
        return found

    with settings.scope(backend="interpreter", eager_regions="off"):
        assert [step(read=True) for _ in range(8)][-3:] == [True] * 3
        # It is queued again once a sync is not followed by a read.
        step(read=False)
        assert [step(read=False) for _ in range(3)] == [False] * 3


def test_a_read_after_more_was_recorded_has_the_worker_run_what_was_synced() -> None:
    x, here = lazy(torch.arange(4.0)), threading.get_ident()
    with settings.scope(backend="interpreter", eager_regions="off"), threads_of_runs() as threads:
        for _ in range(8):
            y = (x * 2 + 1).sum()
            torch_ltc.sync()
            z = x + 1
            assert y.item() == 16
            torch_ltc.wait_device_ops()
    assert here not in threads
    assert z.tolist() == [1.0, 2.0, 3.0, 4.0]
