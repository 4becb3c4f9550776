"""One case of fault injection: a training in which one call fails, and what must hold afterwards."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

import torch_ltc
from tests.faults import workloads
from tests.faults.places import Fault, Injector, all_places, faults_of
from tests.faults.workloads import FaultyFunctional, OutOfProcessBackend, Training, Workload
from tests.support.backends import registered
from torch_ltc.compile.background import background
from torch_ltc.compile.compiler_client import compiler_client
from torch_ltc.errors import LtcError
from torch_ltc.execute.memory import memory
from torch_ltc.lowering.registry import registry
from torch_ltc.record.recorder import recorder

__all__ = ["GAPS", "Case", "Outcome", "cases_of", "places", "run_case", "survey"]

# A case that takes longer hangs: the process ends, and shows where its threads are.
LIMIT_S = 100.0
# What a fault at one of these belongs to no recorded line.
_NO_LINE = (
    "clock",
    "listener",
    "step closure",
    "asynchronous closure",
    "upload",
    "Buffer.",
    "compile.disk_cache",
    "private_files",
    "compile.compiler_client",
    "compiler_client",
)
# What code of the user's raises, the user gets.
_USER_CODE = ("step closure", "asynchronous closure", "upload", "Buffer.physical", "Buffer.held", "Executor.submit")
# A call fails by itself here, as in eager: what other calls of the step have written stays written.
_SINGLE_CALLS = ("kernel",)


# Known gaps, by workload and place, with the reason.
GAPS = {
    ("captured", "Graph.replay"): (
        "calls whose numbers change run between graphs: when the launch of a graph fails, which it does only on a "
        "device that is broken, earlier graphs of the step have written; the step is an error with its line"
    ),
    ("captured", "kernel of a part"): (
        "calls that may fail are never put between graphs; one that fails all the same, as for lack of memory, leaves "
        "what ran before it, as in eager; the step is an error with its line"
    ),
}
HALF = "half of the step has happened"


@dataclass(frozen=True, slots=True)
class Case:
    """The n-th call of a place of a workload, and the fault that it has."""

    workload: Workload
    place: str
    number: int
    fault: Fault

    def __str__(self) -> str:
        return f"{self.workload.name}: call {self.number} of {self.place}: {self.fault.name}"


@dataclass(slots=True)
class Outcome:
    """What became of the training: errors by step, warnings, states after a failing step; and what is wrong."""

    fired: bool = False
    errors: list[str] = field(default_factory=list)
    warned: int = 0
    states: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The outcome in few words."""
        if self.wrong:
            return "WRONG"
        if not self.fired:
            return "not reached"
        if self.errors:
            return f"error, {self.states[0] if self.states else 'all done'}"
        return "warning, all done" if self.warned else "all done"


@contextmanager
def places() -> Iterator[Injector]:
    """All places, with the backends of the workloads registered."""
    ours = [FaultyFunctional(), OutOfProcessBackend()]
    # What is there already need not be looked at after each case.
    gc.freeze()
    with registered(*ours), all_places([*ours, registry.reference, registry.get("torchscript")]) as injector:
        yield injector


def survey(workload: Workload, injector: Injector) -> dict[str, int]:
    """The calls of each place in a run without a fault, which must be right."""
    outcome = _run(workload, injector, None)
    assert not outcome.wrong, f"{workload.name} without a fault: {outcome.wrong}"
    assert not outcome.errors, f"{workload.name} without a fault: {outcome.errors}"
    return dict(injector.counts)


def cases_of(workload: Workload, counts: dict[str, int], injector: Injector, most: int) -> list[Case]:
    """Every fault at every place of a workload, at `most` calls of the place: the first ones and the last."""
    made: list[Case] = []
    for place, count in sorted(counts.items()):
        if workload.data != (injector.kinds[place] == "data"):
            continue
        numbers = list(range(1, count + 1))
        chosen = numbers if count <= most else [*numbers[: most - 1], count]
        for number, fault in itertools.product(chosen, faults_of(injector.kinds[place])):
            made.append(Case(workload, place, number, fault))
    return made


def run_case(case: Case, injector: Injector) -> Outcome:
    """Run one case."""
    return _run(case.workload, injector, case)


def _run(workload: Workload, injector: Injector, case: Case | None) -> Outcome:
    outcome = Outcome()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    threads, held_bytes = _threads(), memory.current_bytes
    try:
        with workload.surroundings() as folder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch_ltc.ir_cache.reset()
            if case is not None and case.place.endswith("Popen"):
                # It is started once, and stays.
                compiler_client.end()
            if case is None:
                injector.arm()
            else:
                injector.arm(case.place, case.number, case.fault)
            try:
                _train(workload, injector, case, outcome)
            finally:
                injector.counting = False
            outcome.warned = len(caught)
            outcome.fired = injector.fired
            _check_rest(outcome, folder)
        torch_ltc.ir_cache.reset()
    finally:
        faulthandler.cancel_dump_traceback_later()
    if not _is_freed(held_bytes):
        held = memory.describe_largest()
        outcome.wrong.append(f"{memory.current_bytes - held_bytes} bytes are still held: {held}")
    # Each thread of the package is there once, and stays.
    left = [name for name, count in (_threads() - threads).items() if count > 1 or not name.startswith("torch_ltc")]
    if left:
        outcome.wrong.append(f"threads are left: {left}")
    return outcome


