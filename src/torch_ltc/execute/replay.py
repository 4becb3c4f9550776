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
from torch_ltc.events import ExecuteEvent, SyncReason, tell
from torch_ltc.execute.buffer_passes import plain_data, renew, set_jobs, set_makers
from torch_ltc.execute.capture import graphs_of
from torch_ltc.execute.executor import Uses, call_below_autograd, executor
from torch_ltc.execute.memory import Maker, add_holdings, memory
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.run import execute_settled, settled_run
from torch_ltc.execute.sync import _run, all_lost, cut, tell_sync
from torch_ltc.lowering.interface import Arguments, Outcome
from torch_ltc.lowering.lower import Executable
from torch_ltc.lowering.registry import registry
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
        # How it ran the last time, if that was on the calling thread.
        self.ran_here: tuple[TierPolicy, Executable | None] | None = None
        # What `settled_run` said last, where that does not depend on what is measured.
        self._latest: tuple[TierPolicy, Executable | None] | None = None

    def run(self, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> None:
        """Run the program on these buffers and numbers, or queue it."""
        began = time.perf_counter()
        if self._assignments != settings.assignments:
            self._assignments, self._policy, self._latest = settings.assignments, TierPolicy.current(), None
        self.ran_here = None
        if not self._run_here(inputs, scalars, outputs):
            idle = executor.is_idle()
            jobs: list[Future[None]] = []
            cut(SyncReason.JIT, then=lambda: jobs.append(self._queue(inputs, scalars, outputs)))
            if idle:
                executor.let_launch(jobs[0])
        tell_sync(self.entry, SyncReason.JIT, True, len(outputs), 0.0, began)

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

    def _run_here(self, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> bool:
        """Run it now, if it is short, nothing is queued, and it is certain what will run."""
        if self._least_s > _SHORT_S or not self._own_code:
            return False
        entry = self.entry
        settled = self._settled(scalars)
        if settled is None or self._ran is not settled[1]:
            return False
        interrupt: KeyboardInterrupt | None = None
        with recorder.lock:
            if not recorder.empty or not executor.begin_here():
                return False
            try:
                held = plain_data(entry, inputs)
                if held is None:
                    return False
                arguments = Arguments(
                    held, scalars, device_random.generator, entry.program.device, None, replaceable=True, plain=True
                )
                began = time.perf_counter()
                try:
                    outcome = call_below_autograd(execute_settled, entry, arguments, *settled)
                except BaseException as error:
                    outcome = all_lost(entry, error)
                    interrupt = error if isinstance(error, KeyboardInterrupt) else None
                took_s = time.perf_counter() - began
                self.install(outcome, inputs, outputs)
            finally:
                executor.end_here()
        if interrupt is not None:
            raise interrupt
        entry.latest = scalars
        self.ran_here = settled
        used = registry.reference if settled[1] is None else settled[0].backend
        tell(ExecuteEvent, entry.program.identity, used.name, took_s, bool(outcome.failures), False, 0.0)
        return True

    def _settled(self, scalars: list[object]) -> tuple[TierPolicy, Executable | None] | None:
        """As `settled_run`, whose answer is kept while it is certain to be the same."""
        settled = self._latest
        if settled is not None and not scalars:
            executable = settled[1]
            if executable is not None and self.entry.compiled is executable and not executable.dropped:
                return settled
        settled = settled_run(self.entry, scalars, self._policy)
        self._latest = None if self._policy.measures else settled
        return settled

    def install(self, outcome: Outcome, inputs: list[Buffer], outputs: list[Buffer]) -> None:
        """Give the outputs their data: nothing that is queued writes to them."""
        entry = self.entry
        for position, data in outcome.replaced.items():
            inputs[entry.program.inputs[position].buffer].data = data
        for failure in outcome.failures:
            deferred.add_error(add_holdings(failure))
        memory.run += 1
        held: list[tuple[Buffer, Maker]] = []
        for buffer, result, origin, maker in zip(outputs, outcome.results, entry.origins, entry.makers, strict=True):
            buffer.maker = origin
            if buffer.job is not None:
                buffer.job = None
            if isinstance(result, LtcError):
                buffer.error = remembered(result)
            elif buffer.data is not result:
                buffer.data = result
                if buffer.error is not None:
                    buffer.error = None
                held.append((buffer, maker))
        memory.hold_all(held)
        memory.end_run()


def _getter(positions: tuple[int, ...]) -> Callable[[list[Buffer]], tuple[Buffer, ...]]:
    if len(positions) < 2:
        return lambda buffers: tuple([buffers[position] for position in positions])
    get: Callable[[list[Buffer]], tuple[Buffer, ...]] = operator.itemgetter(*positions)
    return get
