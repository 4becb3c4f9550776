"""Eager regions: where recording does not pay, calls run at once, on the CPU.

A program of a handful of calls that is read at once costs more to record, look up and run than its calls do; and so
does code that never repeats itself, whose every call is new. When such programs follow each other, the kernels in C++
run calls on the physical tensors and record nothing: as long as the loop goes on like that, or for some calls, after
which recording is tried again. Decided here is when a region begins; the extension ends it, also when calls take long,
and counts. A call that a region cannot run is recorded as ever, and so is what follows it, up to the next read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import SETTINGS, settings
from torch_ltc.execute.executor import executor
from torch_ltc.execute.memory import memory
from torch_ltc.execute.random_state import device_random
from torch_ltc.native.recording import native
from torch_ltc.program.spec import spec_of
from torch_ltc.record.call_site import current_source
from torch_ltc.source import Source

__all__ = ["EagerFigures", "EagerRegions", "eager_regions"]

# A region begins when that many programs in a row were read at once that have at most as many calls and take less time.
_READS = 8
_CALLS = 64
_SHORT_S = 1e-3
# What a program that has not run yet may take, for each call and each element of a result.
_CALL_S = 5e-6
_ELEMENT_S = 2e-9
# And when that many calls were recorded and no program was known, of several or of a long one: for so many calls, each
# time in a row twice as many.
_NEW_CALLS = 10_000
_NEW_PROGRAMS = 4
_LONG_CALLS = 15_000
_FIRST_CALLS = 100_000
_MOST_CALLS = 10_000_000
# How many places are kept at which regions have begun.
_MOST_PLACES = 20


class EagerFigures(NamedTuple):
    """Eager regions of the process: how many have begun, how many have ended, and their calls and reads."""

    begun: int = 0
    ended: int = 0
    calls: int = 0
    reads: int = 0


class EagerRegions:
    """Begins and ends eager regions. Where there is no extension, there are none."""

    def __init__(self) -> None:
        self._reads = 0
        # Programs and calls since a program was known, and how many the next region may have.
        self._new_programs = self._new_calls = 0
        self._allowed = _FIRST_CALLS
        # How often a region has begun at a line that reads.
        self.places: dict[Source, int] = {}
        self._before = EagerFigures()

    def note_program(self, entry: CachedProgram, known: bool, read: bool, took_s: float | None) -> None:
        """A program was queued, or has run at once, for a read or for another reason. Its last run took so long."""
        if native is None or settings.eager_regions != "auto":
            return
        calls = len(entry.program.calls)
        if read and calls <= _CALLS and (_estimated_s(entry) if took_s is None else took_s) < _SHORT_S:
            self._reads += 1
        else:
            self._reads = 0
        self._new_programs, self._new_calls = (0, 0) if known else (self._new_programs + 1, self._new_calls + calls)
        if known:
            self._allowed = _FIRST_CALLS
        if self._reads >= _READS:
            self._begin(0)
        elif self._new_calls > _NEW_CALLS and (self._new_programs >= _NEW_PROGRAMS or calls >= _LONG_CALLS):
            self._begin(self._allowed)
            self._allowed = min(2 * self._allowed, _MOST_CALLS)

    def note_views(self) -> None:
        """A view was read of what is computed, for which no program has to run."""
        if native is not None and settings.eager_regions == "auto":
            self._reads += 1
            if self._reads >= _READS:
                self._begin(0)

    def _begin(self, most_calls: int) -> None:
        if settings.check not in ("off", "invariants") or settings.device_type != "cpu":
            return
        self._reads = self._new_programs = self._new_calls = 0
        if most_calls >= 0:
            place = current_source()
            if place in self.places or len(self.places) < _MOST_PLACES:
                self.places[place] = self.places.get(place, 0) + 1
        native.begin_eager(executor, executor.start_cpu_worker(), settings, device_random.generator, most_calls)

    def end(self) -> None:
        """End the region, if there is one."""
        self._reads = 0
        if native is not None:
            native.end_eager()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Record everything in this block, on all threads."""
        if native is None:
            yield
            return
        native.suspend_eager(1)
        try:
            yield
        finally:
            native.suspend_eager(-1)

    def figures(self) -> EagerFigures:
        """What has run in regions since the last reset."""
        return EagerFigures(*(now - then for now, then in zip(self._all(), self._before, strict=True)))

    def reset(self) -> None:
        """Count anew."""
        self._before = self._all()
        self.places.clear()

    @staticmethod
    def _all() -> EagerFigures:
        return EagerFigures() if native is None else EagerFigures(*native.eager_figures())

    def apply_setting(self) -> None:
        """Begin or end as the setting says."""
        self.end()
        if native is not None and settings.eager_regions == "always":
            self._begin(-1)


def _estimated_s(entry: CachedProgram) -> float:
    program = entry.program
    elements = sum([spec.numel for spec in program.specs().values()])
    return len(program.calls) * _CALL_S + elements * _ELEMENT_S


def _adopted(buffer: Any) -> None:
    memory.hold(buffer)


eager_regions = EagerRegions()
settings.watch("eager_regions", eager_regions.apply_setting)
# The device cannot be used there.
os.register_at_fork(after_in_child=eager_regions.end)
if native is not None:
    for _name in SETTINGS:
        settings.watch(_name, native.disturb_eager)
    native.set_adopting(spec_of, _adopted)
