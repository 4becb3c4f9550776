"""Compiling on a thread beside the user's without taking Python's lock for long.

A thread that waits for the lock gets it after Python's switch interval, 5 ms: longer than many a step. While a thread
is polite that interval is shorter, for the whole process; and what compiles calls `yield_gil` between pieces of its
work, at which a polite thread rests for a moment.
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
    """Python's switch interval, short while somebody is polite."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._polite = 0
        self._before = 0.0

    def shorten(self) -> None:
        """One more is polite."""
        with self._lock:
            self._polite += 1
            if self._polite == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SWITCH_S))

    def restore(self) -> None:
        """One less is."""
        with self._lock:
            self._polite -= 1
            # What the user has set meanwhile stays.
            if self._polite == 0 and sys.getswitchinterval() == min(self._before, _SWITCH_S):
                sys.setswitchinterval(self._before)


_interval = _Interval()


class _Turn(threading.local):
    ends: float = 0.0
    abandoned: Callable[[], bool] | None = None


_turn = _Turn()


def yield_gil() -> None:
    """Rest for a moment, if this thread is polite and has worked for long enough. Cheap to call often."""
    if _turn.ends and time.perf_counter() > _turn.ends:
        if _turn.abandoned is not None and _turn.abandoned():
            raise CompileCancelled
        time.sleep(_REST_S)
        _turn.ends = time.perf_counter() + _WORK_S


@contextmanager
def cooperative(abandoned: Callable[[], bool] | None = None) -> Iterator[None]:
    """Have this thread give way. `abandoned` says when to stop altogether."""
    before = (_turn.ends, _turn.abandoned)
    _turn.ends, _turn.abandoned = time.perf_counter() + _WORK_S, abandoned
    _interval.shorten()
    try:
        yield
    finally:
        _interval.restore()
        _turn.ends, _turn.abandoned = before
