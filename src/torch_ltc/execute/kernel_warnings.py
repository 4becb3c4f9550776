"""Warnings that are raised on a worker, kept for the user's thread.

PyTorch hands a kernel's warning to Python when the kernel has run. On a worker it would have the line of the worker,
and where warnings are errors its exception would take the place of the result. Filters are the same for all threads,
and `warnings.catch_warnings` changes them for all: so filters are put before the others that match on a worker alone,
keep the warning and drop it there.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch_ltc.lowering.interface import Computation
from torch_ltc.program.instruction import Call
from torch_ltc.source import Source

# The modules that call kernels: their warnings belong to the user's line. Others keep their own.
# PyTorch's test utilities wrap the calls of TorchScript functions.
_CALLERS = ("torch._ops", "torch_ltc.", "torch.testing._internal.common_utils")
_MOST_PLACES = 1_000


@dataclass(slots=True)
class KeptWarning:
    """A warning, the program that ran, and the place that it is shown with; a compiled program knows no line."""

    text: str
    category: type[Warning]
    program: int = 0
    file: str = ""
    line: int = 0
    module: str | None = None


class _State:
    """Warnings that were kept, and what was shown."""

    def __init__(self) -> None:
        self.kept: list[KeptWarning] = []
        # Warnings that were shown, by file: what Python needs to show each once a line.
        self.shown: dict[str, dict[Any, Any]] = {}
        # The line at which each was shown first, by program: an executable does not say which call it comes from.
        self.places: dict[tuple[int, str], tuple[str, int]] = {}


class _Thread(threading.local):
    """True on threads whose warnings are kept. Not a set of identities: a new thread may get that of one that ended."""

    keeps = False
    # Where what is kept is noted, too.
    noted: list[KeptWarning] | None = None


_state = _State()
_thread = _Thread()


class _Keeper:
    """In the place of a filter's pattern for messages. The first filter keeps the warning; each later one that is asked
    corrects the category, because those before did not fit."""

    def __init__(self, category: type[Warning], first: bool) -> None:
        self._category = category
        self._first = first

    def match(self, text: str) -> bool:
        """True on a worker, where the warning is kept."""
        if not _thread.keeps:
            return False
        if self._first:
            kept = _kept(text, self._category, sys._getframe(1))
            _state.kept.append(kept)
            if _thread.noted is not None:
                _thread.noted.append(kept)
        elif _state.kept:
            _state.kept[-1].category = self._category
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        # Libraries send the filters to other processes, where there is nothing to keep: a pattern that never matches.
        return re.compile, ("(?!)",)


def _kept(text: str, category: type[Warning], frame: FrameType) -> KeptWarning:
    kept = KeptWarning(text, category)
    module = str(frame.f_globals.get("__name__", ""))
    if not module.startswith(_CALLERS):
        kept.file, kept.line, kept.module = frame.f_code.co_filename, frame.f_lineno, module
        return kept
    caller: FrameType | None = frame
    while caller is not None:
        call, computation = caller.f_locals.get("call"), caller.f_locals.get("self")
        if isinstance(call, Call) and not kept.file:
            kept.file, kept.line = call.source.file, call.source.line
        if isinstance(computation, Computation):
            kept.program = computation.program.identity
            break
        caller = caller.f_back
    return kept


_CATEGORIES = (DeprecationWarning, FutureWarning, UserWarning, RuntimeWarning, Warning)
_FILTERS: list[Any] = [
    ("ignore", _Keeper(category, first=place == 0), category, None, 0) for place, category in enumerate(_CATEGORIES)
]


def keep_warnings(keep: bool = True) -> None:
    """Keep warnings of this thread from now on, or no longer. Called before each item of work: leaving a block of
    `warnings.catch_warnings` takes the filters away."""
    _thread.keeps = keep
    filters: Any = warnings.filters
    if not filters or filters[0] is not _FILTERS[0]:
        filters[:0] = _FILTERS


@contextlib.contextmanager
def noted_warnings(into: list[KeptWarning]) -> Iterator[None]:
    """Note in a list what this thread keeps inside the block: no kernel warns when its launches are replayed."""
    before, _thread.noted = _thread.noted, into
    try:
        yield
    finally:
        _thread.noted = before


def keep_again(noted: Sequence[KeptWarning]) -> None:
    """Keep these once more."""
    _state.kept.extend(noted)


def _module_of(file: str) -> str:
    """The module that filters know a line of this file by."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return "__main__" if file == main else file.removesuffix(".py")


def has_kernel_warnings() -> bool:
    """True when a warning of a worker waits to be shown, and this thread would not keep it again."""
    return bool(_state.kept) and not _thread.keeps


def show_kernel_warnings(source: Source) -> None:
    """Show the warnings of workers: at the line of the call, at that of the same program before, or at `source`."""
    while _state.kept:
        kept = _state.kept.pop(0)
        here = (kept.file or source.file or __file__, kept.line or source.line or 1)
        if len(_state.places) >= _MOST_PLACES:
            _state.places.clear()
        before = _state.places.setdefault((kept.program, kept.text), here)
        file, line = here if kept.file else before
        registry = _state.shown.setdefault(file, {})
        warnings.warn_explicit(kept.text, kept.category, file, line, kept.module or _module_of(file), registry)
