"""Sync: cut the pending program, find or make what runs it, queue it, and install the results.

Outputs are the buffers that are still alive and that the program defined. Inputs that it writes to are written in
place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch_ltc.config import settings
from torch_ltc.errors import CompileError, LtcError
from torch_ltc.events import (
    CompileEvent,
    ExecuteEvent,
    PruneEvent,
    ReadEvent,
    SyncEvent,
    SyncReason,
    emit,
    has_listeners,
)
from torch_ltc.lowering.interface import Arguments, Computation, Outcome
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program
from torch_ltc.program.references import held_elsewhere
from torch_ltc.program.source import Source, current_source
from torch_ltc.program.spec import Spec, keep_bounded, spec_of
from torch_ltc.program.tree import Node
from torch_ltc.runtime.buffer import Buffer, buffer_of, physical_device, poisoned
from torch_ltc.runtime.cache import Entry, executables, next_identity
from torch_ltc.runtime.executor import executor
from torch_ltc.runtime.memory import memory
from torch_ltc.runtime.random import device_random
from torch_ltc.runtime.recorder import recorder

Result = TypeVar("Result")

# Geometries kept, and programs kept that differ only in which results were still held.
_MOST_SPECS = 200_000
_MOST_LIVE_SETS = 16

synced_programs: list[Callable[[Entry], None]] = []


def live_outputs() -> list[Buffer]:
    """Buffers that the pending program defines and that someone still holds."""
    # A buffer is held by its storage, which lives as long as any tensor on it. Counting references is exact here: the
    # lock is held, and nothing else keeps buffers.
    return held_elsewhere(recorder.buffers)


def pending_entry(outputs: list[Buffer]) -> tuple[Entry, bool]:
    """What is kept for the pending program, and whether it was known."""
    leaf = recorder.node
    live = tuple([buffer.number - recorder.base for buffer in outputs])
    entry: Entry | None = leaf.programs.get(live)
    known = entry is not None
    if entry is None:
        instructions = tuple([n.instruction for n in recorder.tree.path(leaf) if n.instruction is not None])
        program = Program(
            identity=next_identity(),
            instructions=instructions,
            outputs=live,
            scalars=len(recorder.scalars),
            values=recorder.count - recorder.base,
            random=recorder.random,
        )
        if len(leaf.programs) >= _MOST_LIVE_SETS:
            executables.dropped(leaf.programs.pop(next(iter(leaf.programs))))
        entry = leaf.programs[live] = Entry(program)
    recorder.tree.touch(leaf)
    return entry, known


def cut(reason: SyncReason) -> None:
    """Queue the pending program, if there is one, and begin the next."""
    _make_room()
    with recorder.lock:
        if recorder.empty:
            return
        record_s = time.perf_counter() - recorder.started
        outputs = live_outputs()
        entry, known = pending_entry(outputs)
        inputs, scalars, lines = recorder.inputs, recorder.scalars, recorder.lines
        recorder.reset()
        _keep_tree_bounded()
        # As they are now: a scope that is left before the program runs still counts.
        backend, hot_after = settings.backend, settings.hot_after
        job = executor.submit(lambda: _run(entry, inputs, scalars, lines, outputs, backend, hot_after), wait=False)
        for buffer in (*outputs, *(inputs[i] for i in entry.written)):
            buffer.views = None
            buffer.job = job
    # Last: what listeners record or read belongs to the next program.
    _tell(entry, reason, known, len(outputs), record_s)


def _tell(entry: Entry, reason: SyncReason, known: bool, outputs: int, record_s: float) -> None:
    if has_listeners(SyncEvent):
        program = entry.program
        source = None if known else str(current_source(2))
        size = len(program.instructions)
        emit(SyncEvent(reason, size, len(program.inputs), outputs, program.identity, known, record_s, source))
    for listener in synced_programs:
        listener(entry)


def _make_room() -> None:
    """Wait while the queue is full, without the lock: the worker may need it to go on."""
    if executor.has_room():
        return
    lock: Any = recorder.lock
    if not lock._is_owned():
        executor.wait_for_room()
        return
    # Inside a kernel or a read. Whoever comes here looks at the recorder anew afterwards.
    held = lock._release_save()
    try:
        executor.wait_for_room()
    finally:
        lock._acquire_restore(held)


def _keep_tree_bounded() -> None:
    keep_bounded(_MOST_SPECS)
    tree = recorder.tree
    if tree.size <= settings.tree_bound:
        return
    before = tree.size

    def dropped(node: Node) -> None:
        for entry in node.programs.values():
            executables.dropped(entry)

    tree.prune(settings.tree_bound // 2, dropped)
    recorder.node = tree.root
    emit(PruneEvent(before, tree.size))


def _bound_changed() -> None:
    with recorder.lock:
        cut(SyncReason.BOUND)
        recorder.reset()


recorder.on_full = lambda: cut(SyncReason.BOUND)
settings.watch("pending_bound", _bound_changed)


# ---- on the executor's thread -------------------------------------------------------------------------------------


def _run(
    entry: Entry,
    inputs: list[Buffer],
    scalars: list[object],
    lines: dict[int, Source],
    outputs: list[Buffer],
    backend: str,
    hot_after: int,
) -> None:
    """Run one program and install its results."""
    try:
        outcome = execute_entry(entry, _arguments(entry.program, inputs, scalars, lines), backend, hot_after)
    except Exception as error:
        outcome = _all_lost(entry, error)
    for failure in outcome.failures:
        executor.report(failure)
    for buffer, result in zip(outputs, outcome.results, strict=True):
        if isinstance(result, LtcError):
            buffer.error = result
        else:
            buffer.data = result
            memory.hold(buffer)


def _all_lost(entry: Entry, error: Exception) -> Outcome:
    lost = error if isinstance(error, LtcError) else LtcError(f"program {entry.program.identity} failed: {error}")
    if lost is not error:
        lost.__cause__ = error
    return Outcome([lost] * len(entry.program.outputs), [lost])


def _arguments(program: Program, inputs: list[Buffer], scalars: list[object], lines: dict[int, Source]) -> Arguments:
    device = physical_device()
    tensors: list[torch.Tensor | LtcError] = []
    for instruction in program.inputs:
        buffer = inputs[instruction.buffer]
        tensors.append(
            poisoned(buffer.error) if buffer.error is not None else buffer.physical(instruction.spec, device)
        )
    return Arguments(tensors, scalars, device_random.generator, device, lines)


def execute_entry(entry: Entry, arguments: Arguments, backend: str, hot_after: int) -> Outcome:
    """Run a program on these arguments with whatever is due: the reference computation, or the compiled one."""
    entry.runs += 1
    computation, used = _computation(entry, arguments, backend, hot_after)
    began = time.perf_counter()
    failed = True
    try:
        if computation is entry.compiled:
            outcome = _run_compiled(entry, computation, arguments)
        else:
            outcome = computation.run(arguments)
        failed = bool(outcome.failures)
    finally:
        emit(ExecuteEvent(entry.program.identity, used, time.perf_counter() - began, failed))
    return outcome


def _computation(entry: Entry, arguments: Arguments, name: str, hot_after: int) -> tuple[Computation, str]:
    """The compiled computation once the program is hot and its inputs are sound, else the reference one."""
    reference = registry.reference
    sound = not any(isinstance(tensor, LtcError) for tensor in arguments.inputs)
    if name != reference.name and entry.runs >= hot_after and sound and entry.refused != name:
        if entry.compiled is None or entry.backend != name:
            _compile(entry, name, arguments.device)
        if entry.compiled is not None:
            executables.used(entry)
            return entry.compiled, name
    if entry.reference is None:
        entry.reference = reference.compile(entry.program, arguments.device)
    return entry.reference, reference.name


def _compile(entry: Entry, name: str, device: torch.device) -> None:
    began = time.perf_counter()
    entry.compiled = None
    try:
        entry.compiled = registry.get(name).compile(entry.program, device)
        entry.backend = name
        # Made again if the compiled program ever fails.
        entry.reference = None
        emit(CompileEvent(entry.program.identity, name, time.perf_counter() - began))
    except CompileError as error:
        entry.refused = name
        executor.note(f"{error}\n  the program runs in the {registry.reference.name} instead")


def _run_compiled(entry: Entry, computation: Computation, arguments: Arguments) -> Outcome:
    """Run a compiled program; when it fails, put its inputs back and run it call by call, so that only what depends on
    the failed call is lost."""
    storages = [
        tensor.untyped_storage() for i in entry.restored if isinstance(tensor := arguments.inputs[i], torch.Tensor)
    ]
    saved = [storage.clone() for storage in storages]
    state = arguments.generator.get_state() if entry.program.random else None
    try:
        outcome = computation.run(arguments)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
            # Any call may have run out of memory, also after writes that were not saved: nothing can be repeated.
            raise
        for storage, value in zip(storages, saved, strict=True):
            storage.copy_(value)
        if state is not None:
            arguments.generator.set_state(state)
        reference = entry.reference or registry.reference.compile(entry.program, arguments.device)
        entry.reference = reference
        return reference.run(arguments)
    if len(outcome.results) != len(entry.program.outputs):
        raise LtcError(f"the backend gave {len(outcome.results)} results for {len(entry.program.outputs)} outputs")
    return outcome


# ---- reads --------------------------------------------------------------------------------------------------------


def touched(buffer: Buffer) -> bool:
    """True when the pending program defines or uses this buffer."""
    if buffer.number >= recorder.base:
        return True
    return 0 <= buffer.input < len(recorder.inputs) and recorder.inputs[buffer.input] is buffer


def read(tensor: torch.Tensor, use: Callable[[torch.Tensor], Result], what: str) -> Result:
    """`use(physical tensor)`, after everything that was recorded on the tensor has run."""
    return read_buffer(buffer_of(tensor), spec_of(tensor), use, what)


def read_buffer(buffer: Buffer, spec: Spec, use: Callable[[torch.Tensor], Result], what: str) -> Result:
    """As `read`, for a buffer seen with geometry `spec`."""
    began = time.perf_counter()
    try:
        result = _read(buffer, spec, use)
    except LtcError as error:
        executor.forget(error)
        raise
    executor.raise_reported()
    executor.warn_noted()
    if has_listeners(ReadEvent):
        source = str(current_source())
        emit(ReadEvent(what, spec.numel * spec.dtype.itemsize, time.perf_counter() - began, source))
    return result


def _read(buffer: Buffer, spec: Spec, use: Callable[[torch.Tensor], Result]) -> Result:
    with recorder.lock:
        if touched(buffer):
            cut(SyncReason.READ)
        job = buffer.job
        if job is None or job.done():
            # Nothing that is queued writes to it, and nothing can be queued while the lock is held.
            buffer.job = None
            with torch._C._AutoDispatchBelowAutograd():
                return use(physical(buffer, spec))
        future = executor.submit(lambda: use(physical(buffer, spec)), wait=False)
    return future.result()


def physical(buffer: Buffer, spec: Spec) -> torch.Tensor:
    """The buffer's physical tensor, when what defines it has run.

    Raises the error that lost it: the first time that error itself, later a note that it was raised before.
    """
    if buffer.error is not None:
        if executor.unseen(buffer.error):
            raise buffer.error
        raise poisoned(buffer.error)
    return buffer.physical(spec, physical_device())


def sync(wait: bool = False) -> None:
    """Queue what is pending. With `wait`, return when it has run. Raises the error of an earlier program, once."""
    cut(SyncReason.EXPLICIT)
    if wait:
        executor.drain()
    executor.raise_reported()
    executor.warn_noted()


def wait_device_ops() -> None:
    """Return when everything that was synced has run."""
    executor.drain()
    executor.raise_reported()
