"""Worker processes of a conformance run: a unit that kills its process fails, the rest goes on.

Owns processes, their output and time limits, and the record of a death. Workers are forked from a server process that
has imported what takes long, so that starting one costs little. PyTorch's database of operators is imported in workers
alone.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch

from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.lowering.interface import Backend
from torch_ltc.pytorch.private import OPERATOR_DATABASE
from torch_ltc.testing import backends
from torch_ltc.testing.operators import run_unit
from torch_ltc.testing.probe import Probe, opened
from torch_ltc.testing.records import AnyUnit, Difference, Operator, Result, Unit, What
from torch_ltc.testing.semantics.runner import run_case

CONTEXT = multiprocessing.get_context("forkserver")

LOAD_S = 60.0
"""Seconds a worker may take to load its backend, beyond the time limit of a unit."""
START_S = 90.0
"""Seconds until the first message of a worker, beyond the time limit of its first unit."""
GRACE_S = 20.0
"""Seconds beyond the time limit that the parent waits for a worker that should have ended itself."""
LOG_LINES = 14
"""Lines of a dead process's log in its result."""
TIMEOUT = "Timeout ("
FATAL = "Fatal Python error"
WORKER_NAME = "torch_ltc-conformance"
READY = "ready"
"""The message of a worker that has loaded its backend."""


def supported() -> list[Operator]:
    """The operators of PyTorch's database, in its order."""
    _prepare_server(OPERATOR_DATABASE)
    with _without_main(), ProcessPoolExecutor(1, CONTEXT) as pool:
        return pool.submit(_operators).result()


def _operators() -> list[Operator]:
    found: list[Operator] = _database().supported()
    return found


def run_here(units: Sequence[AnyUnit], backend: Backend | None, time_limit_s: float) -> Iterator[Result]:
    """Results of units of one backend, run in this process: for a debugger, or for a backend that exists only here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with opened(units[0].device, backend or _backend(units[0])) as probe:
            for unit in units:
                yield _run(unit, probe, time_limit_s)


def refuse_in_worker() -> None:
    """Raise if this is a worker process: the file of the backend under test starts a run of its own."""
    if multiprocessing.current_process().name == WORKER_NAME:
        raise LtcError(
            "a conformance run was started while the file that holds the backend was loaded for another run",
            hint='put the call under `if __name__ == "__main__":`',
        )


def run_units(units: Sequence[AnyUnit], *, jobs: int, chunk_size: int, time_limit_s: float) -> Iterator[Result]:
    """Results of all units as they come, from at most `jobs` processes at once, `chunk_size` units in each."""
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
    """Have the server import this when it starts, which it does once."""
    # Not this package, which may start threads: they do not survive a fork. Nor anything that may touch CUDA.
    CONTEXT.set_forkserver_preload([module] if settings.device_type == "cpu" else [])


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
        arguments = (sending, units, path, time_limit_s, physical)
        self._process = CONTEXT.Process(target=_serve, args=arguments, name=WORKER_NAME, daemon=True)
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


# ---- inside a worker ------------------------------------------------------------------------------------------------


def _serve(
    sending: Connection,
    units: Sequence[AnyUnit],
    log_path: str,
    time_limit_s: float,
    physical: Mapping[str, str | int],
) -> None:
    """The body of a worker: announces itself, then sends a result of each unit; a unit that takes too long ends the
    process. `physical` are the settings that choose the physical device."""
    log = _redirect_output(log_path)
    faulthandler.enable(log)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # The first unit pays for loading the backend, and a backend may hang there too.
    faulthandler.dump_traceback_later(time_limit_s + LOAD_S, exit=True, file=log)
    with settings.scope(**physical), opened(units[0].device, _backend(units[0])) as probe:
        sending.send(READY)
        for unit in units:
            log.seek(0)
            log.truncate()
            faulthandler.dump_traceback_later(time_limit_s, exit=True, file=log)
            sending.send(_run(unit, probe, time_limit_s))
    faulthandler.cancel_dump_traceback_later()


def _backend(unit: AnyUnit) -> Backend | None:
    return None if unit.device == "cpu" else backends.find(unit.backend)


def _run(unit: AnyUnit, probe: Probe, time_limit_s: float) -> Result:
    if isinstance(unit, Unit):
        return run_unit(unit, _database().seeded(unit.operator), probe, time_limit_s)
    return run_case(unit, probe)


def _database() -> Any:
    """PyTorch's database, imported late: semantics need neither it nor its packages."""
    return importlib.import_module("torch_ltc.testing.database")


def _redirect_output(path: str) -> IO[str]:
    """Send all output of this process to a file: its last lines are the reason of its death."""
    log = open(path, "w+", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    return log
