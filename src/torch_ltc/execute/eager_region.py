"""Eager regions: while a loop reads about as often as it computes, its calls run at once, on the CPU.

A program of a handful of calls that is read at once costs more to record, look up and run than its calls do. When such
programs follow each other, the kernels in C++ run calls on the physical tensors and record nothing, as long as the loop
goes on like that. Decided here is when a region begins; the extension ends it, when there are many calls for each read
or calls that take long, and counts. A call that a region cannot run is recorded as ever, and so is what follows it, up
to the next read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import settings
from torch_ltc.execute.executor import executor
from torch_ltc.execute.memory import memory
from torch_ltc.execute.random_state import device_random
from torch_ltc.native.recording import native
from torch_ltc.program.spec import spec_of
from torch_ltc.record.call_site import current_source
from torch_ltc.source import Source

__all__ = ["EagerFigures", "EagerRegions", "eager_regions"]

# A region begins when that many programs of at most as many calls were run by the thread that read them, in a row.
_READS = 8
_CALLS = 64
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
        # How often a region has begun at a line that reads.
        self.places: dict[Source, int] = {}
        self._before = EagerFigures()

    def note_read(self, entry: CachedProgram) -> None:
        """A thread has run this program itself, because it reads a result."""
        if len(entry.program.calls) > _CALLS or native is None or settings.eager_regions != "auto":
            self._reads = 0
            return
        self._reads += 1
        if self._reads >= _READS:
            self._reads = 0
            self._begin(always=False)

    def note_program(self) -> None:
        """A program was queued: the loop is another one."""
        self._reads = 0

    def _begin(self, always: bool) -> None:
        if executor.cpu_worker is None or settings.check != "off" or settings.device_type != "cpu":
            return
        if not always:
            place = current_source()
            if place in self.places or len(self.places) < _MOST_PLACES:
                self.places[place] = self.places.get(place, 0) + 1
        native.begin_eager(executor, executor.cpu_worker, settings, device_random.generator, always)

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
            # Starts the worker.
            executor.call(lambda: None)
            self._begin(always=True)


def _adopted(buffer: Any) -> None:
    memory.hold(buffer)


eager_regions = EagerRegions()
settings.watch("eager_regions", eager_regions.apply_setting)
# The device cannot be used there.
os.register_at_fork(after_in_child=eager_regions.end)
if native is not None:
    native.set_adopting(spec_of, _adopted)
