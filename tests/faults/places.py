"""Places at which a fault can be injected, found by looking at interfaces, and the faults.

A place is a function: a method of an interface between the package and a backend or a device, a call of a module that
reads and writes files or starts processes, a reading of the clock, or code of the user's that is called back. The calls
of each place are counted; the n-th call of one of them is made to fail.
"""

from __future__ import annotations

import errno
import functools
import inspect
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.support.graphs import StandInGraph, StandInGraphs
from torch_ltc import private_files
from torch_ltc.backends import interpreter
from torch_ltc.compile import compiler_client, disk_cache
from torch_ltc.device import copies
from torch_ltc.execute.executor import Executor
from torch_ltc.lowering import kernel_call
from torch_ltc.lowering.interface import Backend, BackendData, Computation, LoweringContext
from torch_ltc.record.buffer import Buffer

__all__ = ["FAULTS", "Fault", "Injector", "faults_of"]

_DAY_S = 86_400.0
# Functions of `os` that touch no file.
_PURE = ("fspath", "fsencode", "fsdecode", "getpid", "getuid", "get_exec_path")


class Injected(RuntimeError):
    """The error that a fault raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to fail: `happen` is called in the place of a function, with it and its arguments."""

    name: str
    kinds: tuple[str, ...]
    happen: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _raise(error: Callable[[], BaseException]) -> Callable[..., Any]:
    def happen(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise error()

    return happen


def _raise_late(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function(*args, **kwargs)
    raise Injected("injected after the call")


def _truncate(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data = function(*args, **kwargs)
    return data[: len(data) // 2]


def _flip(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data = bytearray(function(*args, **kwargs))
    if data:
        data[len(data) // 2] ^= 0x10
    return bytes(data)


def _tear(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Half of what is written gets there, and nobody is told."""
    (data,) = args
    function(data[: len(data) // 2])
    return len(data)


def _kill(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pid = compiler_client.compiler_client.pid
    if pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return function(*args, **kwargs)


def _beyond(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices that are none of the tensor's: the kernel that takes them fails, wherever it is called."""
    return function(*args, **kwargs) + 100


def _jump(distance_s: float) -> Callable[..., Any]:
    def happen(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs) + distance_s

    return happen


_CALLS = ("call", "file", "read", "write", "process")
_FILES = ("file", "read", "write")
FAULTS = (
    Fault("error", _CALLS, _raise(lambda: Injected("injected"))),
    Fault("error after the call", ("call",), _raise_late),
    Fault("MemoryError", _CALLS, _raise(lambda: MemoryError("injected"))),
    Fault("KeyboardInterrupt", ("call",), _raise(KeyboardInterrupt)),
    Fault("full disk", _FILES, _raise(lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))),
    Fault("truncated file", ("read",), _truncate),
    Fault("flipped bit", ("read",), _flip),
    Fault("torn write", ("write",), _tear),
    Fault("killed process", ("process",), _kill),
    Fault("no process", ("process",), _raise(lambda: OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))),
    Fault("index out of range", ("data",), _beyond),
    Fault("clock a day ahead", ("clock",), _jump(_DAY_S)),
    Fault("clock a day back", ("clock",), _jump(-_DAY_S)),
)


def faults_of(kind: str) -> list[Fault]:
    """The faults that a place of this kind can have."""
    return [fault for fault in FAULTS if kind in fault.kinds]


class Injector:
    """Counts the calls of all places, and makes one call fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._restore: list[Callable[[], None]] = []
        self.counts: Counter[str] = Counter()
        self.kinds: dict[str, str] = {}
        self.threads: dict[str, set[str]] = {}
        self.counting = False
        self._target: tuple[str, int, Fault] | None = None
        self.fired = False

    def arm(self, place: str = "", number: int = 0, fault: Fault | None = None) -> None:
        """Begin to count anew; the call of this number is to fail."""
        with self._lock:
            self.counts.clear()
            self._target = None if fault is None else (place, number, fault)
            self.fired = False
            self.counting = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted, and nothing fails."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before

    def wrap(self, place: str, function: Callable[..., Any], kind: str = "call") -> Callable[..., Any]:
        """The function as a place."""
        self.kinds[place] = kind

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.counting:
                with self._lock:
                    self.counts[place] += 1
                    due = self._target is not None and self._target[:2] == (place, self.counts[place])
                    self.fired |= due
                if due:
                    assert self._target is not None
                    return self._target[2].happen(function, args, kwargs)
            return function(*args, **kwargs)

        return call

    # ---- finding places

    def patch(self, owner: Any, name: str, made: Any) -> None:
        """Replace an attribute until the end."""
        own = name in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, made)

        def restore() -> None:
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self._restore.append(restore)

    def add_interface(self, owner: type, title: str, names: list[str]) -> None:
        """The methods of an interface, as this class has them."""
        for name in names:
            found = inspect.getattr_static(owner, name, None)
            place = f"{title}.{name}"
            if isinstance(found, (staticmethod, classmethod)):
                self.patch(owner, name, type(found)(self.wrap(place, found.__func__)))
            elif inspect.isfunction(found):
                self.patch(owner, name, self.wrap(place, found))

    def add_module(self, module: ModuleType, used: ModuleType, kind: str, names: list[str] | None = None) -> None:
        """Calls that a module makes to another."""
        title = f"{module.__name__.removeprefix('torch_ltc.')}: {used.__name__}"
        self.patch(module, used.__name__, _ModulePlaces(self, used, title, kind, names))

    def add_files(self, module: ModuleType) -> None:
        """What a module does to files."""
        self.add_module(module, os, "file")
        title = module.__name__.removeprefix("torch_ltc.")
        opened = self.wrap(f"{title}: open", open, "file")
        self.patch(module, "open", lambda *args, **kwargs: _FilePlaces(self, opened(*args, **kwargs), title))

    def close(self) -> None:
        """Everything is as it was."""
        while self._restore:
            self._restore.pop()()


class _ModulePlaces:
    """A module whose functions are places."""

    def __init__(self, injector: Injector, module: ModuleType, title: str, kind: str, names: list[str] | None) -> None:
        self._injector, self._module, self._title, self._kind, self._names = injector, module, title, kind, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        chosen = (
            name in self._names if self._names is not None else inspect.isbuiltin(found) or inspect.isfunction(found)
        )
        if not chosen or name in _PURE:
            return found
        return self._injector.wrap(f"{self._title}.{name}", found, self._kind)


class _FilePlaces:
    """A file whose reads and writes are places."""

    def __init__(self, injector: Injector, file: io.IOBase, title: str) -> None:
        self._injector, self._file, self._title = injector, file, title

    def __enter__(self) -> _FilePlaces:
        self._file.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._file.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        kind = {"read": "read", "write": "write"}.get(name)
        return found if kind is None else self._injector.wrap(f"{self._title}: file.{name}", found, kind)


def _methods(interface: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(interface, callable) if not name.startswith("_")]


def _subclasses(base: type) -> Iterator[type]:
    yield base
    for derived in base.__subclasses__():
        yield from _subclasses(derived)


@contextmanager
def all_places(backends: list[Backend]) -> Iterator[Injector]:
    """An injector with every place that these backends, the device and the package have."""
    injector = Injector()
    with ExitStack() as stack:
        stack.callback(injector.close)
        for kind in {type(backend) for backend in backends}:
            injector.add_interface(kind, "Backend", _methods(Backend))
        for kind in set(_subclasses(Computation)):
            own = [name for name in _methods(Computation) if name in vars(kind)]
            injector.add_interface(kind, "Computation", own)
        injector.add_interface(LoweringContext, "LoweringContext", _methods(LoweringContext))
        injector.add_interface(BackendData, "BackendData", _methods(BackendData))
        injector.add_interface(StandInGraphs, "Graphs", _methods(StandInGraphs))
        injector.add_interface(StandInGraph, "Graph", _methods(StandInGraph))
        injector.add_interface(Buffer, "Buffer", ["physical", "held"])
        injector.add_interface(Executor, "Executor", ["submit"])
        injector.patch(interpreter, "run_recorded_call", injector.wrap("kernel", interpreter.run_recorded_call))
        injector.patch(kernel_call, "run_filled", injector.wrap("kernel of a part", kernel_call.run_filled))
        injector.patch(copies, "upload", injector.wrap("upload", copies.upload))
        for module in (disk_cache, private_files):
            injector.add_files(module)
        injector.add_module(compiler_client, subprocess, "process", ["Popen"])
        for name in ("write_message", "read_message"):
            function = getattr(compiler_client, name)
            injector.patch(compiler_client, name, injector.wrap(f"compiler_client: {name}", function, "process"))
        for name, module in list(sys.modules.items()):
            if name.startswith("torch_ltc.") and vars(module).get("time") is time:
                injector.patch(
                    module,
                    "time",
                    _ModulePlaces(
                        injector, time, "clock", "clock", ["time", "monotonic", "perf_counter", "thread_time"]
                    ),
                )
        yield injector
