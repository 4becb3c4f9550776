"""Runs short programs on the thread that asks for them.

Handing a program to the worker, and its results back, takes as long as a short program itself. A thread that replays
one, or that reads what it computes, runs it at once, if nothing is queued before it and it is certain what will run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.compile.tier_policy import TierPolicy
from torch_ltc.config import settings
from torch_ltc.execute.buffer_passes import plain_data
from torch_ltc.execute.executor import call_below_autograd, executor
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.run import (
    all_lost,
    execute_settled,
    install_results,
    note_outcome,
    program_ran,
    settled_run,
)
from torch_ltc.lowering.interface import Arguments, Outcome
from torch_ltc.lowering.lower import Executable
from torch_ltc.lowering.registry import registry
from torch_ltc.record.buffer import Buffer
from torch_ltc.record.recorder import recorder
from torch_ltc.signals import signals_deferred
from torch_ltc.source import Source

__all__ = ["InPlace", "in_place", "reads_after_syncs"]

# A run of less is not handed to the worker: that takes as long, and both threads would wait for each other's GIL.
_SHORT_S = 200e-6
# So often in a row a program was read as soon as it was queued: it will be so again.
_READS_IN_A_ROW = 2


class InPlace:
    """What is known of the runs of one program, and whether it is run in place."""

    __slots__ = ("_entry", "_policy", "_assignments", "_own_code", "_least_s", "_timed", "_latest", "settled", "reads")

    def __init__(self, entry: CachedProgram) -> None:
        self._entry = entry
        # The settings that count, as of this many assignments.
        self._policy = TierPolicy.current()
        self._assignments = settings.assignments
        # Code of others may wait for whatever it likes.
        self._own_code = all(call.op.namespace == "aten" for call in entry.program.calls)
        # The shortest run so far, and the executable that ran.
        self._least_s = float("inf")
        self._timed: object = None
        # What `settled_run` said last, where that does not depend on what is measured.
        self._latest: tuple[TierPolicy, Executable | None] | None = None
        # How it ran the last time that it ran in place.
        self.settled: tuple[TierPolicy, Executable | None] | None = None
        # How often in a row it was read as soon as it was queued, without anything recorded in between.
        self.reads = 0

    @property
    def policy(self) -> TierPolicy:
        """As the settings are now."""
        if self._assignments != settings.assignments:
            self._assignments, self._policy, self._latest = settings.assignments, TierPolicy.current(), None
        return self._policy

    def note(self, took_s: float, ran: object) -> None:
        """Keep the shortest time of an executable, of its thread; None is the interpreter."""
        if self._timed is not ran:
            self._timed, self._least_s = ran, float("inf")
        self._least_s = min(self._least_s, took_s)

    def run(
        self,
        inputs: list[Buffer],
        scalars: list[object],
        outputs: list[Buffer],
        lines: Mapping[int, Source] | None = None,
    ) -> tuple[Any, ...] | None:
        """Run it now and install its results, if it is short, nothing is pending or queued, and it is certain what will
        run: the fields of the `ExecuteEvent`, which nobody was told of. Else None, and nothing has happened."""
        entry = self._entry
        if self._least_s > _SHORT_S or not self._own_code:
            return None
        settled = self._certain(scalars)
        if settled is None or self._timed is not settled[1]:
            return None
        interrupt: KeyboardInterrupt | None = None
        # An interrupt waits until everything has its value: no update is lost.
        with recorder.lock, signals_deferred():
            if not recorder.empty or not executor.begin_here():
                return None
            try:
                held = plain_data(entry, inputs)
                if held is None:
                    return None
                arguments = Arguments(
                    held, scalars, device_random.generator, entry.program.device, lines, replaceable=True, plain=True
                )
                began = time.perf_counter()
                try:
                    outcome = call_below_autograd(execute_settled, entry, arguments, *settled)
                except BaseException as error:
                    outcome = all_lost(entry, error)
                    interrupt = error if isinstance(error, KeyboardInterrupt) else None
                took_s = time.perf_counter() - began
                self.install(outcome, inputs, outputs)
                program_ran(entry, inputs, outputs)
            finally:
                executor.end_here()
        if interrupt is not None:
            raise interrupt
        entry.latest = scalars
        self.settled = settled
        used = registry.reference if settled[1] is None else settled[0].backend
        return entry.program.identity, used.name, took_s, bool(outcome.failures), False, 0.0

    def _certain(self, scalars: list[object]) -> tuple[TierPolicy, Executable | None] | None:
        """As `settled_run`, whose answer is kept while it is certain to be the same."""
        policy, settled = self.policy, self._latest
        if settled is not None and not scalars:
            executable = settled[1]
            if executable is not None and self._entry.compiled is executable and not executable.dropped:
                return settled
        settled = settled_run(self._entry, scalars, policy)
        self._latest = None if policy.measures else settled
        return settled

    def install(self, outcome: Outcome, inputs: list[Buffer], outputs: list[Buffer]) -> None:
        """Give the outputs their data: nothing that is queued writes to them."""
        entry = self._entry
        note_outcome(entry, outcome, inputs)
        for buffer, origin in zip(outputs, entry.origins, strict=True):
            buffer.maker = origin
            if buffer.job is not None:
                buffer.job = None
        install_results(entry, outputs, outcome.results)


def in_place(entry: CachedProgram) -> InPlace:
    """What is known of the runs of a program."""
    found: InPlace | None = entry.in_place
    if found is None:
        found = entry.in_place = InPlace(entry)
    return found


class _ReadsAfterSyncs:
    """Finds programs whose results are read as soon as they are queued. Threads may miscount: nothing but time depends
    on it."""

    __slots__ = ("_queued",)

    def __init__(self) -> None:
        self._queued: CachedProgram | None = None

    def expected(self, entry: CachedProgram) -> bool:
        """True for a program whose results the thread will wait for in any case. It is about to be queued."""
        before, self._queued = self._queued, None
        if before is not None and before.in_place is not None:
            before.in_place.reads = 0
        known: InPlace | None = entry.in_place
        return known is not None and known.reads >= _READS_IN_A_ROW

    def note_queued(self, entry: CachedProgram) -> None:
        """A program was queued, or has run at once, and not for a read."""
        self._queued = entry

    def note_read(self) -> None:
        """A value is read."""
        queued = self._queued
        if queued is not None and recorder.empty:
            self._queued = None
            in_place(queued).reads += 1


reads_after_syncs = _ReadsAfterSyncs()
