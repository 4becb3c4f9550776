"""Makes what a program is to run with, now or in the background: from a file of an earlier process, or by compiling.

`compiling` decides what is due; here it is made. Compiling happens in another process where the backend says that it
takes long, else on a thread beside the executor; the setting `tiers` may ask to wait for it.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from torch_ltc import errors, metrics
from torch_ltc.config import cache_folder, settings
from torch_ltc.errors import BackendError, CompileError, LtcError
from torch_ltc.events import CompileEvent, LoadEvent, RefusalEvent, emit
from torch_ltc.lowering.interface import Backend, refusal
from torch_ltc.lowering.lower import Lowered, lower
from torch_ltc.lowering.portable import NotPortableError, dump_data, dump_lowered, load_lowered
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.surroundings import Surroundings, device_text, versions_text
from torch_ltc.lowering.turns import give_way
from torch_ltc.program.instruction import Program
from torch_ltc.program.skeleton import skeleton, skeleton_text
from torch_ltc.runtime.background import background
from torch_ltc.runtime.cache import Entry
from torch_ltc.runtime.compiler_process import Answer
from torch_ltc.runtime.disk import Key, Store
from torch_ltc.runtime.elsewhere import CompilerEnded, elsewhere
from torch_ltc.runtime.executor import executor
from torch_ltc.runtime.families import Request, families
from torch_ltc.runtime.ranges import span
from torch_ltc.runtime.watching import Failure, failed

__all__ = ["Task", "compile_now", "compiling_now", "start", "stop", "summary", "wait_for_compiles"]

log = logging.getLogger(__name__)

# How often a program may end the process that compiles it before it is left alone.
_MOST_ENDINGS = 2


@lru_cache(maxsize=8)
def _store(folder: str, bound_bytes: int) -> Store:
    return Store(folder, bound_bytes)


def current_store() -> Store:
    """Where compiled programs are kept, as the settings say now."""
    return _store(cache_folder(), settings.cache_bytes)


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be made for a program, and with what settings. Without a request it is only looked for on disk; with
    `waits` the executor waits for it."""

    entry: Entry
    backend: Backend
    strict: bool
    store: Store
    surroundings: Surroundings
    request: Request | None = None
    waits: bool = False

    @property
    def title(self) -> str:
        """What is being done, for reports."""
        program = self.entry.program
        what = "compile" if self.request is not None else "load"
        return f"{what} program {program.identity} of {len(program.calls)} calls with {self.backend.name}"


# ---- in the background ----------------------------------------------------------------------------------------------

_started: set[int] = set()
_looking = threading.Lock()


def start(task: Task) -> None:
    """Have it made in the background. A request that is under way already is not started again."""
    request = task.request
    if request is None:
        background.submit("disk", task.title, lambda: _look(task))
    elif request.ticket not in _started:
        _started.add(request.ticket)
        lane = "elsewhere" if task.backend.compiles_elsewhere else "here"
        background.submit(lane, task.title, lambda: _make(task))


def wait_for_compiles() -> None:
    """Return when everything that was synced has run, and nothing is being compiled or loaded."""
    executor.drain()
    background.wait()


def compiling_now() -> list[str]:
    """What is being compiled or loaded in the background, or waits for it."""
    return background.titles()


def summary() -> str:
    """How many programs were compiled in this process, and how many were loaded from files of earlier ones."""
    compiled = metrics.counter_value("Compile") or 0
    loaded = metrics.counter_value("CompileLoaded") or 0
    folder = cache_folder() or "nowhere: nothing is kept on disk"
    return f"{compiled} program{'s' if compiled != 1 else ''} compiled, {loaded} loaded from {folder}"


def stop() -> None:
    """Abandon everything, and say what there was. At exit."""
    log.info("%s", summary())
    elsewhere.close()
    background.stop(finish="disk")


def _make(task: Task) -> None:
    """Make what is asked for, and tell how it went; nothing is raised."""
    request = task.request
    assert request is not None
    try:
        torch.set_num_threads(task.surroundings.threads)
        compile_now(task)
    except BackendError as error:
        # Raised at the next sync or read: the run that asked for it has long been served.
        executor.report(error)
    except (SystemExit, KeyboardInterrupt) as error:
        # A backend may raise anything. Nobody else would hear of it on this thread.
        families.failed(request, RuntimeError(repr(error)))
        failure = CompileError(f"{task.backend.name} ended its compilation of {task.title}: {error!r}")
        task.entry.refused[task.backend] = failure.untraced()
        executor.report(failure)
    finally:
        _started.discard(request.ticket)


# ---- now ------------------------------------------------------------------------------------------------------------


