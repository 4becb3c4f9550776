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
from torch_ltc.compile.background import background
from torch_ltc.compile.compiler_client import CompilerDied, compiler_client
from torch_ltc.compile.compiler_process import Answer
from torch_ltc.compile.disk_cache import Key, Store
from torch_ltc.compile.hooks import Failure, failed
from torch_ltc.compile.program_cache import Entry
from torch_ltc.compile.specialization_cache import CompileRequest, specializations
from torch_ltc.config import cache_folder, settings
from torch_ltc.deferred import deferred
from torch_ltc.errors import BackendError, CompileError, LtcError
from torch_ltc.events import CompileEvent, LoadEvent, RefusalEvent, emit
from torch_ltc.lowering.gil import yield_gil
from torch_ltc.lowering.interface import Backend, refusal
from torch_ltc.lowering.lower import Executable, lower
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.serialize import NotSerializableError, dump_data, dump_executable, load_executable
from torch_ltc.lowering.torch_state import TorchState, device_text, versions_text
from torch_ltc.program.instruction import Program
from torch_ltc.program.symbolic_key import symbolic_key, symbolic_key_text
from torch_ltc.pytorch.profiler_ranges import span

__all__ = ["CompileJob", "compile_now", "compiling_now", "start", "stop", "summary", "wait_for_jobs"]

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
class CompileJob:
    """What is to be made for a program, and with what settings. Without a request it is only looked for on disk; with
    `waits` the executor waits for it."""

    entry: Entry
    backend: Backend
    strict: bool
    store: Store
    torch_state: TorchState
    request: CompileRequest | None = None
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


def start(job: CompileJob) -> None:
    """Have it made in the background. A request that is under way already is not started again."""
    request = job.request
    if request is None:
        background.submit("disk", job.title, lambda: _look(job))
    elif request.ticket not in _started:
        _started.add(request.ticket)
        lane = "elsewhere" if job.backend.compiles_out_of_process else "here"
        background.submit(lane, job.title, lambda: _make(job))


def wait_for_jobs() -> None:
    """Return when nothing is being compiled or loaded."""
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
    compiler_client.close()
    background.stop(finish="disk")


def _make(job: CompileJob) -> None:
    """Make what is asked for, and tell how it went; nothing is raised."""
    request = job.request
    assert request is not None
    try:
        torch.set_num_threads(job.torch_state.threads)
        compile_now(job)
    except BackendError as error:
        # Raised at the next sync or read: the run that asked for it has long been served.
        deferred.add_error(error)
    except (SystemExit, KeyboardInterrupt) as error:
        # A backend may raise anything. Nobody else would hear of it on this thread.
        specializations.failed(request, RuntimeError(repr(error)))
        failure = CompileError(f"{job.backend.name} ended its compilation of {job.title}: {error!r}")
        job.entry.refused[job.backend] = failure.untraced()
        deferred.add_error(failure)
    finally:
        _started.discard(request.ticket)


# ---- now ------------------------------------------------------------------------------------------------------------


def compile_now(job: CompileJob) -> bool:
    """Make what is asked for. True if the program should be placed again. Raises what the policy makes an error."""
    request = job.request
    assert request is not None
    _look(job)
    if specializations.served(request):
        specializations.withdrawn(request)
        return True
    if job.store.folder:
        metrics.count("CompileNotOnDisk")
    began = time.perf_counter()
    try:
        with span("compile", request.program.identity, job.backend.name):
            executable, data = _compiled(job, request)
    except Exception as error:
        if background.stopped:
            return False
        if specializations.failed(request, error):
            return True
        refuse(job.entry, job.backend, refusal(job.backend.name, job.entry.program, error), job.strict)
        return False
    specializations.installed(request, executable)
    duration_s = time.perf_counter() - began
    why = request.why
    emit(
        CompileEvent(
            request.program.identity,
            job.backend.name,
            duration_s,
            why.text,
            data is not None,
            request.promoted,
            why.cause,
            why.source if why.text else None,
        )
    )
    if executable.note:
        deferred.add_warning(executable.note)
    if job.store.folder:
        title = f"keep program {request.program.identity}"
        background.submit("disk", title, lambda: _keep(job, request, executable, data))
    return True


