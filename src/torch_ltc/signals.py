"""Signal handlers that wait: what a thread runs in a worker's place must not end half done; and locks that none leaves
taken.

Python calls handlers on the main thread, between any two of its instructions, and what they raise comes from there.
"""

from __future__ import annotations

# The functions of `signal` make enumerations of what these return, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Condition", "WorkerResult", "signals_are_deferred", "signals_deferred"]

# Those that scripts and test runners have handlers for, which raise.
_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


class Condition(threading.Condition):
    """A condition that is given back whatever a handler raises. The usual one is entered by a function of Python, in
    which a handler may run when the lock is taken and the block not begun: nobody would ever give it back."""

    # Functions in C, looked up before the lock is taken.
    __enter__: Any = property(attrgetter("_lock.__enter__"))
    __exit__: Any = property(attrgetter("_lock.__exit__"))


class WorkerResult(Future[Any]):
    """A future that can be waited for on a thread with handlers."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


class _Deferred:
    """Signals that came while their handlers waited."""

    __slots__ = ("_handlers", "_came")
    # True in a block of the main thread: a block in it has nothing to do.
    active = False

    def __init__(self) -> None:
        self._handlers: list[tuple[int, Any]] = []
        self._came: list[int] = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)

    def __enter__(self) -> None:
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    _signal.signal(number, self._note)
        except BaseException:
            # A handler has run that was about to be replaced.
            self._restore()
            raise
        _Deferred.active = True

    def _restore(self) -> None:
        while self._handlers:
            _signal.signal(*self._handlers[-1])
            self._handlers.pop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _Deferred.active = False
        try:
            self._restore()
        finally:
            # The handler that was put back last may have run, and raised.
            self._restore()
        for number in self._came:
            signal.raise_signal(number)


def signals_deferred() -> AbstractContextManager[None]:
    """Let the handlers of signals that come in this block run at its end, or at that of the outermost block; only the
    main thread runs any."""
    if _Deferred.active or threading.get_ident() != threading.main_thread().ident:
        return nullcontext()
    return _Deferred()


def signals_are_deferred() -> bool:
    """True while the main thread is in a block of `signals_deferred`."""
    return _Deferred.active
