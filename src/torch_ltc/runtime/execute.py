"""Runs a known program on given data: in the reference interpreter, or compiled, once it is hot.

What a backend does wrong ends here. A program that it cannot compile, or cannot run although the interpreter can, runs
in the interpreter from then on, with one warning; or it is an error, if the setting `backend_failure` says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.errors import BackendError, CompileError, ExecutionError, LtcError
from torch_ltc.events import CompileEvent, ExecuteEvent, RefusalEvent, emit
from torch_ltc.lowering.functional import Memory
from torch_ltc.lowering.interface import Arguments, Backend, Computation, FunctionComputation, Outcome, refusal
from torch_ltc.lowering.lower import Lowered, lower, same_number
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.results import check_count, check_result, fitted
from torch_ltc.runtime.cache import Entry, executables
from torch_ltc.runtime.executor import executor

# Times that a program is compiled anew because of a number that its backend takes for a constant.
_MOST_SPECIALISATIONS = 4
# What fails at no particular call.
_ANYWHERE = (BackendError, FunctionComputation)


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that count for a program: those at the moment it was cut."""

    backend: Backend
    hot_after: int
    strict: bool

    @classmethod
    def current(cls) -> Policy:
        """What the settings say now."""
        return cls(registry.get(settings.backend), settings.hot_after, settings.backend_failure == "error")


def execute_entry(entry: Entry, arguments: Arguments, policy: Policy) -> Outcome:
    """Run a program on these arguments with whatever is due: the reference computation, or the compiled one."""
    entry.runs += 1
    lowered = _due(entry, arguments, policy)
    used = registry.reference if lowered is None else policy.backend
    began = time.perf_counter()
    failed = True
    try:
        if lowered is None:
            outcome = _run_reference(entry, arguments)
        else:
            outcome = _run_compiled(entry, lowered, arguments, policy)
        failed = bool(outcome.failures)
    finally:
        emit(ExecuteEvent(entry.program.identity, used.name, time.perf_counter() - began, failed))
    return outcome


def _reference(entry: Entry) -> Computation:
    if entry.reference is None:
        made = registry.reference.compile(entry.program)
        assert isinstance(made, Computation)
        entry.reference = made
    return entry.reference


def _run_reference(entry: Entry, arguments: Arguments) -> Outcome:
    made = arguments.make_writable(entry.written_positions)
    outcome = _reference(entry).run(arguments)
    outcome.replaced = {**made, **outcome.replaced}
    return outcome


def _due(entry: Entry, arguments: Arguments, policy: Policy) -> Lowered | None:
    """The compiled program once it is hot and its inputs are sound, None for the reference."""
    if policy.backend is registry.reference:
        return None
    refused = entry.refused.get(policy.backend)
    if refused is not None:
        if policy.strict:
            raise refused
        return None
    numbers = list(arguments.scalars)
    _note_numbers(entry, numbers)
    sound = not any(isinstance(held, LtcError) for held in arguments.held)
    if entry.runs < policy.hot_after or not sound:
        return None
    entry.choose(policy.backend)
    if entry.compiled is None:
        entry.specialised = 0
        _compile(entry, numbers, policy)
    elif not entry.compiled.fits(numbers):
        _specialise(entry, numbers, policy)
    if entry.compiled is not None:
        executables.used(entry)
    return entry.compiled


def _note_numbers(entry: Entry, numbers: list[object]) -> None:
    """Remember which run-time numbers change from run to run."""
    if entry.compiled is None:
        if entry.numbers is not None:
            pairs = enumerate(zip(entry.numbers, numbers, strict=True))
            entry.varying.update(slot for slot, (old, new) in pairs if not same_number(old, new))
        entry.numbers = numbers


def _specialise(entry: Entry, numbers: list[object], policy: Policy) -> None:
    """Compile again: a number that was taken for a constant has changed."""
    assert entry.compiled is not None
    entry.varying |= entry.compiled.misfits(numbers)
    entry.specialised += 1
    if entry.specialised < _MOST_SPECIALISATIONS:
        _compile(entry, numbers, policy)
        return
    entry.compiled = None
    error = CompileError(
        f"{policy.backend.name} would have to compile program {entry.program.identity} again for each value of its "
        "numbers",
        source=str(entry.program.calls[0].source),
    )
    _refuse(entry, policy, error, "compile")


def _compile(entry: Entry, numbers: list[object], policy: Policy) -> None:
    began = time.perf_counter()
    entry.compiled = None
    name = policy.backend.name
    try:
        entry.compiled = lower(policy.backend, entry.program, numbers, entry.varying, policy.strict)
    except Exception as error:
        _refuse(entry, policy, refusal(name, entry.program, error), "compile")
        return
    # Made again if the compiled program ever fails.
    entry.reference = None
    emit(CompileEvent(entry.program.identity, name, time.perf_counter() - began))
    if entry.compiled.note:
        executor.note(entry.compiled.note)


