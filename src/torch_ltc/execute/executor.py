"""One worker thread per physical device that runs queued work on it, in order.

Programs, eager fallbacks and reads of what is still queued run here. Work that is queued for one device waits for what
was queued for another before: it may need its results. Nobody waits for a worker with the recorder's lock held: code
that the device calls back may record, on the worker too. The queue is bounded.

A worker's thread-local state is clean: no autocast, no function transforms of the user's thread. It runs below
autograd, with grad mode on: the state in which eager runs its kernels, some of which ask for it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from torch_ltc.config import settings
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcError
from torch_ltc.execute.kernel_warnings import has_kernel_warnings, keep_warnings, show_kernel_warnings
from torch_ltc.pytorch.private import below_autograd
from torch_ltc.record.call_site import current_source
from torch_ltc.record.recorder import recorder

Result = TypeVar("Result")


class _Worker:
    """The worker of one physical device, and what was queued there last."""

    def __init__(self, device: str) -> None:
        self.pool = ThreadPoolExecutor(1, f"torch_ltc {device}")
        self.last: Future[Any] | None = None
        self.threads = 0


class Executor:
    """Runs callables one after the other, each on the worker of its device."""

    def __init__(self) -> None:
        self._by_device: dict[str, _Worker] = {}
        self._workers: set[int] = set()
        self._process = os.getpid()
        self._room = threading.Condition()
        self._waiting = 0

    def wait_for_room(self) -> None:
        """Return when fewer than `queue_bound` items are queued. On the worker itself, at once."""
        if self._waiting < settings.queue_bound or threading.get_ident() in self._workers:
            return
        with recorder.unlocked(), self._room:
            self._room.wait_for(self.has_room)

    def is_forked(self) -> bool:
        """True in a process that was forked after the package was imported."""
        return os.getpid() != self._process

    def has_room(self) -> bool:
        """True when an item may be queued without waiting."""
        return self._waiting < settings.queue_bound

    def submit(self, work: Callable[[], Result], *, wait: bool = True) -> Future[Result]:
        """Queue `work` for the device that the settings name, after waiting for room with `wait`. From a worker itself,
        runs it at once.

        Without `wait` where the recorder's lock is held and what was read under it must still be true: waiting lets
        others record.
        """
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
            worker = self._by_device.get(device)
            if worker is None:
                worker = self._by_device[device] = _Worker(device)
            others = [one.last for one in self._by_device.values() if one is not worker and one.last is not None]
        threads = torch.get_num_threads()

        def run() -> Result:
            self._workers.add(threading.get_ident())
            keep_warnings()
            if threads != worker.threads:
                # The number of kernel threads is a setting of each thread; the user set it on theirs.
                torch.set_num_threads(threads)
                worker.threads = threads
            try:
                for other in others:
                    other.exception()
                with below_autograd():
                    return work()
            finally:
                with self._room:
                    self._waiting -= 1
                    self._room.notify_all()

        with self._room:
            worker.last = future = worker.pool.submit(run)
        return future

    def call(self, work: Callable[[], Result]) -> Result:
        """Queue `work` and wait for its result."""
        return self.result_of(self.submit(work))

    def result_of(self, item: Future[Result]) -> Result:
        """Wait for the result of a queued item."""
        if item.done():
            return item.result()
        with recorder.unlocked():
            return item.result()

    def wait_for(self, job: Future[None]) -> None:
        """Return when this queued item has run. On a worker itself, at once: what is queued runs after it."""
        if threading.get_ident() not in self._workers:
            with recorder.unlocked():
                job.exception()

    def drain(self) -> None:
        """Wait until everything queued so far has run."""
        if threading.get_ident() not in self._workers:
            for worker in list(self._by_device.values()):
                if worker.last is not None:
                    self.wait_for(worker.last)

    def raise_deferred(self) -> None:
        """Raise the errors of earlier programs that nobody has seen yet."""
        deferred.raise_errors(self.drain)

    def show_warnings(self) -> None:
        """Show deferred warnings, at the user's line."""
        if deferred.has_warnings:
            source = current_source(2)
            deferred.show_warnings(source.file or __file__, source.line or 1)
        if has_kernel_warnings():
            show_kernel_warnings(current_source(2))


executor = Executor()
atexit.register(deferred.warn_of_errors)
