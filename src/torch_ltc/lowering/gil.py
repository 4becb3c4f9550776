"""Compiling on a thread beside the user's without holding the GIL for long.

A thread that waits for the GIL gets it after the switch interval, 5 ms: longer than many a step. While a thread is
cooperative that interval is shorter, for the whole process; and what compiles calls `yield_gil` between pieces of its
work, at which a cooperative thread sleeps for a moment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["CompileCancelled", "yield_gil", "cooperative"]

# Work for the one, rest for the other: a step that runs meanwhile takes a fifth longer.
_WORK_S = 0.0004
_REST_S = 0.002
_SWITCH_S = 0.0005


class CompileCancelled(BaseException):
    """Unwinds a compilation that nobody waits for any more. Not an Exception: no backend should take it for one."""


class _Interval:
    """The switch interval of the interpreter, short while a thread is cooperative."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cooperative = 0
        self._before = 0.0

    def shorten(self) -> None:
        """Increment the number of cooperative threads."""
        with self._lock:
            self._cooperative += 1
            if self._cooperative == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SWITCH_S))

    def restore(self) -> None:
        """Decrement it."""
        with self._lock:
            self._cooperative -= 1
            # What the user has set meanwhile stays.
            if self._cooperative == 0 and sys.getswitchinterval() == min(self._before, _SWITCH_S):
                sys.setswitchinterval(self._before)


_interval = _Interval()


class _Turn(threading.local):
    ends: float = 0.0
    abandoned: Callable[[], bool] | None = None


_turn = _Turn()


def yield_gil() -> None:
    """Sleep for a moment, if this thread is cooperative and has worked for long enough. Cheap to call often."""
    if _turn.ends and time.perf_counter() > _turn.ends:
        if _turn.abandoned is not None and _turn.abandoned():
            raise CompileCancelled
        time.sleep(_REST_S)
        _turn.ends = time.perf_counter() + _WORK_S


@contextmanager
def cooperative(abandoned: Callable[[], bool] | None = None) -> Iterator[None]:
    """Make this thread yield the GIL. `abandoned` says when to stop altogether."""
    before = (_turn.ends, _turn.abandoned)
    _turn.ends, _turn.abandoned = time.perf_counter() + _WORK_S, abandoned
    _interval.shorten()
    try:
        yield
    finally:
        _interval.restore()
        _turn.ends, _turn.abandoned = before
