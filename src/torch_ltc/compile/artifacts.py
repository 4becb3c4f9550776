"""Artifacts: executables of earlier processes on disk, by what they are right for.

`disk_cache` owns the files; here are the keys, loading at the first execution of a program, and saving after a
compilation.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import lru_cache

from torch_ltc.compile.disk_cache import Key, Store
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.compile.specialization_cache import CompileRequest, specializations
from torch_ltc.config import cache_folder, settings
from torch_ltc.events import LoadEvent, emit
from torch_ltc.lowering.gil import yield_gil
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.lower import Executable
from torch_ltc.lowering.serialize import NotSerializableError, dump_executable, load_executable
from torch_ltc.lowering.versions import device_text, versions_text
from torch_ltc.program.instruction import Program
from torch_ltc.program.symbolic_key import symbolic_key, symbolic_key_text
from torch_ltc.pytorch.profiler_ranges import span
from torch_ltc.pytorch.switches import TorchState

__all__ = [
    "ArtifactContext",
    "Destination",
    "current_store",
    "destination",
    "load_artifacts",
    "save_artifact",
    "variant_text",
]

log = logging.getLogger(__name__)

# How long the compiler process may go on with the program it compiles after this process has ended.
EXIT_COMPILE_S = 300.0
# One load at a time: what two threads look for is often the same.
_loading = threading.Lock()


@lru_cache(maxsize=8)
def _store(folder: str, bound_bytes: int) -> Store:
    return Store(folder, bound_bytes)


def current_store() -> Store:
    """The artifact store, as the settings say now."""
    return _store(cache_folder(), settings.cache_bytes)


@dataclass(frozen=True, slots=True)
class ArtifactContext:
    """The dependences of an artifact besides its program, backend, strictness and global torch state; and its store."""

    backend: Backend
    strict: bool
    store: Store
    torch_state: TorchState
    threads: int

    def key(self, program: Program, alone: bool) -> Key:
        """The key of an executable of this program: with `alone` for its integers, else whatever they are."""
        parts = [versions_text(), repr(self.torch_state), f"threads {self.threads}"]
        parts += [f"backend {self.backend.name} {self.backend.version()}"]
        yield_gil()
        parts += [device_text(program.device), f"strict {self.strict}", symbolic_key_text(program)]
        yield_gil()
        if alone:
            parts.append(repr(symbolic_key(program)[1]))
        return Key(_brief(program, alone), "\n".join(parts))


def _brief(program: Program, alone: bool) -> str:
    count = f"{len(program.instructions)}.{len(program.outputs)}"
    return f"p{count}" if alone else f"s{count}"


def load_artifacts(context: ArtifactContext, entry: CachedProgram) -> None:
    """Install what earlier processes compiled for a program, and for those that share its symbolic key. Nothing is
    raised: what cannot be loaded is compiled."""
    try:
        _load_all(context, entry)
    except Exception as error:
        # Errors as text: a handler that keeps them would keep what their frames refer to.
        log.warning(
            "nothing is loaded for program %s: %s: %s", entry.program.identity, type(error).__name__, str(error)
        )


def _load_all(context: ArtifactContext, entry: CachedProgram) -> None:
    for alone in (False, True):
        if context.store.may_have(_brief(entry.program, alone)):
            loaded: list[LoadEvent] = []
            with _loading:
                for path, data in context.store.find(context.key(entry.program, alone)):
                    if not specializations.has_file(entry, context.backend, path, alone):
                        loaded.extend(_load(context, entry, path, data))
            # Without the lock: a listener may wait for the worker, which may load, too.
            for event in loaded:
                emit(event)


def _load(context: ArtifactContext, entry: CachedProgram, path: str, data: bytes) -> list[LoadEvent]:
    """Install the executable in a file, and give the event that says so; a corrupt or stale file is removed."""
    program, backend = entry.program, context.backend
    began = time.perf_counter()
    try:
        with span("load", program.identity, backend.name):
            executable = load_executable(backend, program, data)
    except Exception as error:
        # Written by us, whole, and not loadable: nobody else will have more luck with it.
        log.warning("%s cannot be loaded and is removed: %s: %s", path, type(error).__name__, str(error))
        context.store.drop(path)
        return []
    specializations.install_loaded(entry, backend, path, executable)
    took_s = time.perf_counter() - began
    return [LoadEvent(program.identity, backend.name, took_s, context.store.folder, executable.remark)]


@dataclass(frozen=True, slots=True)
class Destination:
    """The place on disk of an executable that another process compiles, and how many seconds that may go on with it
    when this process has ended."""

    folder: str
    bound_bytes: int
    key: Key
    limit_s: float

    def save(self, variant: str, data: bytes) -> None:
        """Write the executable to disk."""
        Store(self.folder, self.bound_bytes).put(self.key, variant, data)


def destination(context: ArtifactContext, request: CompileRequest) -> Destination | None:
    """The place of the executable of a request; None when it is not kept, or not after this process has ended."""
    store = context.store
    if not store.folder or not EXIT_COMPILE_S:
        return None
    key = context.key(request.program, request.specialization is None)
    return Destination(store.folder, store.bound_bytes, key, EXIT_COMPILE_S)


def variant_text(executable: Executable) -> str:
    """Executables of one symbolic key stand beside each other: they differ in constants, symbols or guards."""
    return f"{executable.fixed} {executable.specialization and executable.specialization.slots} {executable.guards}"


def save_artifact(
    context: ArtifactContext, request: CompileRequest, executable: Executable, data: bytes | None
) -> None:
    """Write an executable to disk for later processes. `data` are its bytes if the compiler process made it. Nothing is
    raised: what cannot be written is compiled again the next time."""
    try:
        if data is None:
            data = dump_executable(context.backend, request.program, executable)
        if data is not None:
            key = context.key(request.program, request.specialization is None)
            context.store.put(key, variant_text(executable), data)
    except NotSerializableError as error:
        log.debug("program %s is not kept on disk: %s", request.program.identity, str(error))
    except Exception as error:
        log.warning(
            "program %s is not kept on disk: %s: %s", request.program.identity, type(error).__name__, str(error)
        )