def _train(workload: Workload, injector: Injector, case: Case | None, outcome: Outcome) -> None:
    with injector.paused():
        ours, theirs = Training("ltc"), Training("cpu")
        bystander = torch.arange(4.0).to("ltc")
        doubled = bystander * 2
        torch_ltc.sync(wait=True)
    for number in range(workload.steps):
        if workload.disk and number == workload.steps // 2:
            torch_ltc.wait_for_compiles()
            torch_ltc.ir_cache.reset()
        before = theirs.values()
        workload.step(theirs, number, None)
        failed = _step(workload, ours, number, injector, case, outcome)
        with injector.paused():
            # What was queued, or compiled beside it, may have an error of its own; the device is clean afterwards.
            failed |= _drain(case, outcome)
            _compare(workload, case, ours, theirs, before, failed, outcome)
            if bystander.tolist() != [0.0, 1.0, 2.0, 3.0] or doubled.tolist() != [0.0, 2.0, 4.0, 6.0]:
                outcome.wrong.append("another tensor has changed")
    # Once more, and nothing fails.
    with injector.paused():
        before = theirs.values()
        workload.step(theirs, workload.steps, None)
        try:
            workload.step(ours, workload.steps, injector)
        except Exception as error:
            outcome.wrong.append(f"the step afterwards fails: {error!r}")
        else:
            _compare(workload, case, ours, theirs, before, False, outcome)


def _step(
    workload: Workload, ours: Training, number: int, injector: Injector, case: Case | None, outcome: Outcome
) -> bool:
    """One step on the device; True when it raised."""
    try:
        workload.step(ours, number, injector)
    except (Exception, KeyboardInterrupt) as error:
        _note(error, case, outcome)
        return True
    return False


def _note(error: BaseException, case: Case | None, outcome: Outcome) -> None:
    """Keep the text of an error, and what is wrong with it: its class, or that no line is named."""
    outcome.errors.append(f"{type(error).__name__}: {error}")
    if case is None:
        return
    user = case.place in _USER_CODE
    interrupt = isinstance(error, KeyboardInterrupt) and case.fault.name == "KeyboardInterrupt"
    if not (isinstance(error, LtcError) or user or interrupt):
        outcome.wrong.append(f"the error is {error!r}, which is none of the package")
    if isinstance(error, LtcError) and not case.place.startswith(_NO_LINE) and workloads.__file__ not in str(error):
        outcome.wrong.append(f"no line is named: {error}")


def _drain(case: Case | None, outcome: Outcome) -> bool:
    """Wait for everything; True when there were errors."""
    for attempt in range(4):
        try:
            torch_ltc.sync(wait=True)
            torch_ltc.wait_for_compiles()
            torch_ltc.closures.wait_step_closures()
        except (Exception, KeyboardInterrupt) as error:
            _note(error, case, outcome)
        else:
            return attempt > 0
    outcome.wrong.append("errors do not end")
    return True


def _compare(
    workload: Workload,
    case: Case | None,
    ours: Training,
    theirs: Training,
    before: list[Tensor],
    failed: bool,
    outcome: Outcome,
) -> None:
    """The state of the training is that after the step; after a failed one, all before or all after it."""
    after = theirs.values()
    lost, now = [], []
    for tensor in ours.tensors:
        try:
            now.append(tensor.detach().to("cpu", copy=True))
        except LtcError as error:
            lost.append(error)
    if not lost and _same(workload, now, after):
        if failed:
            outcome.states.append("all done")
        return
    if not failed:
        outcome.wrong.append("lost values without an error" if lost else f"wrong values: {now} instead of {after}")
    elif lost:
        outcome.states.append("values lost")
        outcome.wrong.append(f"parameters are lost: {lost[0]}")
    elif _same(workload, now, before):
        outcome.states.append("nothing done")
        theirs.load(before)
        return
    elif case is not None and (
        case.place in _SINGLE_CALLS or (workload.data and _same(workload, now, theirs.without_data(before)))
    ):
        outcome.states.append("as in eager, without the call")
    else:
        known = case is not None and (case.workload.name, case.place) in GAPS
        (outcome.states if known else outcome.wrong).append(HALF)
    ours.load(after)


def _same(workload: Workload, some: list[Tensor], others: list[Tensor]) -> bool:
    if workload.exact:
        return all(map(torch.equal, some, others))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(some, others, strict=True))


def _check_rest(outcome: Outcome, folder: str) -> None:
    try:
        torch_ltc.sync(wait=True)
    except Exception as error:
        outcome.wrong.append(f"an error comes late: {error!r}")
    if background.titles():
        outcome.wrong.append(f"jobs are left: {background.titles()}")
    if not recorder.empty:
        outcome.wrong.append("something is pending")
    if folder and any(not name.endswith(".ltc") for name in os.listdir(folder)):
        outcome.wrong.append(f"unfinished files are left: {os.listdir(folder)}")


def _is_freed(held_bytes: int) -> bool:
    """True when no more bytes are held; errors refer to frames, these to tensors, and threads let go of their last."""
    for _ in range(20):
        if memory.current_bytes <= held_bytes:
            return True
        gc.collect()
        time.sleep(0.01)
    return memory.current_bytes <= held_bytes


def _threads() -> Counter[str]:
    return Counter(thread.name for thread in threading.enumerate())
