"""Runs a known program on given data with whatever is due.

What a backend does wrong ends here. A program that it cannot run although the interpreter can, runs in the interpreter
from then on, with one warning; or it is an error, if the setting `backend_failure` says so.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch_ltc.compile.hooks import Failure, Run, backend_failed, running, with_hooks
from torch_ltc.compile.program_cache import CachedProgram, executables
from torch_ltc.compile.specialization_cache import specializations
from torch_ltc.compile.tier_policy import TierPolicy, select_executable
from torch_ltc.deferred import deferred
from torch_ltc.errors import BackendError, ExecutionError, LtcError
from torch_ltc.events import ExecuteEvent, RefusalEvent, emit
from torch_ltc.execute.capture import Capture, graphs_of
from torch_ltc.execute.choice import Choice, choice_of, wait_for_device
from torch_ltc.execute.device_loss import device_loss
from torch_ltc.execute.memory import Maker, add_holdings, add_largest, memory
from torch_ltc.hooks import Hook
from torch_ltc.lowering.backend_data import BackendData, alias_physical, put_back
from torch_ltc.lowering.functional_computation import Memory
from torch_ltc.lowering.interface import Arguments, Computation, FunctionComputation, Outcome
from torch_ltc.lowering.lower import Executable
from torch_ltc.lowering.out_of_memory import is_out_of_memory, make_room
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.result_checks import check_count, check_result, fitted
from torch_ltc.pytorch.profiler_ranges import span
from torch_ltc.record.buffer import Buffer, remembered

# What fails at no particular call.
_ANYWHERE = (BackendError, FunctionComputation)

before_collectives = Hook[[CachedProgram], None](
    "before collectives", "before a program that talks to other ranks runs, on the worker"
)
program_queued = Hook[[CachedProgram, list[Buffer]], None](
    "program queued", "when it is certain that a program will run, with its outputs"
)
program_ran = Hook[[CachedProgram, list[Buffer], list[Buffer]], None](
    "program ran", "when a program has run and its results are installed, on the thread that ran it: inputs, outputs"
)


def execute_entry(
    entry: CachedProgram,
    arguments: Arguments,
    policy: TierPolicy,
    tell: Callable[[ExecuteEvent], None] = emit,
    previous: Sequence[weakref.ref[Buffer]] | None = None,
) -> Outcome:
    """Run a program on these arguments with whatever is due: the reference computation, the compiled one, or graphs of
    either. `tell` gets the event that says so. `previous` are the outputs of its last execution, None
    where it must not be captured."""
    device_loss.begin(entry.program)
    entry.runs += 1
    if entry.collective:
        before_collectives(entry)
    # Checks run a program a second time, which other ranks would not.
    if entry.collective or (policy.check == "off" and not policy.repro_dir):
        if policy.measures:
            return _execute_chosen(entry, arguments, policy, tell, previous)
        return _execute(entry, select_executable(entry, arguments, policy), arguments, policy, tell, previous)
    run = Run(entry, arguments, policy.backend, policy.check, policy.repro_dir)
    with running(run):
        run.executable = executable = select_executable(entry, arguments, policy)
        return with_hooks(run, lambda: _execute(entry, executable, arguments, policy, tell))


def settled_run(
    entry: CachedProgram, numbers: Sequence[object], policy: TierPolicy
) -> tuple[TierPolicy, Executable | None] | None:
    """How the next run of the program with these numbers will be, the policy and the executable, where that is certain:
    it is on the CPU, and nothing is compiled, measured or checked. Else None."""
    device = entry.program.device
    if device.type != "cpu" or policy.check != "off" or policy.repro_dir:
        return None
    if policy.captures != "off" and graphs_of(device) is not None:
        return None
    if policy.measures:
        choice: Choice | None = entry.choice
        if choice is None or not choice.settled or choice.key != (policy.measures, policy.captures):
            return None
        assert choice.kept is not None
        policy = policy.on(choice.kept.backend, choice.kept.captured)
    backend = policy.backend
    if backend is registry.reference or (entry.single and not policy.waits):
        return policy, None
    executable = entry.compiled if entry.backend is backend else None
    if executable is None or not executable.proven or executable.dropped:
        return None
    try:
        fits = not numbers or (executable.fits(numbers) and executable.computation.accepts(numbers))
    except Exception:
        # Told where the program is run, which asks again.
        return None
    return (policy, executable) if fits else None


def execute_settled(
    entry: CachedProgram, arguments: Arguments, policy: TierPolicy, executable: Executable | None
) -> Outcome:
    """Run a program on inputs that are all there, as `settled_run` said. Nobody is told."""
    device_loss.begin(entry.program)
    entry.runs += 1
    if executable is not None:
        executables.touch(entry)
    used = registry.reference if executable is None else policy.backend
    with span("run", entry.program.identity, used.name):
        if executable is None:
            return _run_reference(entry, arguments)
        return _run_compiled(entry, executable, arguments, policy)


def _execute_chosen(
    entry: CachedProgram,
    arguments: Arguments,
    policy: TierPolicy,
    tell: Callable[[ExecuteEvent], None],
    previous: Sequence[weakref.ref[Buffer]] | None,
) -> Outcome:
    """Run a program in the form that was chosen for it by measurement, or that is being measured."""
    form, measured = choice_of(entry, policy).next(entry, arguments, policy)
    chosen = policy.on(form.backend, form.captured)
    executable = select_executable(entry, arguments, chosen)
    if not measured:
        return _execute(entry, executable, arguments, chosen, tell, previous)

    def note(event: ExecuteEvent) -> None:
        form.note(event)
        tell(event)

    return _execute(entry, executable, arguments, chosen, note, previous, measured=True)


def _execute(
    entry: CachedProgram,
    executable: Executable | None,
    arguments: Arguments,
    policy: TierPolicy,
    tell: Callable[[ExecuteEvent], None],
    previous: Sequence[weakref.ref[Buffer]] | None = None,
    *,
    measured: bool = False,
) -> Outcome:
    if measured:
        wait_for_device(arguments.device)
    used = registry.reference if executable is None else policy.backend
    began = launched = time.perf_counter()
    failed, captured = True, False
    try:
        with span("run", entry.program.identity, used.name):
            outcome = None
            if policy.captures != "off" and previous is not None:
                outcome = _run_captured(entry, executable, arguments, policy, previous)
            captured = outcome is not None
            if not captured and entry.capture is not None:
                entry.capture.release()
            if outcome is not None:
                pass
            elif executable is None:
                outcome = _run_reference(entry, arguments)
            else:
                outcome = _run_compiled(entry, executable, arguments, policy)
        failed = bool(outcome.failures)
        launched = time.perf_counter()
        if measured:
            wait_for_device(arguments.device)
    finally:
        took_s = time.perf_counter() - began
        tell(ExecuteEvent(entry.program.identity, used.name, took_s, failed, captured, launched - began))
    return outcome


def _run_captured(
    entry: CachedProgram,
    executable: Executable | None,
    arguments: Arguments,
    policy: TierPolicy,
    previous: Sequence[weakref.ref[Buffer]],
) -> Outcome | None:
    """Run the graphs of a program, if it has any or is to have some."""
    # Whoever forgets the program takes it away, on another thread.
    capture: Capture | None = entry.capture
    if capture is None:
        graphs = graphs_of(entry.program.device)
        if graphs is None:
            return None
        capture = entry.capture = Capture(entry, graphs)
    if executable is not None and not executable.proven:
        return None
    computation = None if executable is None else executable.computation
    return capture.run(computation, arguments, previous, policy.captures == "always")


def _reference(entry: CachedProgram) -> Computation:
    if entry.reference is None:
        made = registry.reference.compile(entry.program)
        assert isinstance(made, Computation)
        entry.reference = made
    return entry.reference


def _run_reference(entry: CachedProgram, arguments: Arguments) -> Outcome:
    made = arguments.make_writable(entry.written_positions)
    outcome = _reference(entry).run(arguments)
    outcome.replaced = {**made, **outcome.replaced}
    return outcome


def _run_compiled(entry: CachedProgram, executable: Executable, arguments: Arguments, policy: TierPolicy) -> Outcome:
    """Run a compiled program; when it fails, put its inputs back and run it call by call, so that only what depends on
    the failed call is lost."""
    computation = executable.computation
    made = {} if computation.takes_handles else arguments.make_writable(entry.written_positions)
    saved = _Saved(entry, executable, arguments) if has_to_save(entry, executable) else None
    try:
        outcome = _run_checked(entry, computation, arguments, policy)
    except Exception as error:
        outcome = recovered(entry, executable, arguments, policy, error, saved)
    else:
        executable.proven = True
    if made:
        outcome.replaced = {**made, **outcome.replaced}
    return outcome


def _run_checked(entry: CachedProgram, computation: Computation, arguments: Arguments, policy: TierPolicy) -> Outcome:
    outcome = computation.run(arguments)
    if not (computation.checks_results or computation.settled):
        unchanged = _check(entry, computation, outcome, arguments, policy.backend.name)
        computation.settled = unchanged and computation.repeats_layouts
    return outcome


def recovered(
    entry: CachedProgram,
    executable: Executable,
    arguments: Arguments,
    policy: TierPolicy,
    error: Exception,
    saved: _Saved | None = None,
) -> Outcome:
    """The outcome of a compiled program whose run has raised this error: that of the interpreter, or an error. `saved`
    is what was saved before the run, if something had to be."""
    computation = executable.computation
    # Where nothing had to be saved, it is the same afterwards.
    saved = saved or _Saved(entry, executable, arguments)
    spoiled = executable.proven and not (saved.everything or computation.keeps_inputs)
    if is_out_of_memory(error):
        # Any call may have run out of memory, also after writes that were not saved.
        if spoiled or entry.collective or not make_room(error):
            raise error
        saved.restore()
        return _run_checked(entry, computation, arguments, policy)
    if entry.collective:
        # Other ranks have taken part in what has run, and will not do so again.
        raise _failure(entry, policy, error) from error
    # A plain function may fail anywhere; a computation of its own kind, where a call may fail.
    if spoiled and isinstance(error if isinstance(error, BackendError) else computation, _ANYWHERE):
        # Wrong results after right ones, or an error of the backend's own.
        raise _not_taken_back(entry, policy, error) from error
    left = _Saved(entry, executable, arguments, everything=True) if spoiled else None
    saved.restore()
    outcome = _run_reference(entry, arguments)
    if left is not None and not outcome.failures:
        # No call fails: it was none of those before which inputs are saved, and the run may have written to any.
        left.restore()
        raise _not_taken_back(entry, policy, error) from error
    if not outcome.failures:
        _blame(entry, policy, error, saved)
    return outcome


def _not_taken_back(entry: CachedProgram, policy: TierPolicy, error: Exception) -> ExecutionError:
    """The error of a program that has written to its inputs, which cannot be taken back."""
    failure = _failure(entry, policy, error)
    backend_failed(Failure(entry, policy.backend, "run", failure))
    return failure


def all_lost(entry: CachedProgram, error: BaseException) -> Outcome:
    """The outcome of a program that ended with this error: nothing of it is there."""
    lost = device_loss.told(error, entry.program)
    if lost is None:
        lost = error if isinstance(error, LtcError) else not_run(entry, error)
    add_largest(lost, entry.program)
    return Outcome([lost] * len(entry.program.outputs), [lost])


def note_outcome(entry: CachedProgram, outcome: Outcome, inputs: Sequence[Buffer]) -> None:
    """After a run: the inputs that were replaced, and the errors that nobody has seen."""
    for position, data in outcome.replaced.items():
        instruction = entry.program.inputs[position]
        buffer = inputs[instruction.buffer]
        if instruction.spec is not buffer.spec:
            # The program saw all of the memory through a view.
            data = alias_physical(data.tensor() if isinstance(data, BackendData) else data, buffer.spec)
        buffer.data = data
    for failure in outcome.failures:
        deferred.add_error(add_holdings(failure))
    memory.run += 1


def install_results(entry: CachedProgram, outputs: list[Buffer], results: list[Any]) -> None:
    """Give the outputs of a program what it has made for them: data, or the error that lost it."""
    made: list[tuple[Buffer, Maker]] = []
    for place in memory.install(outputs, results, entry.makers):
        buffer, result = outputs[place], results[place]
        if isinstance(result, LtcError):
            buffer.error = remembered(result)
        else:
            buffer.data = result
            buffer.error = None
            made.append((buffer, entry.makers[place]))
    if made:
        memory.hold_all(made)
    memory.end_run()


def not_run(entry: CachedProgram, error: BaseException) -> LtcError:
    """The error of a whole program; which of its calls was running, if any, is not known."""
    program = entry.program
    first = next(iter(program.calls), None)
    begins = "" if first is None else f"\n  it begins with {first.name}"
    lost = LtcError(
        f"program {program.identity} failed: {type(error).__name__}: {error}{begins}",
        source=None if first is None else str(first.source),
    )
    lost.__cause__ = error
    return lost


def _failure(entry: CachedProgram, policy: TierPolicy, error: Exception) -> ExecutionError:
    call = entry.program.calls[0]
    what = str(error) if isinstance(error, LtcError) else f"{type(error).__name__}: {str(error).strip()}"
    failure = ExecutionError(
        f"{policy.backend.name} failed to run program {entry.program.identity}, which begins with {call.name}: {what}",
        op=call.name,
        source=None if isinstance(error, LtcError) and error.source else str(call.source),
    )
    failure.__cause__ = error
    return failure


def _blame(entry: CachedProgram, policy: TierPolicy, error: Exception, saved: _Saved) -> None:
    """The interpreter could run what the backend could not."""
    failure = _failure(entry, policy, error)
    specializations.fail_run(entry, policy.backend)
    entry.compiled = None
    entry.status(policy.backend).refuse(failure)
    backend_failed(Failure(entry, policy.backend, "run", failure))
    emit(RefusalEvent(entry.program.identity, policy.backend.name, "run", str(failure)))
    if policy.strict:
        saved.restore()
        raise failure
    deferred.add_warning(f"{failure}\n  the program runs in the {registry.reference.name} instead")


def _check(
    entry: CachedProgram, computation: Computation, outcome: Outcome, arguments: Arguments, backend: str
) -> bool:
    """Raise unless the results are what was recorded; lay them out as recorded, those of a plain function each in
    memory of its own. True when they were so."""
    program = entry.program
    outcome.results = results = check_count(backend, program, outcome.results, len(program.outputs))
    taken: Memory | None = None
    if isinstance(computation, FunctionComputation):
        taken = Memory([held for held in arguments.held if not isinstance(held, LtcError)])
    unchanged = True
    for position, (number, spec) in enumerate(entry.outputs):
        result = results[position]
        check_result(backend, program, number, result, spec)
        if not isinstance(result, LtcError):
            laid_out = fitted(result, spec)
            results[position] = owned = laid_out if taken is None else taken.own(laid_out, spec)
            unchanged &= owned is result
    return unchanged


def has_to_save(entry: CachedProgram, executable: Executable) -> bool:
    """True when something is saved before a run."""
    chosen = executable.computation.restored
    return not executable.proven or entry.program.random or bool(entry.restored if chosen is None else chosen)


class _Saved:
    """The data that a run may spoil: before the first run of a compiled program all that it writes to, later what it
    writes to before a call that may fail."""

    __slots__ = ("_positions", "_written", "_storages", "_values", "_generator", "_state")

    def __init__(
        self, entry: CachedProgram, executable: Executable, arguments: Arguments, everything: bool = False
    ) -> None:
        chosen = executable.computation.restored
        positions = entry.restored if chosen is None else chosen
        self._written = entry.written_positions
        if everything or not (executable.proven or executable.computation.keeps_inputs):
            positions = self._written
        self._positions = positions
        self._storages: list[Any] = []
        if positions:
            tensors: list[Any] = [arguments.tensor(position) for position in positions]
            self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._values = [storage.clone() for storage in self._storages]
        self._generator = arguments.generator if entry.program.random else None
        self._state = self._generator.get_state() if self._generator is not None else None

    @property
    def everything(self) -> bool:
        """True when all that the program writes to is saved."""
        return set(self._positions) >= set(self._written)

    def restore(self) -> None:
        """Put it back."""
        for storage, value in zip(self._storages, self._values, strict=True):
            put_back(storage, value)
        if self._generator is not None and self._state is not None:
            self._generator.set_state(self._state)
