"""Who looks at runs of programs and at failures of backends: checks and repro files register here, from above.

Runs are shown to `watchers` only if the setting `check` or `repro_dir` says so; failures, which are rare, always to
`failure_listeners`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from torch_ltc.compile.program_cache import Entry
from torch_ltc.errors import LtcError
from torch_ltc.lowering.interface import Arguments, Backend, Outcome
from torch_ltc.lowering.lower import Executable

__all__ = ["Failure", "Run", "current_run", "failed", "failure_listeners", "running", "watched", "watchers"]


@dataclass(slots=True, eq=False)
class Run:
    """One run of a program. `lowered` is None for a run in the interpreter; `outcome` is there once it has run, and may
    be changed by those who watch. `check` and `repro_dir` are the settings when the program was cut."""

    entry: Entry
    arguments: Arguments
    backend: Backend
    check: str
    repro_dir: str
    executable: Executable | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A backend could not "compile" or "run" a program, computed it wrong ("validate"), or a "call" of it failed."""

    entry: Entry
    backend: Backend
    stage: str
    error: LtcError


# Entered around each run, on the worker's thread; left in reverse order. What comes after the run is not reached when
# the run raises.
watchers: list[Callable[[Run], AbstractContextManager[None]]] = []
# Called before anybody is told of the error: they may add to its text.
failure_listeners: list[Callable[[Failure], None]] = []
_running: dict[int, Run] = {}


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Inside the block this is what runs on this thread."""
    thread = threading.get_ident()
    before = _running.get(thread)
    _running[thread] = run
    try:
        yield
    finally:
        if before is None:
            del _running[thread]
        else:
            _running[thread] = before


def current_run() -> Run | None:
    """What runs on this thread, if anybody watches it."""
    return _running.get(threading.get_ident())


def watched(run: Run, work: Callable[[], Outcome]) -> Outcome:
    """The outcome of `work`, as those who watch leave it."""
    with ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher(run))
        run.outcome = work()
    return run.outcome


def failed(failure: Failure) -> None:
    """Tell those who listen."""
    for listener in failure_listeners:
        listener(failure)
