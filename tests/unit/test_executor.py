"""The worker: order, bound, waiting, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from torch_ltc.config import settings
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcError
from torch_ltc.execute.executor import NOTHING, Executor, Uses
from torch_ltc.program.spec import make_spec
from torch_ltc.pytorch.openmp import release_pool
from torch_ltc.record.buffer import new_buffer

LONG_S = 30.0


def test_work_runs_in_order_on_one_other_thread() -> None:
    executor = Executor()
    seen: list[tuple[int, int]] = []
    for number in range(20):
        executor.submit(lambda number=number: seen.append((number, threading.get_ident())))
    executor.drain()
    assert [number for number, _ in seen] == list(range(20))
    assert {thread for _, thread in seen} != {threading.get_ident()}
    assert len({thread for _, thread in seen}) == 1


def test_each_device_has_a_worker_and_later_work_waits_for_that_of_others() -> None:
    executor = Executor()
    gate = threading.Event()
    seen: list[tuple[str, int]] = []

    def note(name: str) -> None:
        seen.append((name, threading.get_ident()))

    executor.submit(lambda: (gate.wait(LONG_S), note("first")))
    with settings.scope(device_ordinal=1):
        later = executor.submit(lambda: note("second"))
        assert not later.done()
    gate.set()
    executor.drain()
    assert [name for name, _ in seen] == ["first", "second"]
    assert len({thread for _, thread in seen}) == 2
    assert executor.call(lambda: executor.call(lambda: 7)) == 7


def test_an_idle_worker_launches_before_the_thread_that_queued_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor()
    executor.call(lambda: None)
    monkeypatch.setattr(sys.modules["torch_ltc.execute.executor"], "_LAUNCH_S", LONG_S)
    gate = threading.Event()
    assert executor.is_idle()
    with settings.scope(device_type="cuda"):
        executor.call(lambda: None)
        item = executor.submit(lambda: (time.sleep(0.05), 1 // 0))
        assert not executor.is_idle()
        executor.let_launch(item)
        assert item.done()
        # A long one is waited for a bounded time.
        monkeypatch.setattr(sys.modules["torch_ltc.execute.executor"], "_LAUNCH_S", 0.01)
        item = executor.submit(lambda: gate.wait(LONG_S))
        executor.let_launch(item)
        assert not item.done()
    gate.set()
    executor.drain()


def test_call_gives_the_result_and_raises_the_error() -> None:
    executor = Executor()
    assert executor.call(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        executor.call(lambda: 1 // 0)
    assert executor.call(lambda: 6) == 6


def test_submission_waits_while_the_queue_is_full() -> None:
    executor = Executor()
    gate, passed = threading.Event(), threading.Event()
    with settings.scope(queue_bound=2):
        executor.submit(lambda: gate.wait(LONG_S))
        executor.submit(lambda: None)

        def third() -> None:
            executor.submit(lambda: None)
            passed.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not passed.wait(0.1)
        gate.set()
        assert passed.wait(LONG_S)
        thread.join(LONG_S)
    executor.drain()


def test_a_failing_item_makes_room_for_the_next() -> None:
    executor = Executor()
    with settings.scope(queue_bound=1):
        for _ in range(5):
            executor.submit(lambda: 1 // 0)
        assert executor.call(lambda: 3) == 3


def test_work_submitted_by_the_worker_itself_runs_when_its_result_is_asked_for() -> None:
    executor = Executor()
    with settings.scope(queue_bound=1):
        assert executor.call(lambda: executor.result_of(executor.submit(lambda: 7, NOTHING))) == 7
        assert executor.call(lambda: executor.drain()) is None


def test_a_worker_that_asks_for_a_result_runs_what_was_queued_before_it_first() -> None:
    executor = Executor()
    seen: list[str] = []
    queued = threading.Event()

    def first() -> None:
        assert queued.wait(LONG_S)
        executor.complete()
        executor.result_of(executor.submit(lambda: seen.append("its own")))
        seen.append("first")

    executor.submit(first)
    executor.submit(lambda: seen.append("second"))
    queued.set()
    executor.drain()
    assert seen == ["second", "its own", "first"]


def test_a_worker_cannot_wait_for_what_depends_on_the_work_under_way() -> None:
    executor = Executor()
    buffer = new_buffer(make_spec(torch.float32, (2,), (1,)))

    def work() -> None:
        executor.result_of(executor.submit(lambda: None, Uses((buffer,), ())))

    with pytest.raises(LtcError, match="waits for this program"):
        executor.result_of(executor.submit(work, Uses((), (buffer,))))
    executor.drain()


def test_drain_of_an_unused_executor_returns() -> None:
    Executor().drain()


def test_drain_waits_for_what_is_queued() -> None:
    executor = Executor()
    seen: list[int] = []
    executor.submit(lambda: (time.sleep(0.05), seen.append(1)))
    executor.drain()
    assert seen == [1]


def test_reported_errors_are_raised_once() -> None:
    executor = Executor()
    executor.raise_deferred()
    first = LtcError("first")
    deferred.add_error(first)
    assert deferred.is_deferred(first)
    with pytest.raises(LtcError, match="first"):
        executor.raise_deferred()
    assert not deferred.is_deferred(first)
    executor.raise_deferred()


def test_errors_reported_together_are_all_told() -> None:
    executor = Executor()
    deferred.add_error(LtcError("first"))
    deferred.add_error(LtcError("second"))
    told = ""
    for _ in range(2):
        try:
            executor.raise_deferred()
        except LtcError as error:
            told += str(error) + "".join(getattr(error, "__notes__", []))
    assert "first" in told
    assert "second" in told


def test_a_forgotten_error_is_not_raised() -> None:
    executor = Executor()
    error = LtcError("seen elsewhere")
    deferred.add_error(error)
    deferred.discard_error(error)
    executor.raise_deferred()


def test_the_worker_uses_the_callers_number_of_kernel_threads() -> None:
    executor = Executor()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert executor.call(torch.get_num_threads) == 2
        torch.set_num_threads(1)
        assert executor.call(torch.get_num_threads) == 1
    finally:
        torch.set_num_threads(before)


def test_the_worker_does_not_inherit_modes_of_the_caller() -> None:
    executor = Executor()
    with torch.inference_mode(), torch.no_grad(), torch.autocast("cpu"):
        assert executor.call(torch.is_inference_mode_enabled) is False
        assert executor.call(lambda: torch.is_autocast_enabled("cpu")) is False
        assert executor.call(torch.is_grad_enabled) is True


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of the process")
def test_nobody_keeps_kernel_threads_who_does_not_compute() -> None:
    def wait_for_threads(most: int) -> int:
        deadline = time.monotonic() + 20
        while (count := len(os.listdir("/proc/self/task"))) > most and time.monotonic() < deadline:
            time.sleep(0.01)
        return count

    executor = Executor()
    before = torch.get_num_threads()
    x = torch.ones(1_000_000)
    try:
        torch.set_num_threads(4)
        release_pool()
        executor.call(lambda: None)
        alone = len(os.listdir("/proc/self/task"))
        torch.sin(x)
        assert len(os.listdir("/proc/self/task")) == alone + 3
        # Those of the worker, and no longer those of this thread.
        assert executor.call(lambda: (torch.sin(x), wait_for_threads(alone + 3))[1]) == alone + 3
        assert wait_for_threads(alone) == alone
    finally:
        torch.set_num_threads(before)


_UNREAD_FAILURE = """
import atexit, sys, torch
atexit.register(lambda: print("registered before", flush=True))
import torch_ltc
from torch_ltc.events import SyncReason
from torch_ltc.execute.sync import cut
atexit.register(lambda: print("registered after", flush=True))
y = torch.nn.functional.embedding(torch.tensor([9]).to("ltc"), torch.ones(3, 2, device="ltc"))
cut(SyncReason.EXPLICIT)  # a sync would raise the error if it comes early
"""


def _end(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("options", [(), ("-W", "error")])
def test_a_failure_that_nobody_reads_fails_the_process_when_it_ends(options: tuple[str, ...]) -> None:
    ended = _end(_UNREAD_FAILURE, *options)
    assert ended.returncode == 120, ended.stderr
    assert ended.stdout == "registered after\nregistered before\n"
    assert ended.stderr == (
        "torch_ltc.errors.LtcError: at exit: nobody was told of a failure:\n"
        "aten::embedding failed when its program ran: index out of range in self\n"
        "  inputs: float32[3,2], int64[1]\n"
        "  recorded at <string>:8 in <module>\n"
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("raise ValueError('of the script')", 1),
        ("sys.exit(3)", 120),  # as Python has it for errors of its cleanup
        ("try: torch_ltc.sync(wait=True)\nexcept torch_ltc.errors.LtcError: pass", 0),
    ],
)
def test_the_status_of_a_process_with_an_unread_failure(end: str, status: int) -> None:
    ended = _end(_UNREAD_FAILURE + end)
    assert ended.returncode == status, ended.stderr