def refuse(entry: Entry, backend: Backend, error: BackendError, strict: bool) -> None:
    """The backend has had its chance with this program."""
    entry.refused[backend] = error.untraced()
    failed(Failure(entry, backend, "compile", error))
    emit(RefusalEvent(entry.program.identity, backend.name, "compile", str(error)))
    if strict:
        raise error
    deferred.add_warning(f"{error}\n  the program runs in the {registry.reference.name} instead")


def _compiled(job: CompileJob, request: CompileRequest) -> tuple[Executable, bytes | None]:
    """What was asked for, and its bytes if another process compiled it."""
    backend, program = job.backend, request.program
    # Whoever waits anyway need not start a process.
    data = _compiled_out_of_process(job, request) if backend.compiles_out_of_process and not job.waits else None
    if data is not None:
        return load_executable(backend, program, data), data
    return lower(backend, program, request.numbers, request.varying, job.strict, request.sizes), None


def _compiled_out_of_process(job: CompileJob, request: CompileRequest) -> bytes | None:
    """What another process compiled; None if it cannot. Raises when the backend cannot."""
    try:
        asked = dump_data((job.torch_state, job.backend, request, job.strict))
    except NotSerializableError as error:
        log.info("program %s is compiled in this process: %s", request.program.identity, error)
        return None
    message = pickle.dumps((versions_text(), asked))
    for attempt in range(_MOST_ENDINGS):
        try:
            answer = compiler_client.ask(message)
        except CompilerDied as error:
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


def _key(job: CompileJob, program: Program, alone: bool) -> Key:
    """What a compiled form of this program is right for: with `alone` for its integers, else whatever they are."""
    parts = [versions_text(), repr(job.torch_state), f"backend {job.backend.name} {job.backend.version()}"]
    yield_gil()
    parts += [device_text(program.device), f"strict {job.strict}", symbolic_key_text(program)]
    yield_gil()
    if alone:
        parts.append(repr(symbolic_key(program)[1]))
    return Key(_brief(program, alone), "\n".join(parts))


def _look(job: CompileJob) -> None:
    """Give a program, and those that share it, what earlier processes compiled."""
    for alone in (False, True):
        if job.store.may_have(_brief(job.entry.program, alone)):
            # One after the other: what two threads look for is often the same.
            with _looking:
                for path, data in job.store.find(_key(job, job.entry.program, alone)):
                    if not specializations.has_file(job.entry, job.backend, path, alone):
                        _load(job, path, data)


def _load(job: CompileJob, path: str, data: bytes) -> None:
    """Give the program what is in a file; one that is of no use goes."""
    program, backend = job.entry.program, job.backend
    began = time.perf_counter()
    try:
        with span("load", program.identity, backend.name):
            executable = load_executable(backend, program, data)
    except Exception as error:
        # Written by us, whole, and of no use: nobody else will have more luck with it.
        log.warning("%s cannot be loaded and is removed: %s: %s", path, type(error).__name__, error)
        job.store.drop(path)
        return
    specializations.adopted(job.entry, backend, path, executable)
    emit(LoadEvent(program.identity, backend.name, time.perf_counter() - began, job.store.folder))


def _keep(job: CompileJob, request: CompileRequest, executable: Executable, data: bytes | None) -> None:
    """Write down what was compiled, for later processes."""
    if data is None:
        try:
            data = dump_executable(job.backend, request.program, executable)
        except NotSerializableError:
            return
    if data is not None:
        # Compiled forms of one skeleton stand beside each other: they differ in constants, symbols or guards.
        chosen = executable.specialization
        variant = f"{executable.fixed} {chosen and chosen.slots} {executable.guards}"
        job.store.put(_key(job, request.program, request.sizes is None), variant, data)
