"""One worker thread per physical device that runs queued work on it, in order.

Programs, eager fallbacks and reads of what is still queued run here. Work that is queued for one device waits for what
was queued for another before: it may need its results. The queue is bounded.

Code that the device calls back may record and read, on a worker too. So nobody waits for a worker with the recorder's
lock held; and a worker that needs the result of something queued runs the queue itself, in order, up to there.

A thread that waits at once for what it queues stands in for the CPU's worker, if that has nothing to do: it runs the
work itself, which saves handing it over and the result back. Signals wait meanwhile, as they do for the worker's work.

The CPU's threads belong to whoever computes: a thread that queues work gives its OpenMP pool up, and so does a worker
that has nothing to do.

A worker's thread-local state is clean: no autocast, no function transforms of the user's thread. It runs below
autograd, with grad mode on: the state in which eager runs its kernels, some of which ask for it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as Timeout
from contextlib import suppress
from typing import Any, TypeVar

import torch

from torch_ltc.config import settings
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcError
from torch_ltc.execute.device_loss import device_loss
from torch_ltc.execute.kernel_warnings import has_kernel_warnings, keep_warnings, show_kernel_warnings
from torch_ltc.native.library import extension
from torch_ltc.pytorch.openmp import release_pool
from torch_ltc.pytorch.private import (
    below_autograd,
    set_flush_denormal,
    set_grad_enabled,
    set_threads,
)
from torch_ltc.pytorch.private import has_clean_state as _has_clean_state
from torch_ltc.record.buffer import Buffer
from torch_ltc.record.call_site import current_source
from torch_ltc.record.recorder import recorder
from torch_ltc.signals import Condition, WorkerResult, signals_deferred

__all__ = ["NOTHING", "Executor", "Uses", "executor"]

Result = TypeVar("Result")
# What it costs to end an OpenMP thread and to make it again: a worker keeps its pool for as long after its last item,
# so that it wastes no more than that, whether or not there is a next one at once.
_THREAD_S = 50e-6
# For how long a thread waits for the launches of what it has queued for an idle device.
_LAUNCH_S = 2e-3


def _call_below_autograd(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function below autograd, with grad mode on."""
    had_gradients = torch.is_grad_enabled()
    try:
        with below_autograd():
            set_grad_enabled(True)
            return function(*given)
    finally:
        set_grad_enabled(had_gradients)


# Tells eager regions that something is queued.
_disturb: Callable[[], None] = (lambda: None) if extension is None else extension.disturb_eager
has_clean_state: Callable[[], bool] = _has_clean_state if extension is None else extension.has_clean_state
call_below_autograd: Callable[..., Any] = _call_below_autograd if extension is None else extension.call_below_autograd


