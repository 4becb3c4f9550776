"""Tier policy: what runs a program, the interpreter or the backend's executable, once it is hot.

`select_executable` is asked at each execution and drives the compile state of the program (`state`): it looks for an
executable, starts or runs a compile job for one that is missing, and leaves a program that the backend cannot compile
to the interpreter, with one warning; or that is an error, if the setting `backend_failure` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_ltc.compile import jobs
from torch_ltc.compile.artifacts import ArtifactContext, current_store
from torch_ltc.compile.background import background
from torch_ltc.compile.disk_cache import Store
from torch_ltc.compile.jobs import CompileJob
from torch_ltc.compile.program_cache import CachedProgram, executables
from torch_ltc.compile.specialization_cache import Lookup, specializations
from torch_ltc.compile.state import CompileStatus, State
from torch_ltc.config import settings
from torch_ltc.lowering.interface import Arguments, Backend
from torch_ltc.lowering.lower import Executable
from torch_ltc.lowering.registry import AUTO, registry

__all__ = ["TierPolicy", "select_executable"]


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
    captures: str = "off"
    # With the backend "auto": the setting `numerics`, which says what is measured. Empty for a backend that was chosen.
    measures: str = ""

    @classmethod
    def current(cls) -> TierPolicy:
        """The settings now; one object as long as they stay the same."""
        backend, assignments = registry.get(settings.backend), settings.assignments
        before, known = _Latest.found
        if known is not None and before == assignments and known.backend is backend:
            return known
        made = cls(
            backend,
            1 if settings.tiers == "off" else settings.hot_after,
            settings.backend_failure == "error",
            settings.tiers != "background",
            current_store(),
            # Those look at cuts, and at runs as they are.
            "off" if settings.check == "invariants" else settings.check,
            settings.repro_dir,
            settings.cuda_graphs,
            settings.numerics if settings.backend == AUTO else "",
        )
        _Latest.found = (assignments, made)
        return made

    def on(self, backend: Backend, captured: bool) -> TierPolicy:
        """The same for one backend, captured or not."""
        return TierPolicy(
            backend,
            self.hot_after,
            self.strict,
            self.waits,
            self.store,
            self.check,
            self.repro_dir,
            self.captures if captured else "off",
        )

    def context(self, entry: CachedProgram) -> ArtifactContext:
        """The dependences of an executable of this program that is compiled now."""
        return ArtifactContext(self.backend, self.strict, self.store, entry.torch_state, torch.get_num_threads())


class _Latest:
    """How often settings had been assigned when a policy was last made, and that policy; in one piece, for threads."""

    found: tuple[int, TierPolicy | None] = (-1, None)


def select_executable(entry: CachedProgram, arguments: Arguments, policy: TierPolicy) -> Executable | None:
    """The executable for one execution of a program, None for the interpreter."""
    if policy.backend is registry.reference:
        return None
    status = entry.status(policy.backend)
    if status.error is not None:
        if policy.strict:
            raise status.error.untraced()
        return None
    # A lost input is not worth compiling for; the interpreter isolates what depends on it.
    if (entry.single and not policy.waits) or arguments.lost:
        return None
    numbers = list(arguments.scalars)
    executable = _looked_up(entry, numbers, policy, status)
    if executable is not None and not executable.computation.accepts(numbers):
        return None
    if executable is not None:
        if status.state is not State.COMPILED:
            status.move(State.COMPILED, "an executable fits it")
        executables.touch(entry)
        # Made again if the executable ever fails.
        entry.reference = None
    return executable


def _looked_up(
    entry: CachedProgram, numbers: list[object], policy: TierPolicy, status: CompileStatus
) -> Executable | None:
    """An executable that fits; where there is none, after a job for it was started, or has run."""
    while True:
        found = specializations.lookup(entry, numbers, policy.backend, policy.hot_after)
        if found.executable is not None:
            return found.executable
        if status.state is State.COMPILED:
            status.move(State.INTERPRETED, "no executable fits its sizes or numbers")
        if not _wait_or_start(entry, found, policy, status):
            return None


def _wait_or_start(entry: CachedProgram, found: Lookup, policy: TierPolicy, status: CompileStatus) -> bool:
    """Do what a lookup without an executable asks for. True if the program should be looked up again."""
    if found.refusal is not None:
        if found.announced:
            status.refuse(found.refusal)
        else:
            jobs.refuse(entry, policy.backend, found.refusal, policy.strict)
        return False
    if found.request is not None:
        job = CompileJob(entry, found.request, policy.context(entry), policy.waits)
        if policy.waits:
            return job.run()
        job.start()
    elif found.under_way is not None:
        status.move(State.QUEUED, f"program {found.under_way.program.identity} is compiled for it, too")
        if policy.waits:
            specializations.wait(found.under_way, lambda: background.stopped)
            return not background.stopped
    elif entry.runs == 1 and not policy.waits and policy.store.folder:
        jobs.start_load(entry, policy.context(entry))
    return False
