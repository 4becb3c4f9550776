"""Sync: cut the pending program, find or make what runs it, queue it, and install the results.

Outputs are the buffers that are still alive and that the program defined. Inputs that it writes to are written in
place.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import torch

from torch_ltc.compile.program_cache import CachedProgram, executables, next_identity
from torch_ltc.compile.tier_policy import TierPolicy
from torch_ltc.config import settings
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcError
from torch_ltc.events import (
    ExecuteEvent,
    PruneEvent,
    ReadEvent,
    SyncEvent,
    SyncReason,
    emit,
    has_listeners,
    tell,
)
from torch_ltc.execute.buffer_passes import plain_data, renew, set_jobs, set_makers
from torch_ltc.execute.capture import graphs_of
from torch_ltc.execute.device_loss import device_loss
from torch_ltc.execute.eager_region import eager_regions
from torch_ltc.execute.executor import Uses, executor
from torch_ltc.execute.in_place import InPlace, in_place, reads_after_syncs
from torch_ltc.execute.no_sync import sync_guard
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.run import (
    all_lost,
    execute_entry,
    install_results,
    not_run,
    note_outcome,
    program_queued,
    program_ran,
    settled_run,
)
from torch_ltc.hooks import Hook
from torch_ltc.lowering.backend_data import BackendData
from torch_ltc.lowering.interface import Arguments, Held
from torch_ltc.lowering.kernel_call import laid_out
from torch_ltc.lowering.registry import registry
from torch_ltc.native.recording import native
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.spec import Spec, keep_bounded, spec_of
from torch_ltc.program.tree import Node
from torch_ltc.pytorch.private import below_autograd, profiler
from torch_ltc.pytorch.profiler_ranges import span
from torch_ltc.record.buffer import Buffer, buffer_of, physical_device, poisoned, remembered
from torch_ltc.record.call_site import Source, current_source
from torch_ltc.record.recorder import pending_full, recorder
from torch_ltc.signals import signals_deferred

Result = TypeVar("Result")

# A program that takes longer is never run by the thread that reads its results: signals would wait for it.
_SHORT_S = 20e-3
# What a program that has not run yet may take, for each call and each element of a result.
_CALL_S = 20e-6
_ELEMENT_S = 5e-9
# Bounds on interned specs, and on programs that differ only in their live outputs.
_MOST_SPECS = 200_000
_MOST_LIVE_SETS = 16

# Only with somebody to call: the lists are live.
program_cut = Hook[[CachedProgram, list[Buffer], list[object], list[Buffer]], None](
    "program cut", "before a program is queued, with the recorder's lock held: inputs, run-time numbers, outputs"
)
program_synced = Hook[[CachedProgram], None]("program synced", "after a program was queued, on the user's thread")


def pending_entry(live: tuple[int, ...]) -> tuple[CachedProgram, bool]:
    """The cache entry of the pending program with these live outputs, and whether it was known."""
    leaf = recorder.node
    entry: CachedProgram | None = leaf.programs.get(live)
    if entry is not None and entry.program.device != physical_device():
        executables.remove(leaf.programs.pop(live))
        entry = None
    known = entry is not None
    if entry is None:
        instructions = tuple([n.instruction for n in recorder.tree.path(leaf) if n.instruction is not None])
        program = Program(
            identity=next_identity(),
            instructions=instructions,
            outputs=live,
            scalars=recorder.scalar_count,
            values=recorder.count - recorder.base,
            random=recorder.random,
            device=physical_device(),
        )
        if len(leaf.programs) >= _MOST_LIVE_SETS:
            executables.remove(leaf.programs.pop(next(iter(leaf.programs))))
        entry = CachedProgram(program, recorder.torch_state)
        recorder.tree.keep_program(leaf, live, entry)
    recorder.tree.touch(leaf)
    return entry, known


def cut(reason: SyncReason, then: Callable[[], None] | None = None, *, here: bool = False) -> None:
    """Queue the pending program, if there is one, and begin the next. `then` is called before anything is recorded into
    it: listeners and other threads may record at once. With `here` the calling thread takes a short one on, as
    `Executor.submit` says."""
    if sync_guard.threads and not recorder.empty:
        sync_guard.check(reason)
    began = time.perf_counter()
    executor.wait_for_room()
    # Handlers of signals wait: a program is either still pending, or queued with all that will get its results.
    with span("sync", 0, reason.name.lower()), recorder.lock, signals_deferred():
        if recorder.empty:
            if then is not None:
                then()
            return
        record_s = began - recorder.started
        outputs, live = recorder.live_outputs()
        entry, known = pending_entry(live)
        inputs, scalars, lines = recorder.inputs, recorder.scalars, recorder.lines
        if program_cut:
            program_cut(entry, inputs, scalars, outputs)
            program_queued(entry, outputs)
        recorder.reset()
        told = None
        try:
            _keep_tree_bounded()
            awaited = reads_after_syncs.expected(entry) or reason is SyncReason.READ
            if awaited:
                # Who reads waits for it in any case.
                told = _run_in_place(entry, inputs, scalars, lines, outputs)
            if told is None:
                _queue(entry, inputs, scalars, lines, outputs, here, timed=awaited)
            if reason is not SyncReason.READ:
                reads_after_syncs.note_queued(entry)
        except BaseException as error:
            # An interrupt, or no more threads: nothing of it has run, and who reads a result has to be told.
            _lose_outputs(entry, outputs, error)
            raise
        took_s = told[2] if told is not None else entry.ran_s
        eager_regions.note_program(entry, known, reason is SyncReason.READ, took_s)
        if recorder.awaited:
            _fetch_awaited()
        if then is not None:
            then()
    # Last: what listeners record or read belongs to the next program.
    if told is not None:
        tell(ExecuteEvent, *told)
    tell_sync(entry, reason, known, len(outputs), record_s, began)


def _settle() -> None:
    """Before the first call of an eager region: everything runs that is pending or queued."""
    cut(SyncReason.EAGER)
    executor.drain()


if native is not None:
    native.set_settle(_settle)


def _lose_outputs(entry: CachedProgram, outputs: list[Buffer], error: BaseException) -> None:
    """The program will not run: its outputs say so, if it was not queued."""
    lost = remembered(not_run(entry, error))
    for buffer in outputs:
        if buffer.job is None and buffer.data is None:
            buffer.error = lost


def _queue(
    entry: CachedProgram,
    inputs: list[Buffer],
    scalars: list[object],
    lines: dict[int, Source],
    outputs: list[Buffer],
    here: bool,
    timed: bool,
) -> None:
    """Have the worker run a program, or the calling thread, and note the time that it takes if `timed`. The lock is
    held."""
    entry.latest = scalars
    # As it is now: a scope that is left before the program runs still counts.
    policy = TierPolicy.current()
    written = [inputs[i] for i in entry.written]
    previous = _previous_outputs(entry, outputs, policy)
    run = lambda: _run(entry, inputs, scalars, lines, outputs, previous, policy)  # noqa: E731
    work = (lambda: _run_timed(entry, scalars, policy, run)) if timed else run
    here = here and _is_short(entry, policy)
    job = executor.submit(work, Uses(inputs, [*outputs, *written]), wait=False, here=here)
    try:
        _set_job(job, entry, previous, written, outputs)
    except BaseException:
        # An interrupt: whoever reads has to wait for the program, which runs.
        _set_job(job, entry, previous, written, outputs)
        raise


def _set_job(
    job: Future[None],
    entry: CachedProgram,
    previous: list[weakref.ref[Buffer]],
    written: list[Buffer],
    outputs: list[Buffer],
) -> None:
    """Let whoever reads what a queued program gives a value to wait for it."""
    for reference in previous:
        # Moved before the program runs, if it is still alive then; whoever reads it waits for that.
        buffer = reference()
        if buffer is not None:
            buffer.job = job
    set_jobs(written, job)
    set_jobs(outputs, job)
    set_makers(entry, outputs)


def _is_short(entry: CachedProgram, policy: TierPolicy) -> bool:
    """True when a program will take little time, as far as one can know."""
    if policy.waits and entry.compiled is None and policy.backend is not registry.reference:
        # It may be compiled first.
        return False
    if entry.took_s is None:
        program = entry.program
        elements = sum([spec.numel for spec in program.specs().values()])
        entry.took_s = len(program.instructions) * _CALL_S + elements * _ELEMENT_S
    return entry.took_s < _SHORT_S


def _run_in_place(
    entry: CachedProgram,
    inputs: list[Buffer],
    scalars: list[object],
    lines: dict[int, Source],
    outputs: list[Buffer],
) -> tuple[Any, ...] | None:
    """Run a short program at once: the fields of the `ExecuteEvent`; None when it has to be queued. The lock is
    held."""
    known: InPlace | None = entry.in_place
    return None if known is None else known.run(inputs, scalars, outputs, lines)


def _run_timed(entry: CachedProgram, scalars: list[object], policy: TierPolicy, run: Callable[[], None]) -> None:
    """Run a program on the worker, and note the time that it takes."""
    settled = None
    # Whatever comes: the program runs. Handlers of signals wait.
    with suppress(BaseException):
        settled = settled_run(entry, scalars, policy)
    began = time.thread_time()
    run()
    if settled is not None:
        in_place(entry).note(time.thread_time() - began, settled[1])


def _previous_outputs(entry: CachedProgram, outputs: list[Buffer], policy: TierPolicy) -> list[weakref.ref[Buffer]]:
    """Outputs of the program's last execution, which a captured program would write over. Those that are outputs again
    are meant to be."""
    if policy.captures == "off" or graphs_of(entry.program.device) is None:
        return []
    return renew(entry.last_outputs, outputs)


def tell_sync(
    entry: CachedProgram, reason: SyncReason, known: bool, outputs: int, record_s: float, began: float
) -> None:
    """A program was queued, or has run at once, with these outputs; the sync began at `began`."""
    if has_listeners(SyncEvent):
        program = entry.program
        source = current_source(2)
        size, inputs = len(program.instructions), len(program.inputs)
        took_s = time.perf_counter() - began
        tell(SyncEvent, reason, size, inputs, outputs, program.identity, known, record_s, source, took_s)
    for told in program_synced:
        told(entry)


def _fetch_awaited() -> None:
    """Queue the reads that were asked for without a sync: right behind the program that was just queued."""
    awaited, recorder.awaited = recorder.awaited, []
    for item in awaited:
        item.queue()


def _keep_tree_bounded() -> None:
    keep_bounded(_MOST_SPECS)
    tree = recorder.tree
    if tree.size <= settings.tree_bound:
        return
    before = tree.size

    def dropped(node: Node) -> None:
        for entry in node.programs.values():
            executables.remove(entry)

    tree.prune(settings.tree_bound // 2, dropped)
    recorder.node = tree.root
    emit(PruneEvent(before, tree.size))


pending_full.add(lambda: cut(SyncReason.BOUND))
settings.watch("pending_bound", lambda: cut(SyncReason.BOUND, then=recorder.reset))


# ---- on the executor's thread -------------------------------------------------------------------------------------


def _run(
    entry: CachedProgram,
    inputs: list[Buffer],
    scalars: list[object],
    lines: dict[int, Source],
    outputs: list[Buffer],
    previous: list[weakref.ref[Buffer]],
    policy: TierPolicy,
) -> None:
    """Run one program and install its results."""
    told: list[ExecuteEvent] = []
    try:
        outcome = execute_entry(entry, _arguments(entry, inputs, scalars, lines), policy, told.append, previous)
    except BaseException as error:  # a backend's SystemExit, too: nobody else would hear of it on this thread
        outcome = all_lost(entry, error)
    if outcome.failures:
        lost = device_loss.told(outcome.failures[0], entry.program)
        outcome = outcome if lost is None else all_lost(entry, lost)
    if told:
        entry.took_s = entry.ran_s = told[-1].duration_s
    note_outcome(entry, outcome, inputs)
    install_results(entry, outputs, outcome.results)
    program_ran(entry, inputs, outputs)
    # Last: listeners may record and read, also what comes of these results.
    executor.complete()
    for event in told:
        emit(event)


def _arguments(
    entry: CachedProgram, inputs: list[Buffer], scalars: list[object], lines: dict[int, Source]
) -> Arguments:
    device = physical_device()
    tensors = plain_data(entry, inputs)
    held: list[Held] = _held(entry.program, inputs, device) if tensors is None else tensors
    return Arguments(held, scalars, device_random.generator, device, lines, replaceable=True, plain=tensors is not None)


def _held(program: Program, inputs: list[Buffer], device: torch.device) -> list[Held]:
    """What stands for each input: a view, a handle, an error, or memory that nobody has written to."""
    held: list[Held] = []
    _open_handles(program, inputs)
    for instruction in program.inputs:
        buffer = inputs[instruction.buffer]
        held.append(poisoned(buffer.error[0]) if buffer.error is not None else buffer.held(instruction.spec, device))
    return held


def _open_handles(program: Program, inputs: list[Buffer]) -> None:
    """Handles stay handles only where the program sees a buffer once and as a whole: views need common memory."""
    seen: set[int] = set()
    for instruction in program.inputs:
        buffer = inputs[instruction.buffer]
        if isinstance(buffer.data, BackendData) and (instruction.spec is not buffer.spec or instruction.buffer in seen):
            buffer.data = laid_out(buffer.data.tensor(), buffer.spec)
        seen.add(instruction.buffer)


# ---- reads --------------------------------------------------------------------------------------------------------


def touched(buffer: Buffer) -> bool:
    """True when the pending program defines or uses this buffer."""
    return buffer.number >= recorder.base or recorder.is_input(buffer)


def _is_stale(buffer: Buffer) -> bool:
    """True when the pending program gives this buffer its value, or another one. One that it only takes can be read."""
    if not touched(buffer):
        return False
    return buffer.number >= recorder.base or recorder.path_values.writes_to(recorder.node, buffer.input)


def read(tensor: torch.Tensor, use: Callable[[torch.Tensor], Result], what: str) -> Result:
    """`use(physical tensor)`, after everything that was recorded on the tensor has run."""
    return read_buffer(buffer_of(tensor), spec_of(tensor), use, what)


def _told_of_number(size_bytes: int, began: float) -> bool:
    """The extension has the value of a tensor with one element, for which nothing is to be waited: told as a read like
    any other. False where it has to be one."""
    if sync_guard.threads or profiler._is_profiler_enabled:
        return False
    reads_after_syncs.note_read()
    executor.show_warnings()
    executor.raise_deferred()
    if has_listeners(ReadEvent):
        source = current_source()
        tell(ReadEvent, "item", size_bytes, time.perf_counter() - began, source, 0.0)
    return True


if native is not None:
    native.set_on_read(_told_of_number)


def read_buffer(buffer: Buffer, spec: Spec, use: Callable[[torch.Tensor], Result], what: str) -> Result:
    """As `read`, for a buffer seen as `spec`."""
    if sync_guard.threads:
        sync_guard.check(SyncReason.READ)
    began = time.perf_counter()
    reads_after_syncs.note_read()
    try:
        with span("read", 0, what):
            result, wait_s = _read(buffer, spec, use)
    except LtcError as error:
        deferred.discard_error(error)
        raise
    except RuntimeError as error:
        lost = device_loss.told(error)
        if lost is None:
            raise
        raise lost from error
    finally:
        executor.hand_over()
    executor.show_warnings()
    executor.raise_deferred()
    if has_listeners(ReadEvent):
        source = current_source()
        took_s = time.perf_counter() - began
        tell(ReadEvent, what, spec.numel * spec.dtype.itemsize, took_s, source, wait_s)
    return result


def _read(buffer: Buffer, spec: Spec, use: Callable[[torch.Tensor], Result]) -> tuple[Result, float]:
    """The result of `use`, and how long the thread waited for the program."""
    with recorder.lock:
        if _is_stale(buffer):
            cut(SyncReason.READ, here=True)
        elif recorder.forget_views():
            eager_regions.note_views()
        job = buffer.job
        if job is None or job.done():
            return _use(buffer, spec, use), 0.0
    began = time.perf_counter()
    with span("wait"):
        executor.wait_for(job)
    wait_s = time.perf_counter() - began
    with recorder.lock:
        if buffer.job is job:
            return _use(buffer, spec, use), wait_s
        # Another thread has recorded on it meanwhile, and may go on doing so.
        future = executor.submit(lambda: use(physical(buffer, spec)), Uses((buffer,), ()), wait=False)
    return executor.result_of(future), wait_s


def _use(buffer: Buffer, spec: Spec, use: Callable[[torch.Tensor], Result]) -> Result:
    """Nothing that is queued writes to the buffer, and nothing can be queued while the lock is held."""
    buffer.job = None
    with below_autograd():
        return use(physical(buffer, spec))


def producer_of(tensor: torch.Tensor) -> tuple[int, Call | None]:
    """The identity of the program that made the tensor's memory, and the call in it; 0 when no program did."""
    maker = buffer_of(tensor).maker
    return (0, None) if maker is None else (maker[0].identity, maker[0].maker_of(maker[1]))


def physical(buffer: Buffer, spec: Spec) -> torch.Tensor:
    """The buffer's physical tensor, when what defines it has run.

    Raises the error that lost it: the first time that error itself, later a note that it was raised before.
    """
    if buffer.error is not None:
        lost, first = buffer.error
        unseen = first()
        if unseen is not None and deferred.is_deferred(unseen):
            raise unseen
        raise poisoned(lost)
    return buffer.physical(spec, physical_device())


def sync(wait: bool = False) -> None:
    """Queue what is pending. With `wait`, return when it has run. Shows warnings of earlier programs, and raises the
    error of one, once."""
    cut(SyncReason.EXPLICIT)
    if wait:
        with span("wait"):
            executor.drain()
    executor.show_warnings()
    executor.raise_deferred()


def wait_device_ops() -> None:
    """Return when everything that was synced has run."""
    executor.drain()
    executor.raise_deferred()