def compile_now(task: Task) -> bool:
    """Make what is asked for. True if the program should be placed again. Raises what the policy makes an error."""
    request = task.request
    assert request is not None
    _look(task)
    if families.served(request):
        families.withdrawn(request)
        return True
    if task.store.folder:
        metrics.count("CompileNotOnDisk")
    began = time.perf_counter()
    try:
        with span("compile", request.program.identity, task.backend.name):
            lowered, data = _compiled(task, request)
    except Exception as error:
        if background.stopped:
            return False
        if families.failed(request, error):
            return True
        refuse(task.entry, task.backend, refusal(task.backend.name, task.entry.program, error), task.strict)
        return False
    families.installed(request, lowered)
    duration_s = time.perf_counter() - began
    why = request.why
    emit(
        CompileEvent(
            request.program.identity,
            task.backend.name,
            duration_s,
            why.text,
            data is not None,
            request.promoted,
            why.cause,
            why.source if why.text else None,
        )
    )
    if lowered.note:
        executor.note(lowered.note)
    if task.store.folder:
        title = f"keep program {request.program.identity}"
        background.submit("disk", title, lambda: _keep(task, request, lowered, data))
    return True


def refuse(entry: Entry, backend: Backend, error: BackendError, strict: bool) -> None:
    """The backend has had its chance with this program."""
    entry.refused[backend] = error.untraced()
    failed(Failure(entry, backend, "compile", error))
    emit(RefusalEvent(entry.program.identity, backend.name, "compile", str(error)))
    if strict:
        raise error
    executor.note(f"{error}\n  the program runs in the {registry.reference.name} instead")


def _compiled(task: Task, request: Request) -> tuple[Lowered, bytes | None]:
    """What was asked for, and its bytes if another process compiled it."""
    backend, program = task.backend, request.program
    # Whoever waits anyway need not start a process.
    data = _asked_elsewhere(task, request) if backend.compiles_elsewhere and not task.waits else None
    if data is not None:
        return load_lowered(backend, program, data), data
    return lower(backend, program, request.numbers, request.varying, task.strict, request.sizes), None


def _asked_elsewhere(task: Task, request: Request) -> bytes | None:
    """What another process compiled; None if it cannot. Raises when the backend cannot."""
    try:
        asked = dump_data((task.surroundings, task.backend, request, task.strict))
    except NotPortableError as error:
        log.info("program %s is compiled in this process: %s", request.program.identity, error)
        return None
    message = pickle.dumps((versions_text(), asked))
    for attempt in range(_MOST_ENDINGS):
        try:
            answer = elsewhere.ask(message)
        except CompilerEnded as error:
            if attempt + 1 == _MOST_ENDINGS:
                raise CompileError(f"{error}, {_MOST_ENDINGS} times") from error
            continue
        if answer.refused is not None:
            raise _error_of(answer)
        if answer.unable:
            log.info("program %s is compiled in this process: %s", request.program.identity, answer.unable)
        return answer.data or None
    return None


def _error_of(answer: Answer) -> LtcError:
    """The error that the other process met, with its stack as the cause."""
    assert answer.refused is not None
    name, text, source, hint, trace = answer.refused
    error: LtcError = getattr(errors, name, CompileError)(text)
    error.source, error.hint = source, hint
    error.__cause__ = RuntimeError(f"in the process that compiles:\n{trace}")
    return error


# ---- disk -----------------------------------------------------------------------------------------------------------


def _brief(program: Program, alone: bool) -> str:
    count = f"{len(program.instructions)}.{len(program.outputs)}"
    return f"p{count}" if alone else f"s{count}"


def _key(task: Task, program: Program, alone: bool) -> Key:
    """What a compiled form of this program is right for: with `alone` for its integers, else whatever they are."""
    parts = [versions_text(), repr(task.surroundings), f"backend {task.backend.name} {task.backend.version()}"]
    give_way()
    parts += [device_text(program.device), f"strict {task.strict}", skeleton_text(program)]
    give_way()
    if alone:
        parts.append(repr(skeleton(program)[1]))
    return Key(_brief(program, alone), "\n".join(parts))


def _look(task: Task) -> None:
    """Give a program, and those that share it, what earlier processes compiled."""
    for alone in (False, True):
        if task.store.may_have(_brief(task.entry.program, alone)):
            # One after the other: what two threads look for is often the same.
            with _looking:
                for path, data in task.store.find(_key(task, task.entry.program, alone)):
                    if not families.has_file(task.entry, task.backend, path, alone):
                        _load(task, path, data)


def _load(task: Task, path: str, data: bytes) -> None:
    """Give the program what is in a file; one that is of no use goes."""
    program, backend = task.entry.program, task.backend
    began = time.perf_counter()
    try:
        with span("load", program.identity, backend.name):
            lowered = load_lowered(backend, program, data)
    except Exception as error:
        # Written by us, whole, and of no use: nobody else will have more luck with it.
        log.warning("%s cannot be loaded and is removed: %s: %s", path, type(error).__name__, error)
        task.store.drop(path)
        return
    families.adopted(task.entry, backend, path, lowered)
    emit(LoadEvent(program.identity, backend.name, time.perf_counter() - began, task.store.folder))


def _keep(task: Task, request: Request, lowered: Lowered, data: bytes | None) -> None:
    """Write down what was compiled, for later processes."""
    if data is None:
        try:
            data = dump_lowered(task.backend, request.program, lowered)
        except NotPortableError:
            return
    if data is not None:
        # Compiled forms of one skeleton stand beside each other: they differ in constants, symbols or guards.
        variant = f"{lowered.fixed} {lowered.sizes and lowered.sizes.slots} {lowered.guards}"
        task.store.put(_key(task, request.program, request.sizes is None), variant, data)