class Uses:
    """The buffers that queued work reads, and those that it defines or writes to. A plain class: one is built per
    sync."""

    __slots__ = ("reads", "writes")

    def __init__(self, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> None:
        self.reads = reads
        self.writes = writes

    def must_precede(self, other: Uses) -> bool:
        """True when the other work needs results of this one, or overwrites what this one reads."""
        mine = {id(buffer) for buffer in self.writes}
        if any(id(buffer) in mine for buffer in (*other.reads, *other.writes)):
            return True
        read = {id(buffer) for buffer in self.reads}
        return any(id(buffer) in read for buffer in other.writes)


NOTHING = Uses((), ())


class _Item:
    """Queued work. `uses` is None where it is not known."""

    __slots__ = ("future", "work", "uses", "others", "threads", "flush")

    def __init__(self, work: Callable[[], Any], uses: Uses | None, others: list[Future[Any]], flush: bool) -> None:
        self.future: Future[Any] = WorkerResult()
        self.work = work
        self.uses = uses
        self.others = others
        # Settings of the user's thread.
        self.threads = torch.get_num_threads()
        self.flush = flush

    def must_precede(self, other: _Item) -> bool:
        """True when the other item may need this one to have run."""
        if self.uses is NOTHING or other.uses is NOTHING:
            return False
        return self.uses is None or other.uses is None or self.uses.must_precede(other.uses)


class _Worker:
    """The worker of one physical device: its queue, what is under way, and what was queued last."""

    def __init__(self) -> None:
        self.items: deque[_Item] = deque()
        # A token for each item that it is to run, or more: the thread sleeps here.
        self.ready: queue.SimpleQueue[None] = queue.SimpleQueue()
        # The item under way, and behind it those that it waits for.
        self.running: list[_Item] = []
        self.last: Future[Any] | None = None
        # The thread that runs something in its place, and the last item that it has taken on.
        self.stand_in = 0
        self.taken_on: Future[Any] | None = None
        # How many OpenMP threads its kernels may have since it gave them up.
        self.threads = 1

    def running_item(self, future: Future[Any]) -> _Item | None:
        """The item under way whose result this is."""
        return next((item for item in self.running if item.future is future), None)


class Executor:
    """Runs callables one after the other, each on the worker of its device."""

    def __init__(self) -> None:
        self._by_device: dict[str, _Worker] = {}
        # By thread: the worker that it is, or whose items it runs just now.
        self._workers: dict[int, _Worker] = {}
        # By thread: the worker whose items it has taken on and not run yet.
        self._stand_ins: dict[int, _Worker] = {}
        self._process = os.getpid()
        self._room = Condition()
        self._waiting = 0
        # As `torch.set_flush_denormal` said; there is no way to ask.
        self.flush_denormal = False
        # True for threads on which denormal numbers are flushed by an item.
        self._flushes: dict[int, bool] = {}

    def forget(self) -> None:
        """In a process that was forked: the workers are not there, and nothing can be queued."""
        self._room = Condition()
        self._waiting = 0
        self._stand_ins.clear()

    def wait_for_room(self) -> None:
        """Return when fewer than `queue_bound` items are queued. On the worker itself, at once."""
        if self._waiting < settings.queue_bound or threading.get_ident() in self._workers:
            return
        self.hand_over()
        with recorder.unlocked(), self._room:
            self._room.wait_for(self.has_room)

    def is_forked(self) -> bool:
        """True in a process that was forked after the package was imported."""
        return os.getpid() != self._process

    def has_room(self) -> bool:
        """True when an item may be queued without waiting."""
        return self._waiting < settings.queue_bound

    def submit(
        self, work: Callable[[], Result], uses: Uses | None = None, *, wait: bool = True, here: bool = False
    ) -> Future[Result]:
        """Queue `work` for the device that the settings name, after waiting for room with `wait`.

        Without `wait` where the recorder's lock is held and what was read under it must still be true: waiting lets
        others record. With `here` the calling thread takes it on, if nothing has to run before it: it runs in
        `wait_for`, and the caller must end with `hand_over`, whatever happens.
        """
        self._check_process()
        device = f"{settings.device_type}:{settings.device_ordinal}"
        if wait:
            self.wait_for_room()
        with signals_deferred(), self._room:
            worker = self._by_device.get(device) or self._start(device)
            others = [one.last for one in self._by_device.values() if one is not worker and one.last is not None]
            item = _Item(work, uses, others, self.flush_denormal)
            here = here and self._take_on(worker, item)
            if not here and item.threads > 1 and settings.device_type == "cpu":
                release_pool()
            self._waiting += 1
            _disturb()
            worker.last = item.future
            worker.items.append(item)
            if not here:
                worker.ready.put(None)
        return item.future

    def _take_on(self, worker: _Worker, item: _Item) -> bool:
        """Let the calling thread run this item of a worker, or say that it cannot. With the lock held."""
        thread = threading.get_ident()
        if worker.stand_in != thread or thread in self._workers:
            if self._waiting or worker.stand_in or item.flush or settings.device_type != "cpu":
                return False
            if thread in self._workers or not has_clean_state():
                return False
            worker.stand_in = thread
            self._stand_ins[thread] = worker
        worker.taken_on = item.future
        return True

    def hand_over(self) -> None:
        """Give what the calling thread has taken on, and not run, to the worker."""
        worker = self._stand_ins.pop(threading.get_ident(), None)
        if worker is not None:
            self._stand_back(worker)

    def _stand_back(self, worker: _Worker) -> None:
        """The calling thread no longer runs anything for this worker."""
        with self._room:
            worker.stand_in = 0
            worker.taken_on = None
            for _ in worker.items:
                worker.ready.put(None)
            self._room.notify_all()

    def is_idle(self) -> bool:
        """True when nothing is queued or under way."""
        return not self._waiting

    def let_launch(self, item: Future[Any]) -> None:
        """Give a worker that had nothing to do the time to launch this item, on a device that computes beside the host.

        A thread that goes on in Python without a pause would keep the interpreter to itself for its switch interval,
        5 ms, while the device has nothing to do.
        """
        if settings.device_type != "cpu" and threading.get_ident() not in self._workers:
            with suppress(Timeout, CancelledError):
                item.exception(_LAUNCH_S)

    def begin_here(self) -> bool:
        """Let the calling thread run work for the CPU, in its place among what is queued, until it calls `end_here`.
        False when something is queued or under way, which has to run first, or the thread's state changes what kernels
        do.

        For short work that waits for nothing, with the recorder's lock held: nobody sees it half done.
        """
        thread = threading.get_ident()
        worker = self._by_device.get("cpu:0")
        if worker is None or thread in self._workers or self.flush_denormal or not has_clean_state():
            return False
        with self._room:
            # An item waits until it has run.
            if self._waiting or worker.stand_in or self.is_forked():
                return False
            worker.stand_in = thread
            # All of it has run. An error would hold the frames of who was told of it.
            worker.last = None
            _disturb()
        self.enter_here()
        return True

    @property
    def cpu_worker(self) -> Any:
        """The worker of the CPU, if there is one; a thread that runs something in its place is its `stand_in`."""
        return self._by_device.get("cpu:0")

    def start_cpu_worker(self) -> Any:
        """The worker of the CPU, which is there from then on."""
        self._check_process()
        with signals_deferred(), self._room:
            return self.cpu_worker or self._start("cpu:0")

    def enter_here(self) -> None:
        """Let the calling thread, which is a stand-in now, count as the CPU's worker."""
        self._workers[threading.get_ident()] = self._by_device["cpu:0"]
        keep_warnings()

    def end_here(self) -> None:
        """The work that began with `begin_here` is done. May be called again if it was interrupted."""
        keep_warnings(False)
        worker = self._workers.pop(threading.get_ident(), None) or self._by_device["cpu:0"]
        with self._room:
            worker.stand_in = 0
            if self._waiting:
                self._room.notify_all()

    def _check_process(self) -> None:
        if self.is_forked():
            raise LtcError(
                "the ltc device was used before this process was forked, and cannot be used in the child",
                hint="use the 'spawn' start method, or keep ltc tensors out of DataLoader workers",
            )

    def _start(self, device: str) -> _Worker:
        worker = _Worker()
        # A daemon: the end of the process waits for what is queued by itself, and work may be queued until then.
        threading.Thread(target=self._serve, args=(worker,), name=f"torch_ltc {device}", daemon=True).start()
        # Afterwards: there may be no more threads, and what is queued for a worker without one never runs.
        self._by_device[device] = worker
        return worker

    # ---- on a worker ------------------------------------------------------------------------------------------------

    def _serve(self, worker: _Worker) -> None:
        self._workers[threading.get_ident()] = worker
        while True:
            if worker.threads > 1:
                self._linger(worker)
            else:
                worker.ready.get()
            self._run_next(worker)

    def _linger(self, worker: _Worker) -> None:
        """Wait for the next item; give the OpenMP pool up when it does not come soon."""
        try:
            worker.ready.get(timeout=_THREAD_S * (worker.threads - 1))
        except queue.Empty:
            release_pool()
            worker.threads = 1
            worker.ready.get()

    def _run_next(self, worker: _Worker) -> None:
        """Run the next item, if there is one, when nobody else stands in for the worker."""
        runners = (0, threading.get_ident())
        with self._room:
            if worker.stand_in not in runners:
                self._room.wait_for(lambda: worker.stand_in in runners)
            if not worker.items:
                return
            item = worker.items.popleft()
        worker.running.append(item)
        worker.threads = max(worker.threads, item.threads)
        keep_warnings()
        result, raised = None, None
        try:
            # Asking has a new thread take the number that was set last; later it would do so in a kernel.
            if item.threads != torch.get_num_threads():
                set_threads(item.threads)
            if item.flush != self._flushes.get(threading.get_ident(), False):
                set_flush_denormal(item.flush)
                self._flushes[threading.get_ident()] = item.flush
            for other in item.others:
                other.exception()
            with below_autograd():
                result = item.work()
        except BaseException as error:
            raised = error
        worker.running.pop()
        with self._room:
            self._waiting -= 1
            self._room.notify_all()
        if raised is None:
            item.future.set_result(result)
        else:
            item.future.set_exception(raised)
        # The traceback of the error refers to this frame.
        del item, raised

    def complete(self) -> None:
        """The results of the item under way are installed: what waits for them may run. On a worker."""
        worker = self._workers.get(threading.get_ident())
        if worker is not None and worker.running:
            worker.running[-1].uses = NOTHING

    def _run_up_to(self, worker: _Worker, future: Future[Any]) -> None:
        """On a worker, run what is queued there up to this item. Raises LtcError where that must wait for what is under
        way itself."""
        while not future.done():
            running = worker.running_item(future)
            if running is not None and running.uses is NOTHING:
                return
            if running is not None or not self._may_run_up_to(worker, future):
                raise LtcError(
                    "code that runs inside of a program, on the worker, reads a tensor that waits for this program",
                    source=str(current_source()),
                    hint="read it after the program has run: in a listener of ExecuteEvent, or on another thread",
                )
            with suppress(queue.Empty):
                worker.ready.get_nowait()
            self._run_next(worker)

    def _run_taken_on(self, worker: _Worker) -> None:
        """Run what the calling thread has taken on, in the worker's place and state."""
        thread = threading.get_ident()
        self._workers[thread] = worker
        had_gradients, threads = torch.is_grad_enabled(), torch.get_num_threads()
        with signals_deferred():
            try:
                set_grad_enabled(True)
                while worker.taken_on is not None and not worker.taken_on.done():
                    self._run_next(worker)
            finally:
                set_grad_enabled(had_gradients)
                keep_warnings(False)
                if self._flushes.pop(thread, False):
                    set_flush_denormal(False)
                if torch.get_num_threads() != threads:
                    set_threads(threads)
                del self._workers[thread]
                self.hand_over()

    def _may_run_up_to(self, worker: _Worker, future: Future[Any]) -> bool:
        """True when nothing under way must end before the items up to this one."""
        with self._room:
            queued = list(worker.items)
        places = [place for place, item in enumerate(queued) if item.future is future]
        return bool(places) and not any(
            running.must_precede(item) for running in worker.running for item in queued[: places[0] + 1]
        )

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def call(self, work: Callable[[], Result]) -> Result:
        """Queue `work` and wait for its result. On a worker itself, part of what is under way: runs at once."""
        return work() if threading.get_ident() in self._workers else self.result_of(self.submit(work))

    def result_of(self, item: Future[Result]) -> Result:
        """Wait for the result of a queued item."""
        self.wait_for(item)
        try:
            return item.result()
        except RuntimeError as error:
            lost = device_loss.told(error)
            if lost is None:
                raise
            raise lost from error

    def wait_for(self, item: Future[Any]) -> None:
        """Return when this queued item has run."""
        if item.done():
            return
        self._check_process()
        thread = threading.get_ident()
        worker = self._workers.get(thread)
        with recorder.unlocked():
            if worker is not None:
                self._run_up_to(worker, item)
                return
            taken_on = self._stand_ins.get(thread)
            if taken_on is not None:
                self._run_taken_on(taken_on)
            item.exception()

    def drain(self) -> None:
        """Wait until everything queued so far has run. On a worker itself, return at once: it goes on afterwards. In a
        process that was forked, there is nothing to wait for."""
        if not self.is_forked() and threading.get_ident() not in self._workers:
            for worker in list(self._by_device.values()):
                if worker.last is not None:
                    self.wait_for(worker.last)

    # ---- for the user's thread --------------------------------------------------------------------------------------

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
os.register_at_fork(after_in_child=executor.forget)
atexit.register(deferred.show_errors_at_exit)
