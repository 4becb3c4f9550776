"""Compile jobs: lower a request, out of process, on a compile thread, or at once, and install the executable.

A job drives the compile state of the program that made the request. Compiling happens in the compiler process where the
backend says that it takes long, else on a thread beside the executor; the setting `tiers` may ask to wait for it.
"""

from __future__ import annotations

import logging
import pickle
import time
from dataclasses import dataclass

from torch_ltc import errors, metrics
from torch_ltc.compile.artifacts import ArtifactContext, destination, load_artifacts, save_artifact
from torch_ltc.compile.background import background
from torch_ltc.compile.compiler_client import CompilerDied, compiler_client
from torch_ltc.compile.compiler_process import Answer
from torch_ltc.compile.hooks import Failure, backend_failed
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.compile.specialization_cache import CompileRequest, specializations
from torch_ltc.compile.state import State
from torch_ltc.config import cache_folder
from torch_ltc.deferred import deferred
from torch_ltc.errors import BackendError, CompileError, LtcError
from torch_ltc.events import CompileEvent, RefusalEvent, emit
from torch_ltc.lowering.gil import CompileCancelled
from torch_ltc.lowering.interface import Backend, refusal
from torch_ltc.lowering.lower import Executable, lower
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.serialize import NotSerializableError, dump_data, load_executable
from torch_ltc.lowering.versions import versions_text
from torch_ltc.pytorch.private import set_threads
from torch_ltc.pytorch.profiler_ranges import span
from torch_ltc.pytorch.switches import TorchState

__all__ = ["CompileJob", "compiling_now", "refuse", "start_load", "stop", "summary", "wait_for_jobs"]

log = logging.getLogger(__name__)

# How often a program may kill the compiler process before it is refused.
_MOST_DEATHS = 2


