"""Runs a known program on given buffers without recording it: queued like any other, or by the calling thread itself.

A program that takes less time than handing it to the worker, and its results back, is run at once by the thread that
asks for it, if nothing is queued before it.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from concurrent.futures import Future

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.compile.tier_policy import TierPolicy
from torch_ltc.config import settings
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcError
from torch_ltc.events import ExecuteEvent, SyncReason, emit
from torch_ltc.execute.buffer_passes import plain_data, renew, set_jobs, set_makers
from torch_ltc.execute.capture import graphs_of
from torch_ltc.execute.executor import Uses, executor
from torch_ltc.execute.memory import add_holdings, memory
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.run import execute_settled, settled_run
from torch_ltc.execute.sync import _all_lost, _run, _tell, cut
from torch_ltc.lowering.interface import Arguments, Outcome
from torch_ltc.record.buffer import Buffer, remembered
from torch_ltc.record.recorder import recorder

__all__ = ["Replayed"]

# A run of less is not handed to the worker: that takes as long, and both threads would wait for each other's GIL.
_SHORT_S = 200e-6


class Replayed:
    """A program that is run again and again, by one thread at a time, with what is known of its runs."""

    def __init__(self, entry: CachedProgram) -> None:
        self.entry = entry
        self._written = _getter(entry.written)
        # The settings that count, as of this many assignments.
        self._policy = TierPolicy.current()
        self._assignments = settings.assignments
        # Code of others may wait for whatever it likes.
        self._own_code = all(call.op.namespace == "aten" for call in entry.program.calls)
        # The shortest run so far, and the executable that ran.
        self._least_s = float("inf")
        self._ran: object = None

    def run(self, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> None:
        """Run the program on these buffers and numbers, or queue it."""
        began = time.perf_counter()
        if self._assignments != settings.assignments:
            self._assignments, self._policy = settings.assignments, TierPolicy.current()
        event = self._run_here(inputs, scalars, outputs)
        if event is None:
            idle = executor.is_idle()
            jobs: list[Future[None]] = []
            cut(SyncReason.JIT, then=lambda: jobs.append(self._queue(inputs, scalars, outputs)))
            if idle:
                executor.let_launch(jobs[0])
        else:
            emit(event)
        _tell(self.entry, SyncReason.JIT, True, len(outputs), 0.0, began)

    def _queue(self, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> Future[None]:
        """Have the worker run it. The recorder's lock is held."""
        entry, policy = self.entry, self._policy
        entry.latest = scalars
        made = [*outputs, *self._written(inputs)]
        tracked = policy.captures != "off" and graphs_of(entry.program.device) is not None
        previous = renew(entry.last_outputs, outputs) if tracked else []

        def run() -> None:
            settled = settled_run(entry, scalars, policy)
            began = time.thread_time()
            _run(entry, inputs, scalars, {}, outputs, previous, policy)
            if settled is not None:
                self._note(time.thread_time() - began, settled[1])

        job = executor.submit(run, Uses(inputs, made), wait=False)
        for reference in previous:
            # Moved before the program runs, if it is still alive then; whoever reads it waits for that.
            buffer = reference()
            if buffer is not None:
                buffer.job = job
        set_jobs(made, job)
        set_makers(entry, outputs)
        return job

    def _note(self, took_s: float, ran: object) -> None:
        """Keep the shortest time of an executable; None is the interpreter."""
        if self._ran is not ran:
            self._ran, self._least_s = ran, float("inf")
        self._least_s = min(self._least_s, took_s)

    # ---- on the calling thread --------------------------------------------------------------------------------------

    def _run_here(self, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> ExecuteEvent | None:
        """Run it now, if it is short, nothing is queued, and it is certain what will run."""
        if self._least_s > _SHORT_S or not self._own_code:
            return None
        entry = self.entry
        settled = settled_run(entry, scalars, self._policy)
        if settled is None or self._ran is not settled[1]:
            return None
        policy, executable = settled
        told: list[ExecuteEvent] = []
        interrupts: list[KeyboardInterrupt] = []

        def run() -> None:
            held = plain_data(entry, inputs)
            if held is None:
                return
            arguments = Arguments(
                held, scalars, device_random.generator, entry.program.device, None, replaceable=True, plain=True
            )
            try:
                outcome, event = execute_settled(entry, arguments, policy, executable)
            except BaseException as error:
                outcome = _all_lost(entry, error)
                event = ExecuteEvent(entry.program.identity, policy.backend.name, 0.0, failed=True)
                if isinstance(error, KeyboardInterrupt):
                    interrupts.append(error)
            told.append(event)
            self._install(outcome, inputs, outputs)

        with recorder.lock:
            if recorder.empty:
                executor.run_here(run)
        if not told:
            return None
        if interrupts:
            raise interrupts[0]
        entry.latest = scalars
        return told[0]

    def _install(self, outcome: Outcome, inputs: list[Buffer], outputs: list[Buffer]) -> None:
        """Give the outputs their data: nothing that is queued writes to them."""
        entry = self.entry
        for position, data in outcome.replaced.items():
            inputs[entry.program.inputs[position].buffer].data = data
        for failure in outcome.failures:
            deferred.add_error(add_holdings(failure))
        memory.run += 1
        made = zip(outputs, outcome.results, entry.origins, entry.makers, strict=True)
        for buffer, result, origin, maker in made:
            buffer.job, buffer.maker = None, origin
            if isinstance(result, LtcError):
                buffer.error = remembered(result)
            elif buffer.data is not result:
                buffer.data = result
                buffer.error = None
                memory.hold(buffer, maker)


def _getter(positions: tuple[int, ...]) -> Callable[[list[Buffer]], tuple[Buffer, ...]]:
    if len(positions) < 2:
        return lambda buffers: tuple([buffers[position] for position in positions])
    get: Callable[[list[Buffer]], tuple[Buffer, ...]] = operator.itemgetter(*positions)
    return get
