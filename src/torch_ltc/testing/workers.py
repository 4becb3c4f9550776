"""Worker processes of a conformance run: a unit that kills its process fails, the rest goes on.

Owns processes, time limits and what is known about a death. Workers are forked from a server process that has imported
what takes long, so that starting one costs little.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.pytorch.private import OPERATOR_DATABASE
from torch_ltc.testing.records import AnyUnit, Difference, Operator, Result, Unit, What

CONTEXT = multiprocessing.get_context("forkserver")

START_S = 90.0
"""How long a worker may take to start, beyond the time limit of its first unit."""
GRACE_S = 20.0
"""How much longer than the time limit the parent waits for a worker that should have ended itself."""
LOG_LINES = 14
"""How much of a dead process's log goes into its result."""
TIMEOUT = "Timeout ("
FATAL = "Fatal Python error"
WORKER_NAME = "torch_ltc-conformance"


def supported() -> list[Operator]:
    """The operators of PyTorch's database, in its order."""
    _prepare_server(OPERATOR_DATABASE)
    receiving, sending = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_enter, args=("send_supported", sending), name=WORKER_NAME, daemon=True)
    with _without_main():
        process.start()
    sending.close()
    answer: list[Operator] | Exception = receiving.recv()
    process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def refuse_in_worker() -> None:
    """Raise if this is a worker process: the file of the backend under test starts a run of its own."""
    if multiprocessing.current_process().name == WORKER_NAME:
        raise LtcError(
            "a conformance run was started while the file that holds the backend was loaded for another run",
            hint='put the call under `if __name__ == "__main__":`',
        )


def run_units(units: Sequence[AnyUnit], *, jobs: int, chunk_size: int, time_limit_s: float) -> Iterator[Result]:
    """Results of all units as they come, from at most `jobs` processes at once, `chunk_size` units in each.

    With no jobs at all the units run in this process, one backend after the other: for a debugger.
    """
    if jobs == 0:
        for chunk in _chunks(units, len(units)):
            yield from _enter("run_here", chunk, None, time_limit_s)
        return
    _prepare_server(OPERATOR_DATABASE if any(isinstance(unit, Unit) for unit in units) else "torch")
    chunks = deque(_chunks(units, chunk_size))
    running: list[_Worker] = []
    try:
        while chunks or running:
            while chunks and len(running) < jobs:
                running.append(_Worker(chunks.popleft(), time_limit_s))
            wait([worker.connection for worker in running], timeout=1.0)
            for worker in list(running):
                result = worker.receive()
                if result is not None:
                    yield result
                if worker.ended:
                    running.remove(worker)
                    if worker.remaining:
                        chunks.appendleft(worker.remaining)
    finally:
        for worker in running:
            worker.stop()


def _prepare_server(module: str) -> None:
    """What the server imports when it starts, which it does once: the database only if it is wanted by then."""
    # Not this package, which may start threads: they do not survive a fork. Nor anything that may touch CUDA.
    CONTEXT.set_forkserver_preload([module] if settings.device_type == "cpu" else [])


def _enter(function: str, *arguments: Any) -> Any:
    """Runs a function of the worker's module."""
    return getattr(importlib.import_module("torch_ltc.testing.child"), function)(*arguments)


def _chunks(units: Sequence[AnyUnit], size: int) -> Iterator[list[AnyUnit]]:
    """Groups of units for one process each; a process keeps one backend, so that units cannot disturb each other."""
    by_backend: dict[str, list[AnyUnit]] = {}
    for unit in units:
        by_backend.setdefault(unit.backend, []).append(unit)
    for group in by_backend.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


@contextmanager
def _without_main() -> Iterator[None]:
    """A process that is started here does not import the caller's script, which may lack a guard around its body."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Worker:
    """One process and the units it still has to do, the one it is on first."""

    def __init__(self, units: list[AnyUnit], time_limit_s: float) -> None:
        self.remaining = list(units)
        self.ended = False
        self._ready = False
        self._time_limit_s = time_limit_s
        descriptor, path = tempfile.mkstemp(prefix="conformance-", suffix=".log")
        os.close(descriptor)
        self._log = Path(path)
        self.connection, sending = CONTEXT.Pipe(duplex=False)
        physical = {"device_type": settings.device_type, "device_ordinal": settings.device_ordinal}
        arguments = ("serve", sending, units, path, time_limit_s, physical)
        self._process = CONTEXT.Process(target=_enter, args=arguments, name=WORKER_NAME, daemon=True)
        with _without_main():
            self._process.start()
        sending.close()
        self._deadline_s = time.monotonic() + START_S + time_limit_s

    def receive(self) -> Result | None:
        """The next result, if there is one: from the worker, or about its end."""
        if not self.connection.poll():
            return self._end(timed_out=True) if time.monotonic() > self._deadline_s else None
        try:
            message: Result | str = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=GRACE_S)
            return self._end(timed_out=False)
        self._deadline_s = time.monotonic() + self._time_limit_s + GRACE_S
        if isinstance(message, str):
            self._ready = True
            return None
        self.remaining.pop(0)
        return message

    def stop(self) -> None:
        """Ends the process; what it still had to do stays in `remaining`."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._log.unlink(missing_ok=True)
        self.ended = True

    def _end(self, *, timed_out: bool) -> Result | None:
        """A result about the unit that the process was on, if it was on one."""
        code = self._process.exitcode
        last_words = _last_words(self._log.read_text(errors="replace").splitlines())
        self.stop()
        if not self._ready:
            # The next one would not start either.
            raise LtcError(f"a worker process ended with status {code} before it could begin\n{last_words}")
        if not self.remaining:
            return None
        result = Result(self.remaining.pop(0))
        if timed_out or last_words.startswith(TIMEOUT):
            found = Difference(What.TIMEOUT, f"not done after {self._time_limit_s:.0f} s\n{last_words}")
        else:
            found = Difference(What.CRASH, f"the process ended with status {code}\n{last_words}")
        result.add(None, None, [found])
        return result


def _last_words(log: Sequence[str]) -> str:
    """The part of a dead process's log that says why: the dump of its stack, innermost call first, or else the end."""
    for number, line in enumerate(log):
        if line.startswith((TIMEOUT, FATAL)):
            return "\n".join(log[number : number + LOG_LINES])
    return "\n".join(log[-LOG_LINES:])
