"""Locks that handlers of signals do not leave taken."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import pytest

from torch_ltc.signals import Condition, WorkerResult


class Raised(Exception):
    """What the handler raises."""


def _raise(number: int, frame: object) -> None:
    raise Raised


def _is_free(condition: threading.Condition) -> bool:
    """True when another thread gets it."""
    got: list[bool] = []

    def take() -> None:
        got.append(condition.acquire(timeout=1))
        if got[0]:
            condition.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


@pytest.mark.parametrize("of_a_result", [False, True])
def test_a_condition_is_free_after_whatever_a_handler_raises(of_a_result: bool) -> None:
    condition = WorkerResult()._condition if of_a_result else Condition()
    before = signal.signal(signal.SIGALRM, _raise)
    raised = 0
    try:
        ends = time.monotonic() + 1
        while time.monotonic() < ends:
            # Each time at another instruction of the loop.
            with suppress(Raised):
                signal.setitimer(signal.ITIMER_REAL, 30e-6)
                while True:
                    with condition:
                        raised += 1
    finally:
        with suppress(Raised):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised
    assert _is_free(condition)


def test_a_condition_waits_and_is_notified() -> None:
    condition, seen = Condition(), threading.Event()

    def wait() -> None:
        with condition:
            condition.wait_for(seen.is_set)

    thread = threading.Thread(target=wait)
    thread.start()
    with condition:
        seen.set()
        condition.notify_all()
    thread.join(10)
    assert not thread.is_alive()
