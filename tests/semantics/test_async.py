"""sync() queues work and returns; readers wait for what they need; the queue is bounded."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_ltc
from tests.semantics.support import LONG_S, assert_same, counted, gated, lazy, observe, probe
from torch_ltc.config import settings
from torch_ltc.execute.executor import executor

pytestmark = pytest.mark.usefixtures("no_fallback")


def held_back() -> torch.Tensor:
    """A result whose program has begun and waits at the gate."""
    result = gated(torch.ones(2, device="ltc"))
    torch_ltc.sync()
    assert probe.entered.wait(LONG_S)
    return result


@pytest.mark.usefixtures("backend")
def test_mark_step_returns_before_the_work_is_done() -> None:
    # Were it to block, the gate would never open and the operator would fail.
    for _ in range(3):
        with probe.closed():
            x = gated(torch.ones(2, device="ltc"))
            torch_ltc.mark_step()
            assert probe.entered.wait(LONG_S)
            assert not probe.gate.is_set()
            y = x + 1
            torch_ltc.sync()
            assert not probe.gate.is_set()
        assert y.tolist() == [3.0, 3.0]


def test_recording_goes_on_while_a_program_runs() -> None:
    with probe.closed():
        x = held_back()
        for _ in range(100):
            x = x + 1
        torch.manual_seed(3)
        fresh = torch.randn(3, device="ltc") * 2
        assert not probe.gate.is_set()
    assert x.tolist() == [102.0, 102.0]
    torch.manual_seed(3)
    assert_same(fresh, torch.randn(3) * 2)


def test_optimizer_step_does_not_wait() -> None:
    model = nn.Linear(2, 1).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probe.closed():
        (model(torch.ones(1, 2, device="ltc")) * 2).sum().backward()
        blocker = gated(torch.ones(1, device="ltc"))
        optimizer.step()
        assert probe.entered.wait(LONG_S)
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2, device="ltc")).sum()
        loss.backward()
        optimizer.step()
        assert not probe.gate.is_set()
    assert blocker.item() == 2.0
    assert loss.numel() == 1


def test_sync_with_wait_returns_when_the_work_is_done() -> None:
    for wait in (lambda: torch_ltc.sync(wait=True), torch.ltc.synchronize, torch_ltc.wait_device_ops):
        counted(torch.ones(2, device="ltc"))
        before = probe.runs
        torch_ltc.sync()
        wait()
        assert probe.runs in (before, before + 1)
    assert probe.runs == 3


def test_waiting_waits() -> None:
    with probe.closed():
        held_back()
        done = threading.Event()

        def wait() -> None:
            torch_ltc.wait_device_ops()
            done.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not done.wait(0.2)
        probe.gate.set()
        assert done.wait(LONG_S)
        waiter.join(LONG_S)


def test_a_read_waits_for_the_program_that_computes_it() -> None:
    with probe.closed():
        x = held_back()
        values: list[list[float]] = []
        reader = threading.Thread(target=lambda: values.append(x.tolist()))
        reader.start()
        reader.join(0.2)
        assert values == []
        probe.gate.set()
        reader.join(LONG_S)
    assert values == [[2.0, 2.0]]


def test_a_read_cuts_the_pending_program_only_when_it_needs_it() -> None:
    # What was computed before is read without running what is pending.
    done = torch.ones(2, device="ltc") * 3
    torch_ltc.sync(wait=True)
    pending = counted(torch.ones(2, device="ltc"))
    assert done.tolist() == [3.0, 3.0]
    assert probe.runs == 0
    assert pending.tolist() == [2.0, 2.0]
    assert probe.runs == 1


def test_a_read_does_not_wait_for_work_that_it_does_not_need() -> None:
    # The value was there before the work that is running now began.
    done = torch.ones(2, device="ltc") * 3
    torch_ltc.sync(wait=True)
    with probe.closed():
        blocked = held_back()
        values: list[list[float]] = []
        reader = threading.Thread(target=lambda: values.append(done.tolist()), daemon=True)
        reader.start()
        reader.join(5)
        assert values == [[3.0, 3.0]]
        assert not probe.gate.is_set()
    assert blocked.tolist() == [2.0, 2.0]


def test_a_read_sees_in_place_updates_that_are_queued_before_it() -> None:
    value = torch.ones(2, device="ltc") * 3
    torch_ltc.sync(wait=True)
    with probe.closed():
        held_back()
        value[0].add_(1)
        torch_ltc.sync()
        values: list[list[float]] = []
        reader = threading.Thread(target=lambda: values.append(value.tolist()), daemon=True)
        reader.start()
        reader.join(0.2)
        assert values == []
        probe.gate.set()
        reader.join(LONG_S)
    assert values == [[4.0, 3.0]]


def test_uploads_do_not_wait_for_running_work() -> None:
    with probe.closed():
        blocked = held_back()
        x = torch.arange(3.0).to("ltc")
        y = torch.tensor([1, 2], device="ltc")
        assert not probe.gate.is_set()
    assert (x.sum() + y.sum() + blocked.sum()).item() == 10.0


def test_the_queue_is_bounded_and_sync_waits_at_its_bound() -> None:
    with settings.scope(queue_bound=2), probe.closed():
        blocked = held_back()
        queued = torch.ones(1, device="ltc") + 1
        torch_ltc.sync()
        passed = threading.Event()
        results = [blocked, queued]

        def third() -> None:
            results.append(torch.ones(1, device="ltc") + 2)
            torch_ltc.sync()
            passed.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not passed.wait(0.2), "two programs are queued: the third must wait"
        probe.gate.set()
        assert passed.wait(LONG_S)
        thread.join(LONG_S)
    assert [result.flatten()[0].item() for result in results] == [2.0, 2.0, 3.0]


def test_what_is_queued_runs_in_order() -> None:
    x = lazy(torch.zeros(1))
    with probe.closed():
        held_back()
        with settings.scope(queue_bound=50):
            for factor in (2, 3, 5):
                x.add_(1).mul_(factor)
                torch_ltc.sync()
    assert x.item() == ((0 + 1) * 2 + 1) * 3 * 5 + 5


def test_an_error_of_queued_work_is_raised_by_the_next_sync_or_read() -> None:
    with probe.closed():
        held_back()
        rows = nn.functional.embedding(lazy(torch.tensor([9])), torch.ones(3, 2, device="ltc"))
        torch_ltc.sync()
    with pytest.raises(torch_ltc.errors.ExecutionError, match="aten::embedding"):
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            torch_ltc.sync()
            time.sleep(0.01)
    torch_ltc.sync(wait=True)
    assert rows.numel() == 2


def test_settings_of_the_callers_thread_do_not_leak_into_the_worker() -> None:
    with torch.inference_mode():
        x = torch.ones(2, device="ltc") + 1
        torch_ltc.sync(wait=True)
    y = torch.ones(2, device="ltc", requires_grad=True)
    (y * 2).sum().backward()
    assert y.grad.tolist() == [2.0, 2.0]
    assert x.tolist() == [2.0, 2.0]


def test_the_program_runs_on_the_backend_that_was_chosen_when_it_was_synced() -> None:
    # A scope that has been left when the work runs still counts for what was synced in it.
    kept = []
    with observe() as seen:
        with probe.closed():
            held_back()
            with settings.scope(backend="interpreter"):
                for _ in range(3):
                    kept.append(torch.ones(3, device="ltc") * 7 - 2)
                    torch_ltc.sync()
        torch_ltc.wait_device_ops()
    assert [run.backend for run in seen.runs[-3:]] == ["interpreter"] * 3
    assert kept[-1].tolist() == [5.0, 5.0, 5.0]


def test_mark_step_signature_is_the_originals() -> None:
    x = torch.ones(1, device="ltc") + 1
    torch_ltc.mark_step("ltc:0", True)
    torch_ltc.mark_step(device="", wait=False)
    torch_ltc.sync_multi([x], ["ltc:0"])
    torch_ltc.sync_multi([x])
    torch_ltc.wait_device_ops(devices=[])
    assert x.item() == 2.0


@pytest.mark.parametrize("place", ["append", "put"])
def test_an_interrupt_while_a_program_is_queued_comes_when_it_is(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    x = lazy(torch.zeros(2))
    x.add_(1)
    torch_ltc.sync(wait=True)

    class Interrupting:
        """A queue in whose use a signal comes."""

        def __init__(self, queue: Any) -> None:
            self._queue = queue

        def __getattr__(self, name: str) -> Any:
            if name == place:
                signal.raise_signal(signal.SIGALRM)
            return getattr(self._queue, name)

        def __len__(self) -> int:
            return len(self._queue)

        def __iter__(self) -> Iterator[Any]:
            return iter(self._queue)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    worker = executor.cpu_worker
    attribute = "items" if place == "append" else "ready"
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        x.add_(1)
        with monkeypatch.context() as patch:
            patch.setattr(worker, attribute, Interrupting(getattr(worker, attribute)))
            with pytest.raises(KeyboardInterrupt):
                torch_ltc.sync()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert x.tolist() == [2.0, 2.0]
    assert executor.is_idle()
