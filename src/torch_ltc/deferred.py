"""Errors and warnings of background threads, deferred to the user's thread.

A worker or a compile thread has nobody to raise to. What it reports is kept here until the user's next sync or read,
which raises or shows it, once. Where none comes, the process ends with a status that says so.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch_ltc.errors import BackendWarning, LtcError, LtcWarning

__all__ = ["Deferred", "deferred", "fail_exit"]


class Deferred:
    """The queues of deferred errors and warnings."""

    def __init__(self) -> None:
        self._errors: list[LtcError] = []
        self._warnings: list[tuple[str, type[LtcWarning]]] = []

    def add_error(self, error: LtcError) -> None:
        """Raise this error at the next sync or read."""
        self._errors.append(error)

    def raise_errors(self, drain: Callable[[], None]) -> None:
        """Raise the first deferred error; those of work that was queued already, which `drain` waits for, go with
        it."""
        if self._errors:
            drain()
            # In place: a worker may add one at this moment.
            errors = self._errors[:]
            del self._errors[: len(errors)]
            # Another thread may have raised them meanwhile.
            if errors:
                errors[0].list_others(errors[1:])
                raise errors[0]

    def is_deferred(self, error: BaseException) -> bool:
        """True while this error waits to be raised."""
        return any(kept is error for kept in self._errors)

    def discard_error(self, error: BaseException) -> None:
        """Drop an error that the user got by other means."""
        if self.is_deferred(error):
            with contextlib.suppress(ValueError):
                self._errors.remove(error)  # type: ignore[arg-type]

    def add_warning(self, message: str, category: type[LtcWarning] = BackendWarning) -> None:
        """Show this warning at the next sync or read: turned into an error on this thread, it would end the program."""
        self._warnings.append((message, category))

    @property
    def has_warnings(self) -> bool:
        """True when a warning waits to be shown."""
        return bool(self._warnings)

    def show_warnings(self, file: str, line: int) -> None:
        """Show the deferred warnings as coming from this line of the user's."""
        while self._warnings:
            message, category = self._warnings.pop(0)
            warnings.warn_explicit(message, category, file, line)

    def show_errors_at_exit(self) -> None:
        """Show errors that no sync or read was left to raise, and fail the process. When all work has run."""
        for error in self._errors:
            fail_exit(f"at exit: nobody was told of a failure:\n{error}")


class _ExitFailure(Exception):
    """Raised by the last flush of a process that is to fail."""


class _FailingStream:
    """Standard output whose flush fails once it is done: Python then ends with status 120, as for any error of its
    cleanup. Nothing else that happens at exit is left out, as it would be with `os._exit`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._show

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        # Not the flush of a handler that still runs, which is called from Python.
        if sys._getframe().f_back is None:
            raise _ExitFailure

    def _show(self, unraisable: Any) -> None:
        if unraisable.exc_type is not _ExitFailure:
            self._hook(unraisable)


def fail_exit(message: str) -> None:
    """Show an error as Python shows one that ends a program, and have the process, which is ending, fail. An uncaught
    error of the program's own keeps its status."""
    error = LtcError(message)
    sys.excepthook(LtcError, error, None)
    failed_already = getattr(sys, "last_value", None) is not None
    if sys.stdout is not None and not failed_already and not isinstance(sys.stdout, _FailingStream):
        sys.stdout = _FailingStream(sys.stdout)


deferred = Deferred()
