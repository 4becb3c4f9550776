"""Decides what runs a program: the reference interpreter, or what the backend compiled, once it is hot.

A program that the backend cannot compile runs in the interpreter from then on, with one warning; or it is an error, if
the setting `backend_failure` says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch_ltc.config import settings
from torch_ltc.errors import BackendError, CompileError, LtcError
from torch_ltc.events import CompileEvent, RefusalEvent, emit
from torch_ltc.lowering.interface import Arguments, Backend, refusal
from torch_ltc.lowering.lower import Lowered, lower, same_number
from torch_ltc.lowering.registry import registry
from torch_ltc.runtime.cache import Entry, executables
from torch_ltc.runtime.executor import executor

# Times that a program is compiled anew because of a number that its backend takes for a constant.
_MOST_SPECIALISATIONS = 4


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


def due(entry: Entry, arguments: Arguments, policy: Policy) -> Lowered | None:
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
