"""One worker thread per physical device that runs queued work on it, in order.

Programs, eager fallbacks and reads of what is still queued run here. Work that is queued for one device waits for what
was queued for another before: it may need its results. A worker's thread-local state is clean: no autocast, no function
transforms of the user's thread. It runs below autograd, with grad mode on: the state in which eager runs its kernels,
some of which ask for it. The queue is bounded.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from torch_ltc.config import settings
from torch_ltc.errors import BackendWarning, LtcError, LtcWarning
from torch_ltc.program.source import current_source
from torch_ltc.runtime.kernel_warnings import KeptWarning, keep_warnings, module_of, take_kept
from torch_ltc.source import Source

Result = TypeVar("Result")
_MOST_PLACES = 1_000


class _Lane:
    """The worker of one physical device, and what was queued there last."""

    def __init__(self, device: str) -> None:
        self.pool = ThreadPoolExecutor(1, f"torch_ltc {device}")
        self.last: Future[Any] | None = None
        self.threads = 0


class Executor:
    """Runs callables one after the other, each on the worker of its device."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._workers: set[int] = set()
        self._process = os.getpid()
        self._room = threading.Condition()
        self._waiting = 0
        self._errors: list[LtcError] = []
        self._notes: list[tuple[str, type[LtcWarning]]] = []
        # Warnings of kernels that were shown, by file: what Python needs to show each once a line.
        self._shown: dict[str, dict[Any, Any]] = {}
        # The line at which each was shown first, by program: a compiled one does not say which call it comes from.
        self._places: dict[tuple[int, str], tuple[str, int]] = {}

    def wait_for_room(self) -> None:
        """Return when fewer than `queue_bound` items are queued. On the worker itself, at once."""
        if threading.get_ident() not in self._workers:
            with self._room:
                self._room.wait_for(self.has_room)

    def is_forked(self) -> bool:
        """True in a process that was forked after the package was imported."""
        return os.getpid() != self._process

    def has_room(self) -> bool:
        """True when an item may be queued without waiting."""
        return self._waiting < settings.queue_bound

    def submit(self, work: Callable[[], Result], *, wait: bool = True) -> Future[Result]:
        """Queue `work` for the device that the settings name, after waiting for room with `wait`. From a worker itself,
        runs it at once."""
        if threading.get_ident() in self._workers:
            done: Future[Result] = Future()
            done.set_result(work())
            return done
        if self.is_forked():
            raise LtcError(
                "the ltc device was used before this process was forked, and cannot be used in the child",
                hint="use the 'spawn' start method, or keep ltc tensors out of DataLoader workers",
            )
        device = f"{settings.device_type}:{settings.device_ordinal}"
        if wait:
            self.wait_for_room()
        with self._room:
            self._waiting += 1
            lane = self._lanes.get(device)
            if lane is None:
                lane = self._lanes[device] = _Lane(device)
            others = [other.last for other in self._lanes.values() if other is not lane and other.last is not None]
        threads = torch.get_num_threads()

        def run() -> Result:
            self._workers.add(threading.get_ident())
            keep_warnings()
            if threads != lane.threads:
                # The number of kernel threads is a setting of each thread; the user set it on theirs.
                torch.set_num_threads(threads)
                lane.threads = threads
            try:
                for other in others:
                    other.exception()
                with torch._C._AutoDispatchBelowAutograd():
                    return work()
            finally:
                with self._room:
                    self._waiting -= 1
                    self._room.notify_all()

        lane.last = future = lane.pool.submit(run)
        return future

    def call(self, work: Callable[[], Result]) -> Result:
        """Queue `work` and wait for its result."""
        return self.submit(work).result()

    def wait_for(self, job: Future[None]) -> None:
        """Return when this queued item has run. On a worker itself, at once: what is queued runs after it."""
        if threading.get_ident() not in self._workers:
            job.exception()

    def drain(self) -> None:
        """Wait until everything queued so far has run."""
        if threading.get_ident() not in self._workers:
            for lane in list(self._lanes.values()):
                if lane.last is not None:
                    lane.last.exception()

    def report(self, error: LtcError) -> None:
        """Keep an error of a program for the next sync or read."""
        self._errors.append(error)

    def raise_reported(self) -> None:
        """Raise the first error that nobody has seen yet; later ones of work that was queued already go with it."""
        if self._errors:
            self.drain()
            errors, self._errors = self._errors, []
            # Another thread may have raised them meanwhile.
            if errors:
                errors[0].list_others(errors[1:])
                raise errors[0]

    def note(self, message: str, category: type[LtcWarning] = BackendWarning) -> None:
        """Keep a warning for the user's thread: raised on this one, as an error, it would end the program."""
        self._notes.append((message, category))

    def warn_noted(self) -> None:
        """Show the warnings that were kept."""
        while self._notes:
            source = current_source(2)
            file, line = source.file or __file__, source.line or 1
            message, category = self._notes.pop(0)
            warnings.warn_explicit(message, category, file, line)
        while (kept := take_kept()) is not None:
            self._warn_kept(kept, current_source(2))

    def _warn_kept(self, kept: KeptWarning, source: Source) -> None:
        """Show a warning of a worker: at the line of its call, at that of the same program before, or at `source`."""
        here = (kept.file or source.file or __file__, kept.line or source.line or 1)
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        before = self._places.setdefault((kept.program, kept.text), here)
        file, line = here if kept.file else before
        registry = self._shown.setdefault(file, {})
        warnings.warn_explicit(kept.text, kept.category, file, line, kept.module or module_of(file), registry)

    def unseen(self, error: BaseException) -> bool:
        """True when this error waits to be raised."""
        return any(kept is error for kept in self._errors)

    def forget(self, error: BaseException) -> None:
        """This error has been raised to the user by other means."""
        self._errors = [kept for kept in self._errors if kept is not error]

    def warn_unraised(self) -> None:
        """Show errors that no sync or read was left to raise. At exit, when all work has run."""
        for error in self._errors:
            warnings.warn(f"at exit: nobody was told of a failure:\n{error}", LtcWarning, stacklevel=1)


executor = Executor()
atexit.register(executor.warn_unraised)
