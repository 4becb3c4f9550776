"""Decides what runs a program: the reference interpreter, or what the backend compiled, once it is hot.

A program that the backend cannot compile runs in the interpreter from then on, with one warning; or it is an error, if
the setting `backend_failure` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_ltc.compile import jobs
from torch_ltc.compile.disk_cache import Store
from torch_ltc.compile.jobs import CompileJob
from torch_ltc.compile.program_cache import Entry, executables
from torch_ltc.compile.specialization_cache import Lookup, specializations
from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.lowering.interface import Arguments, Backend
from torch_ltc.lowering.lower import Executable
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.torch_state import TorchState


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """The settings that count for a program: those at the moment it was cut."""

    backend: Backend
    hot_after: int
    strict: bool
    waits: bool
    store: Store
    check: str = "off"
    repro_dir: str = ""

    @classmethod
    def current(cls) -> TierPolicy:
        """What the settings say now."""
        return cls(
            registry.get(settings.backend),
            1 if settings.tiers == "off" else settings.hot_after,
            settings.backend_failure == "error",
            settings.tiers != "background",
            jobs.current_store(),
            settings.check,
            settings.repro_dir,
        )


def select_executable(entry: Entry, arguments: Arguments, policy: TierPolicy) -> Executable | None:
    """The compiled program once it is there and the inputs are sound, None for the reference."""
    if policy.backend is registry.reference:
        return None
    refused = entry.refused.get(policy.backend)
    if refused is not None:
        if policy.strict:
            raise refused.untraced()
        return None
    if entry.single and not policy.waits:
        return None
    numbers = list(arguments.scalars)
    sound = not any(isinstance(held, LtcError) for held in arguments.held)
    result = specializations.place(entry, numbers, policy.backend, policy.hot_after)
    if not sound:
        return None
    if result.executable is None:
        result = _made(entry, numbers, result, policy)
    if result.executable is not None:
        executables.used(entry)
        # Made again if the compiled program ever fails.
        entry.reference = None
    return result.executable


def _made(entry: Entry, numbers: list[object], result: Lookup, policy: TierPolicy) -> Lookup:
    """What there is for the program after what is missing has been made, or begun."""
    while result.executable is None:
        if result.refusal is not None:
            jobs.refuse(entry, policy.backend, result.refusal, policy.strict)
            break
        if result.request is None:
            if entry.runs == 1 and not policy.waits and policy.store.folder:
                jobs.start(_job(entry, policy, result))
            break
        job = _job(entry, policy, result)
        if not policy.waits:
            jobs.start(job)
            break
        if not jobs.compile_now(job):
            break
        result = specializations.place(entry, numbers, policy.backend, policy.hot_after)
    return result


def _job(entry: Entry, policy: TierPolicy, result: Lookup) -> CompileJob:
    torch_state = TorchState.current()
    return CompileJob(entry, policy.backend, policy.strict, policy.store, torch_state, result.request, policy.waits)
