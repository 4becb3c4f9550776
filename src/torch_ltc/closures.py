"""Step closures: functions that run after a sync, in the step or on a thread of their own.

Owns the closures that wait for the end of the step, and the one thread that runs asynchronous closures. It is a thread
of its own, beside the executor's and the compile threads: a closure is the user's code, reads tensors and may block for
long, and must never hold up the worker that computes what it reads.
"""

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch_ltc.config import settings
from torch_ltc.deferred import fail_exit
from torch_ltc.errors import ClosureError
from torch_ltc.signals import Condition

__all__ = [
    "AsyncClosureHandler",
    "ClosureHandler",
    "DeviceContext",
    "add_step_closure",
    "get_device_context",
    "run_step_closures",
    "wait_step_closures",
]

Closure: TypeAlias = Callable[[], object]

_MOST_FRAMES = 4
_IDLE_S = 3.0
_EXIT_WAIT_S = 60.0


class ClosureHandler:
    """Runs closures at once, on the calling thread."""

    def run(self, closure: Closure) -> None:
        """Run one closure; what it raises goes to the caller."""
        closure()

    def __call__(self, closures: Iterable[Closure]) -> None:
        """Run all closures in order, also those behind one that fails.

        Raises what the closure raised when one failed, and a ClosureError that holds all of it when several did.
        """
        raised: list[Exception] = []
        for closure in closures:
            try:
                self.run(closure)
            except Exception as error:
                raised.append(error)
        if len(raised) == 1:
            raise raised[0]
        if raised:
            raise ClosureError(_list_errors("step closures failed", raised), exceptions=raised) from raised[0]


class AsyncClosureHandler(ClosureHandler):
    """Runs closures in order on one thread of its own, which starts with the first and ends when it has been idle.

    What a closure raises is raised from the next submission, or from `wait()`, as the cause of a ClosureError;
    closures queued behind it still run. The thread is a daemon; at the end of the process what is queued is waited
    for, up to a minute.
    """

    def __init__(self, max_queue_size: int | None = None) -> None:
        """Make a handler whose submissions wait while `max_queue_size` closures are queued.

        None takes the setting `closure_queue_bound` at each submission.
        """
        if max_queue_size is not None and max_queue_size < 1:
            raise ValueError(f"max_queue_size is {max_queue_size}\n  try: a number of at least 1, or None")
        self._max_queue_size = max_queue_size
        self._changed = Condition()
        self._queue: deque[Closure] = deque()
        self._running = False
        self._raised: list[BaseException] = []
        self._thread: threading.Thread | None = None
        _handlers.add(self)

    def run(self, closure: Closure) -> None:
        """Queue one closure; raises ClosureError instead when an earlier one has failed since the last report."""
        self([closure])

    def __call__(self, closures: Iterable[Closure]) -> None:
        """Queue closures in order, waiting while the queue is full.

        Raises ClosureError, before anything is queued, when an earlier closure has failed since the last report.
        """
        with self._changed:
            self._raise_errors("Cannot run asynchronous closure due to previously raised exception")
            for closure in closures:
                # A closure that submits closures would wait for itself, so on our own thread the bound does not hold.
                while not self._on_own_thread() and len(self._queue) >= self._bound():
                    self._changed.wait()
                # First: where no thread can be started, nobody waits for what is queued.
                self._start_thread()
                self._queue.append(closure)
                self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every queued closure has run; raises ClosureError for what they raised, or after `timeout_s`."""
        with self._changed:
            if self._on_own_thread():
                raise ClosureError(
                    "an asynchronous closure waits for the asynchronous closures, itself among them",
                    hint="wait outside of closures",
                )
            if not self._changed.wait_for(self._is_idle, timeout_s):
                raise ClosureError(
                    f"{len(self._queue) + self._running} asynchronous closures had not finished after {timeout_s} s",
                    hint="a longer timeout_s, or look for a closure that blocks",
                )
            self._raise_errors("asynchronous closures failed")

    def _is_idle(self) -> bool:
        return not self._queue and not self._running

    def _bound(self) -> int:
        return settings.closure_queue_bound if self._max_queue_size is None else self._max_queue_size

    def _on_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _raise_errors(self, what: str) -> None:
        if not self._raised:
            return
        raised, self._raised = self._raised, []
        raise ClosureError(_list_errors(what, raised), exceptions=raised) from raised[0]

    def _start_thread(self) -> None:
        # After a fork the child finds a thread that is not alive, and starts its own.
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._loop, name="torch_ltc-closures", daemon=True)
            thread.start()
            self._thread = thread

    def _loop(self) -> None:
        while (closure := self._take()) is not None:
            error: BaseException | None = None
            try:
                closure()
            except BaseException as caught:  # `sys.exit()`, too: it would end this thread, and others wait for it
                error = caught
            # Dropped before the next wait: an idle thread must not keep the tensors of the last closure alive.
            del closure
            with self._changed:
                self._running = False
                if error is not None:
                    self._raised.append(error)
                del error
                self._changed.notify_all()

    def _take(self) -> Closure | None:
        """The next closure; None, and the thread is given up, when none came for a while."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._queue), _IDLE_S):
                self._thread = None
                return None
            self._running = True
            closure = self._queue.popleft()
            self._changed.notify_all()
            return closure