def _refuse(entry: Entry, policy: Policy, error: BackendError, stage: str) -> None:
    """The backend has had its chance with this program."""
    entry.refused[policy.backend] = error
    entry.compiled = None
    emit(RefusalEvent(entry.program.identity, policy.backend.name, stage, str(error)))
    if policy.strict:
        raise error
    executor.note(f"{error}\n  the program runs in the {registry.reference.name} instead")


def _run_compiled(entry: Entry, lowered: Lowered, arguments: Arguments, policy: Policy) -> Outcome:
    """Run a compiled program; when it fails, put its inputs back and run it call by call, so that only what depends on
    the failed call is lost."""
    computation = lowered.computation
    made = {} if computation.takes_handles else arguments.make_writable(entry.written_positions)
    saved = _Saved(entry, lowered, arguments)
    try:
        outcome = computation.run(arguments)
        _check(entry, computation, outcome, arguments, policy.backend.name)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
            # Any call may have run out of memory, also after writes that were not saved: nothing can be repeated.
            raise
        spoiled = lowered.proven and not (saved.everything or computation.keeps_inputs)
        # A plain function may fail anywhere; a computation of its own kind, where a call may fail.
        if spoiled and isinstance(error if isinstance(error, BackendError) else computation, _ANYWHERE):
            # Wrong results after right ones, or an error of the backend's own: what the run wrote to its inputs cannot
            # be taken back.
            raise _failure(entry, policy, error) from error
        saved.restore()
        outcome = _run_reference(entry, arguments)
        if not outcome.failures:
            _blame(entry, policy, error, saved)
    else:
        lowered.proven = True
    outcome.replaced = {**made, **outcome.replaced}
    return outcome


def _failure(entry: Entry, policy: Policy, error: Exception) -> ExecutionError:
    call = entry.program.calls[0]
    what = str(error) if isinstance(error, LtcError) else f"{type(error).__name__}: {str(error).strip()}"
    failure = ExecutionError(
        f"{policy.backend.name} failed to run program {entry.program.identity}, which begins with {call.name}: {what}",
        op=call.name,
        source=None if isinstance(error, LtcError) and error.source else str(call.source),
    )
    failure.__cause__ = error
    return failure


def _blame(entry: Entry, policy: Policy, error: Exception, saved: _Saved) -> None:
    """The interpreter could run what the backend could not."""
    failure = _failure(entry, policy, error)
    entry.refused[policy.backend] = failure
    entry.compiled = None
    emit(RefusalEvent(entry.program.identity, policy.backend.name, "run", str(failure)))
    if policy.strict:
        saved.restore()
        raise failure
    executor.note(f"{failure}\n  the program runs in the {registry.reference.name} instead")


def _check(entry: Entry, computation: Computation, outcome: Outcome, arguments: Arguments, backend: str) -> None:
    """Raise unless the results are what was recorded; lay them out as recorded, those of a plain function each in
    memory of its own."""
    program = entry.program
    outcome.results = results = check_count(backend, program, outcome.results, len(program.outputs))
    taken: Memory | None = None
    if isinstance(computation, FunctionComputation):
        taken = Memory([held for held in arguments.held if not isinstance(held, LtcError)])
    for position, (number, spec) in enumerate(entry.outputs):
        result = results[position]
        check_result(backend, program, number, result, spec)
        if not isinstance(result, LtcError):
            result = fitted(result, spec)
            results[position] = result if taken is None else taken.own(result, spec)


class _Saved:
    """The data that a run may spoil: before the first run of a compiled program all that it writes to, later what it
    writes to before a call that may fail."""

    def __init__(self, entry: Entry, lowered: Lowered, arguments: Arguments) -> None:
        chosen = lowered.computation.restored
        positions = entry.restored if chosen is None else chosen
        if not lowered.proven and not lowered.computation.keeps_inputs:
            positions = entry.written_positions
        self.everything = set(positions) >= set(entry.written_positions)
        tensors: list[Any] = [arguments.tensor(position) for position in positions]
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._values = [storage.clone() for storage in self._storages]
        self._generator = arguments.generator if entry.program.random else None
        self._state = self._generator.get_state() if self._generator is not None else None

    def restore(self) -> None:
        """Put it back."""
        for storage, value in zip(self._storages, self._values, strict=True):
            storage.copy_(value)
        if self._generator is not None and self._state is not None:
            self._generator.set_state(self._state)
