"""Hooks around executions of programs and on failures of backends: checks and repro files are added from above.

Executions are shown to `around_run` only if the setting `check` or `repro_dir` says so; failures, which are rare,
always to `backend_failed`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.errors import LtcError
from torch_ltc.hooks import Hook
from torch_ltc.lowering.interface import Arguments, Backend, Outcome
from torch_ltc.lowering.lower import Executable

__all__ = ["Failure", "Run", "around_run", "backend_failed", "current_run", "running", "with_hooks"]


@dataclass(slots=True, eq=False)
class Run:
    """One execution of a program. `executable` is None for the interpreter; `outcome` is there once it has run, and
    hooks may change it. `check` and `repro_dir` are the settings when the program was cut."""

    entry: CachedProgram
    arguments: Arguments
    backend: Backend
    check: str
    repro_dir: str
    executable: Executable | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A backend could not "compile" or "run" a program, computed it wrong ("validate"), or a "call" of it failed."""

    entry: CachedProgram
    backend: Backend
    stage: str
    error: LtcError


# Context managers: left in reverse order; what comes after the run is not reached when it raises.
around_run = Hook[[Run], AbstractContextManager[None]](
    "around run", "around each execution, on the worker's thread, with the settings check or repro_dir"
)
# Before anybody is told of the error: hooks may add to its text.
backend_failed = Hook[[Failure], None]("backend failed", "when a backend fails, before the error is reported")
_running: dict[int, Run] = {}


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Inside the block `current_run` on this thread is `run`."""
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
    """The execution on this thread, if hooks see it."""
    return _running.get(threading.get_ident())


def with_hooks(run: Run, execute: Callable[[], Outcome]) -> Outcome:
    """The outcome of an execution, as the hooks leave it."""
    with ExitStack() as stack:
        for hook in around_run:
            stack.enter_context(hook(run))
        run.outcome = execute()
    return run.outcome
