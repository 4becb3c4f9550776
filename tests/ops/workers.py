"""Worker processes for the sweep: a unit that kills its process fails, the rest goes on.

Owns processes, time limits and what is known about a death. Workers are forked from a server process that has imported
PyTorch, so that starting one costs little; this process needs no PyTorch.
"""

import importlib
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.ops.records import Difference, Report, Unit, What

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.ops.preload"])

START_S = 60.0
"""How long a worker may take to start, beyond the time limit of its first unit."""
GRACE_S = 20.0
"""How much longer than the time limit the parent waits for a worker that should have ended itself."""
LOG_LINES = 14
"""How much of a dead process's log goes into its report."""
TIMEOUT = "Timeout ("
FATAL = "Fatal Python error"


def supported() -> list[tuple[str, list[str]]]:
    """The operators of PyTorch's database in its order, each with those of our dtypes that it takes on the CPU."""
    receiving, sending = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_enter, args=("send_supported", sending), daemon=True)
    process.start()
    sending.close()
    answer: list[tuple[str, list[str]]] = receiving.recv()
    process.join()
    return answer


def run_units(units: Sequence[Unit], *, jobs: int, chunk_size: int, time_limit_s: float) -> Iterator[Report]:
    """Reports of all units as they come, from at most `jobs` processes at once, `chunk_size` units in each.

    With no jobs at all the units run in this process, one backend after the other: for a debugger.
    """
    if jobs == 0:
        for chunk in _chunks(units, len(units)):
            yield from _enter("run_here", chunk)
        return
    chunks = deque(_chunks(units, chunk_size))
    running: list[_Worker] = []
    try:
        while chunks or running:
            while chunks and len(running) < jobs:
                running.append(_Worker(chunks.popleft(), time_limit_s))
            wait([worker.connection for worker in running], timeout=1.0)
            for worker in list(running):
                report = worker.receive()
                if report is not None:
                    yield report
                if worker.ended:
                    running.remove(worker)
                    if worker.remaining:
                        chunks.appendleft(worker.remaining)
    finally:
        for worker in running:
            worker.stop()


def _enter(function: str, *arguments: Any) -> Any:
    """Runs a function of the worker's module, which this module must not import: it brings in PyTorch."""
    return getattr(importlib.import_module("tests.ops.child"), function)(*arguments)


def _chunks(units: Sequence[Unit], size: int) -> Iterator[list[Unit]]:
    """Groups of units for one process each; a process keeps one backend, so that units cannot disturb each other."""
    by_backend: dict[str, list[Unit]] = {}
    for unit in units:
        by_backend.setdefault(unit.backend, []).append(unit)
    for group in by_backend.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


class _Worker:
    """One process and the units it still has to do, the one it is on first."""

    def __init__(self, units: list[Unit], time_limit_s: float) -> None:
        self.remaining = list(units)
        self.ended = False
        self._time_limit_s = time_limit_s
        descriptor, path = tempfile.mkstemp(prefix="sweep-", suffix=".log")
        os.close(descriptor)
        self._log = Path(path)
        self.connection, sending = CONTEXT.Pipe(duplex=False)
        arguments: tuple[str, Connection, list[Unit], str, float] = ("serve", sending, units, path, time_limit_s)
        self._process = CONTEXT.Process(target=_enter, args=arguments, daemon=True)
        self._process.start()
        sending.close()
        self._deadline_s = time.monotonic() + START_S + time_limit_s

    def receive(self) -> Report | None:
        """The next report, if there is one: from the worker, or about its end."""
        if not self.connection.poll():
            return self._end(timed_out=True) if time.monotonic() > self._deadline_s else None
        try:
            report: Report = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=GRACE_S)
            return self._end(timed_out=False)
        self.remaining.pop(0)
        self._deadline_s = time.monotonic() + self._time_limit_s + GRACE_S
        return report

    def stop(self) -> None:
        """Ends the process; what it still had to do stays in `remaining`."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._log.unlink(missing_ok=True)
        self.ended = True

    def _end(self, *, timed_out: bool) -> Report | None:
        """A report on the unit that the process was on, if it was on one."""
        code = self._process.exitcode
        last_words = _last_words(self._log.read_text(errors="replace").splitlines())
        self.stop()
        if not self.remaining:
            return None
        report = Report(self.remaining.pop(0))
        if timed_out or last_words.startswith(TIMEOUT):
            found = Difference(What.TIMEOUT, f"not done after {self._time_limit_s:.0f} s\n{last_words}")
        else:
            found = Difference(What.CRASH, f"the process ended with status {code}\n{last_words}")
        report.add(None, None, [found])
        return report


def _last_words(log: Sequence[str]) -> str:
    """The part of a dead process's log that says why: the dump of its stack, innermost call first, or else the end."""
    for number, line in enumerate(log):
        if line.startswith((TIMEOUT, FATAL)):
            return "\n".join(log[number : number + LOG_LINES])
    return "\n".join(log[-LOG_LINES:])
