"""Runs a known program on given buffers without recording it: queued like any other, or by the thread that asks."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from concurrent.futures import Future

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.compile.tier_policy import TierPolicy
from torch_ltc.events import ExecuteEvent, SyncReason, tell
from torch_ltc.execute.buffer_passes import renew, set_jobs, set_makers
from torch_ltc.execute.capture import graphs_of
from torch_ltc.execute.executor import Uses, executor
from torch_ltc.execute.in_place import in_place
from torch_ltc.execute.run import program_queued, settled_run
from torch_ltc.execute.sync import _run, cut, tell_sync
from torch_ltc.lowering.lower import Executable
from torch_ltc.record.buffer import Buffer

__all__ = ["Replayed"]


class Replayed:
    """A program that is run again and again, by one thread at a time."""

    def __init__(self, entry: CachedProgram) -> None:
        self.entry = entry
        self.in_place = in_place(entry)
        self._written = _getter(entry.written)
        # How it ran the last time, if that was on the calling thread.
        self.ran_here: tuple[TierPolicy, Executable | None] | None = None

    def run(self, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> None:
        """Run the program on these buffers and numbers, or queue it."""
        began = time.perf_counter()
        program_queued(self.entry, outputs)
        told = self.in_place.run(inputs, scalars, outputs)
        if told is None:
            self.ran_here = None
            idle = executor.is_idle()
            jobs: list[Future[None]] = []
            cut(SyncReason.JIT, then=lambda: jobs.append(self._queue(inputs, scalars, outputs)))
            if idle:
                executor.let_launch(jobs[0])
        else:
            self.ran_here = self.in_place.settled
            tell(ExecuteEvent, *told)
        tell_sync(self.entry, SyncReason.JIT, True, len(outputs), 0.0, began)

    def _queue(self, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> Future[None]:
        """Have the worker run it. The recorder's lock is held."""
        entry, policy = self.entry, self.in_place.policy
        entry.latest = scalars
        made = [*outputs, *self._written(inputs)]
        tracked = policy.captures != "off" and graphs_of(entry.program.device) is not None
        previous = renew(entry.last_outputs, outputs) if tracked else []

        def run() -> None:
            settled = settled_run(entry, scalars, policy)
            began = time.thread_time()
            _run(entry, inputs, scalars, {}, outputs, previous, policy)
            if settled is not None:
                self.in_place.note(time.thread_time() - began, settled[1])

        job = executor.submit(run, Uses(inputs, made), wait=False)
        for reference in previous:
            # Moved before the program runs, if it is still alive then; whoever reads it waits for that.
            buffer = reference()
            if buffer is not None:
                buffer.job = job
        set_jobs(made, job)
        set_makers(entry, outputs)
        return job


def _getter(positions: tuple[int, ...]) -> Callable[[list[Buffer]], tuple[Buffer, ...]]:
    if len(positions) < 2:
        return lambda buffers: tuple([buffers[position] for position in positions])
    get: Callable[[list[Buffer]], tuple[Buffer, ...]] = operator.itemgetter(*positions)
    return get