_handlers: "weakref.WeakSet[AsyncClosureHandler]" = weakref.WeakSet()


class DeviceContext:
    """The closures that wait for the end of the step on one device, and the handlers that run them."""

    def __init__(self, device: str) -> None:
        """Make an empty context of `device`."""
        self.device = device
        self.closure_handler = ClosureHandler()
        self.async_closure_handler = AsyncClosureHandler()
        self._lock = threading.Lock()
        self._waiting: list[Closure] = []
        self._waiting_async: list[Closure] = []

    def add(self, closure: Closure, run_async: bool) -> None:
        """Keep `closure` for the end of the step."""
        with self._lock:
            (self._waiting_async if run_async else self._waiting).append(closure)

    @property
    def has_closures(self) -> bool:
        """True when some wait."""
        return bool(self._waiting or self._waiting_async)

    def run(self) -> None:
        """Run what waits, and queue what waits and is asynchronous; both happen when either fails.

        Asynchronous closures that are refused, because an earlier one failed, wait for the next step.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
            waiting_async, self._waiting_async = self._waiting_async, []
        try:
            if waiting_async:
                self._submit(waiting_async)
        finally:
            self.closure_handler(waiting)

    def _submit(self, closures: list[Closure]) -> None:
        try:
            self.async_closure_handler(closures)
        except ClosureError:
            with self._lock:
                self._waiting_async[:0] = closures
            raise


_contexts: dict[str, DeviceContext] = {}
_contexts_lock = threading.Lock()


def get_device_context(device: str | None = None) -> DeviceContext:
    """The context of `device`, one for the whole process; the lazy device's own when None."""
    name = "ltc" if device is None else str(device)
    with _contexts_lock:
        context = _contexts.get(name)
        if context is None:
            context = _contexts[name] = DeviceContext(name)
        return context


def add_step_closure(closure: Callable[..., object], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` after the sync that ends the present step.

    The tensors in `args` are computed by that sync together with everything else, so that printing or logging them
    costs no program of its own. Closures run in the order in which they were added; those with `run_async` run on a
    thread of their own, beside the next step, and see what their tensors hold by then.
    """
    arguments = tuple(args)
    get_device_context().add(lambda: closure(*arguments), run_async)


def end_step() -> None:
    """As `run_step_closures`, quick where there are none."""
    context = _contexts.get("ltc")
    if context is not None and context.has_closures:
        context.run()


def run_step_closures() -> DeviceContext:
    """Run the closures of the present step now, and queue the asynchronous ones; returns the device's context."""
    context = get_device_context()
    context.run()
    return context


def wait_step_closures(timeout_s: float | None = None) -> None:
    """Return when every asynchronous closure that was queued has run; raises ClosureError for what they raised."""
    get_device_context().async_closure_handler.wait(timeout_s)


def _list_errors(what: str, raised: Sequence[BaseException]) -> str:
    lines = ["  " + traceback.format_exception_only(error)[-1].strip() for error in raised]
    # The lines of the user's that the first comes through, from the closure on. This module does not import PyTorch.
    modules = [sys.modules[name] for name in ("torch_ltc", "torch") if name in sys.modules]
    own = tuple(f"{Path(module.__file__).parent}{os.sep}" for module in modules if module.__file__)
    frames = [frame for frame in traceback.extract_tb(raised[0].__traceback__) if not frame.filename.startswith(own)]
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames[:_MOST_FRAMES]]
    where = [f"  the first at {', '.join(places)}"] if places else []
    return "\n".join([what, *lines, *where])


def _wait_at_exit() -> None:
    """Run what is queued before the process ends, and show what nobody was left to be told."""
    deadline = time.monotonic() + _EXIT_WAIT_S
    for handler in list(_handlers):
        try:
            handler.wait(max(0.0, deadline - time.monotonic()))
        except ClosureError as error:
            fail_exit(f"at exit: {error}")


atexit.register(_wait_at_exit)