class _SwitchesChanged(Exception):
    """Global switches of PyTorch are not, or did not stay, as they were when the program was recorded."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A request of a program, and with what settings to compile it. With `waits` the executor waits for it."""

    entry: CachedProgram
    request: CompileRequest
    context: ArtifactContext
    waits: bool = False

    @property
    def backend(self) -> Backend:
        """The backend that compiles."""
        return self.context.backend

    def move(self, to: State, reason: str) -> None:
        """Change the compile state of the program."""
        self.entry.status(self.backend).move(to, reason)

    # ---- in the background ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Compile in the background."""
        self.move(State.QUEUED, "hot")
        where = "compiler process" if self.backend.compiles_out_of_process else "compile thread"
        background.submit(where, _title("compile", self.entry, self.backend), self._run_in_background)

    def _run_in_background(self) -> None:
        """Compile, and report failures; nothing is raised."""
        try:
            set_threads(self.context.threads)
            self.run()
        except BackendError as error:
            # Raised at the next sync or read: the execution that asked for it was served by the interpreter.
            deferred.add_error(error)
        except CompileCancelled:
            raise
        except BaseException as error:
            # A backend may raise anything. Nobody else would hear of it on this thread.
            title = _title("compile", self.entry, self.backend)
            first = next(iter(self.entry.program.calls), None)
            failure = CompileError(
                f"{self.backend.name} ended its compilation of {title}: {error!r}",
                source=None if first is None else str(first.source),
            )
            self.entry.status(self.backend).refuse(failure)
            deferred.add_error(failure)

    # ---- now --------------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Compile. True if the program should be looked up again. Raises what the setting `backend_failure` makes an
        error."""
        try:
            return self._run()
        finally:
            # Others wait for the request, however this ends.
            specializations.abandon(self.request)

    def _run(self) -> bool:
        request, backend = self.request, self.backend
        self.move(State.QUEUED, "hot")
        self.move(State.COMPILING, request.miss.text or "hot")
        load_artifacts(self.context, self.entry)
        if specializations.is_satisfied(request):
            specializations.cancel(request)
            self.move(State.COMPILED, "loaded from disk")
            return True
        if self.context.store.folder:
            metrics.count("CompileNotOnDisk")
        began = time.perf_counter()
        try:
            with span("compile", request.program.identity, backend.name):
                executable, data = self._compile()
        except _SwitchesChanged:
            specializations.cancel(request)
            self.move(State.INTERPRETED, "global switches of PyTorch were changed while it was compiled")
            return False
        except Exception as error:
            return self._failed(error)
        specializations.install(request, executable)
        self.move(State.COMPILED, f"compiled by {backend.name}")
        self._announce(time.perf_counter() - began, data is not None, executable.remark)
        if executable.note:
            deferred.add_warning(executable.note)
        if self.context.store.folder:
            title = _title("save", self.entry, backend)
            background.submit("disk", title, lambda: save_artifact(self.context, request, executable, data))
        return True

    def _failed(self, error: Exception) -> bool:
        if background.stopped:
            return False
        if specializations.fail(self.request, error):
            self.move(State.INTERPRETED, f"not with symbolic sizes: {str(error).partition(chr(10))[0]}")
            return True
        made = refusal(self.backend.name, self.entry.program, error)
        refuse(self.entry, self.backend, made, self.context.strict)
        return False

    def _announce(self, duration_s: float, out_of_process: bool, remark: str) -> None:
        request, miss = self.request, self.request.miss
        event = CompileEvent(
            request.program.identity,
            self.backend.name,
            duration_s,
            miss.text,
            out_of_process,
            request.promoted,
            miss.cause,
            miss.source if miss.text else None,
            remark,
        )
        emit(event)

    def _compile(self) -> tuple[Executable, bytes | None]:
        """The executable, and its bytes if the compiler process made it."""
        request, backend = self.request, self.backend
        # Whoever waits anyway need not start a process.
        data = self._compile_out_of_process() if backend.compiles_out_of_process and not self.waits else None
        if data is not None:
            return load_executable(backend, request.program, data), data
        strict, specialization = self.context.strict, request.specialization
        made = lower(backend, request.program, request.numbers, request.varying, strict, specialization)
        if TorchState.current() != self.context.torch_state:
            raise _SwitchesChanged
        return made, None

    def _compile_out_of_process(self) -> bytes | None:
        """The executable as bytes of the compiler process; None if that cannot make it. Raises when the backend
        cannot."""
        identity, context = self.request.program.identity, self.context
        try:
            asked = dump_data((context.torch_state, context.threads, context.backend, self.request, context.strict))
        except NotSerializableError as error:
            log.info("program %s is compiled in this process: %s", identity, str(error))
            return None
        place = destination(context, self.request)
        message = pickle.dumps((versions_text(), asked, place))
        for attempt in range(_MOST_DEATHS):
            try:
                answer = compiler_client.request(message, lasting=place is not None)
            except CompilerDied as error:
                if attempt + 1 == _MOST_DEATHS:
                    raise CompileError(f"{error}, {_MOST_DEATHS} times") from error
                continue
            if answer.refused is not None:
                raise _error_of(answer)
            if answer.unable:
                log.info("program %s is compiled in this process: %s", identity, answer.unable)
            return answer.data or None
        return None


def _title(what: str, entry: CachedProgram, backend: Backend) -> str:
    """A line about background work, for reports."""
    return f"{what} program {entry.program.identity} of {len(entry.program.calls)} calls with {backend.name}"


def _error_of(answer: Answer) -> LtcError:
    """The error that the compiler process met, with its stack as the cause."""
    assert answer.refused is not None
    name, text, source, hint, trace = answer.refused
    error: LtcError = getattr(errors, name, CompileError)(text)
    error.source, error.hint = source, hint
    error.__cause__ = RuntimeError(f"in the compiler process:\n{trace}")
    return error


def refuse(entry: CachedProgram, backend: Backend, error: BackendError, strict: bool) -> None:
    """Leave a program that the backend cannot compile to the interpreter, for good. With `strict`, raise instead."""
    entry.status(backend).refuse(error)
    backend_failed(Failure(entry, backend, "compile", error))
    emit(RefusalEvent(entry.program.identity, backend.name, "compile", str(error)))
    if strict:
        raise error
    deferred.add_warning(f"{error}\n  the program runs in the {registry.reference.name} instead")


def start_load(entry: CachedProgram, context: ArtifactContext) -> None:
    """Load the artifacts of a program in the background."""
    background.submit("disk", _title("load", entry, context.backend), lambda: load_artifacts(context, entry))


def wait_for_jobs() -> None:
    """Return when nothing is being compiled, loaded or saved."""
    background.wait()


def compiling_now() -> list[str]:
    """Titles of what is compiled, loaded or saved in the background, or waits for it."""
    return background.titles()


def summary() -> str:
    """The numbers of programs compiled in this process and loaded from artifacts of earlier ones, as text."""
    compiled = metrics.counter_value("Compile") or 0
    loaded = metrics.counter_value("CompileLoaded") or 0
    folder = cache_folder() or "nowhere: nothing is cached on disk"
    return f"{compiled} program{'s' if compiled != 1 else ''} compiled, {loaded} loaded from {folder}"


def stop() -> None:
    """Cancel every job, and log what there was. At exit."""
    log.info("%s", summary())
    compiler_client.close()
    background.stop(finish="disk")
