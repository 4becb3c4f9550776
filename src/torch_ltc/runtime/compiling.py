"""Decides what runs a program: the reference interpreter, or what the backend compiled, once it is hot.

A program that the backend cannot compile runs in the interpreter from then on, with one warning; or it is an error, if
the setting `backend_failure` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.lowering.interface import Arguments, Backend
from torch_ltc.lowering.lower import Lowered
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.surroundings import Surroundings
from torch_ltc.runtime import tiers
from torch_ltc.runtime.cache import Entry, executables
from torch_ltc.runtime.disk import Store
from torch_ltc.runtime.families import Placement, families
from torch_ltc.runtime.tiers import Task


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that count for a program: those at the moment it was cut."""

    backend: Backend
    hot_after: int
    strict: bool
    waits: bool
    store: Store
    check: str = "off"
    repro_dir: str = ""

    @classmethod
    def current(cls) -> Policy:
        """What the settings say now."""
        return cls(
            registry.get(settings.backend),
            1 if settings.tiers == "off" else settings.hot_after,
            settings.backend_failure == "error",
            settings.tiers != "background",
            tiers.current_store(),
            settings.check,
            settings.repro_dir,
        )


def due(entry: Entry, arguments: Arguments, policy: Policy) -> Lowered | None:
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
    placement = families.place(entry, numbers, policy.backend, policy.hot_after)
    if not sound:
        return None
    if placement.lowered is None:
        placement = _made(entry, numbers, placement, policy)
    if placement.lowered is not None and not placement.lowered.computation.accepts(numbers):
        return None
    if placement.lowered is not None:
        executables.used(entry)
        # Made again if the compiled program ever fails.
        entry.reference = None
    return placement.lowered


def _made(entry: Entry, numbers: list[object], placement: Placement, policy: Policy) -> Placement:
    """What there is for the program after what is missing has been made, or begun."""
    while placement.lowered is None:
        if placement.refusal is not None:
            tiers.refuse(entry, policy.backend, placement.refusal, policy.strict)
            break
        if placement.request is None:
            if entry.runs == 1 and not policy.waits and policy.store.folder:
                tiers.start(_task(entry, policy, placement))
            break
        task = _task(entry, policy, placement)
        if not policy.waits:
            tiers.start(task)
            break
        if not tiers.compile_now(task):
            break
        placement = families.place(entry, numbers, policy.backend, policy.hot_after)
    return placement


def _task(entry: Entry, policy: Policy, placement: Placement) -> Task:
    surroundings = Surroundings.current()
    return Task(entry, policy.backend, policy.strict, policy.store, surroundings, placement.request, policy.waits)
