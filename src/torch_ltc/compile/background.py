"""Compile threads: jobs run here while the executor goes on.

Each queue has one thread that takes its jobs in order. Only `wait` waits for them; at exit unfinished jobs are
cancelled.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable

from torch_ltc.lowering.gil import CompileCancelled, cooperative
from torch_ltc.pytorch.openmp import release_pool
from torch_ltc.pytorch.private import below_autograd
from torch_ltc.signals import Condition

__all__ = ["Background", "background"]

# How long the end of the process waits for work that can be abandoned to notice.
_EXIT_S = 2.0


class Background:
    """Job queues by name, each with its thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._queues: dict[str, queue.SimpleQueue[_Work]] = {}
        self._threads: list[threading.Thread] = []
        # Queue and title of each job that waits or is under way.
        self._titles: dict[int, tuple[str, str]] = {}
        self._closed = self._stopped = False
        self._last = 0

    def submit(self, queue_name: str, title: str, work: Callable[[], None]) -> None:
        """Queue a job, which must not raise. `title` names it in reports."""
        with self._changed:
            if self._closed:
                return
            waiting = self._queues.get(queue_name)
            if waiting is None:
                waiting = queue.SimpleQueue()
                # A daemon: the end of the process must not wait for a compiler. `stop` ends it in order where it can.
                thread = threading.Thread(
                    target=self._serve, args=(waiting,), name=f"torch_ltc {queue_name}", daemon=True
                )
                # Before anything is queued for it: there may be no more threads, and nobody is to wait then.
                thread.start()
                self._threads.append(thread)
                self._queues[queue_name] = waiting
            self._last += 1
            self._titles[self._last] = (queue_name, title)
            waiting.put((self._last, work))

    def titles(self) -> list[str]:
        """Titles of the jobs that wait or are under way, oldest first."""
        with self._changed:
            return [title for _, title in self._titles.values()]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when no job waits or is under way, False when the time is over before that."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._titles or self._stopped, timeout_s)

    def _is_stopped(self) -> bool:
        return self._stopped

    @property
    def stopped(self) -> bool:
        """True from the moment on at which the process ends."""
        return self._stopped

    def stop(self, finish: str) -> None:
        """Cancel every job but those of the queue `finish`. At exit."""
        deadline = time.monotonic() + _EXIT_S
        with self._changed:
            self._closed = True
            self._changed.wait_for(
                lambda: all(queue_name != finish for queue_name, _ in self._titles.values()), _EXIT_S
            )
            self._stopped = True
            self._changed.notify_all()
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self, waiting: queue.SimpleQueue[_Work]) -> None:
        while (item := waiting.get()) is not None and not self._stopped:
            identity, work = item
            try:
                with below_autograd(), cooperative(self._is_stopped):
                    work()
            except CompileCancelled:
                return
            except BaseException:
                # A job reports its own failures; what comes here is a defect in it.
                sys.excepthook(*sys.exc_info())
            finally:
                # Nothing that the job refers to outlives it.
                del item, work
                release_pool()
                with self._changed:
                    self._titles.pop(identity, None)
                    self._changed.notify_all()

    def forget(self) -> None:
        """In a process that was forked: the threads are not there."""
        self.__init__()  # type: ignore[misc]


_Work = tuple[int, Callable[[], None]] | None

background = Background()
os.register_at_fork(after_in_child=background.forget)
