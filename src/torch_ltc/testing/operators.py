"""One unit of the operator sweep: all samples of one operator with one dtype on one backend.

Owns how cases are run on the device and judged: one by one, or all in one program first. Runs inside a worker process,
which may die of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from torch_ltc.testing.compare import differences
from torch_ltc.testing.outcome import Outcome, begin, describe, finish, run
from torch_ltc.testing.probe import Activity, Probe, unneeded_fallbacks
from torch_ltc.testing.records import Difference, Result, Unit, Variant, What
from torch_ltc.testing.refusals import run_refusals
from torch_ltc.testing.samples import Case, samples

CASES_TOGETHER = 16
"""The most cases in one program: compilers take longer than in proportion to its size."""


class Joint(Enum):
    """The result of several cases in one program."""

    RIGHT = "every case equals eager"
    WRONG = "a case differs, or the program was refused"
    UNDECIDED = "they were not one program"


def run_unit(unit: Unit, op: Any, probe: Probe, time_limit_s: float) -> Result:
    """Runs all cases of a unit, whose operator in the database is `op`.

    An error of the sweep itself becomes a failure of the unit.
    """
    result = Result(unit)
    started_s = time.perf_counter()
    try:
        cases = [case for sample in samples(op, unit) for case in sample.cases(probe.spec, probe.eager)]
    except Exception as error:
        found = Difference(What.HARNESS, f"samples could not be made: {describe(error)}")
        result.add(None, None, [found])
    else:
        _run_cases(cases, probe, result, started_s + time_limit_s / 2)
        run_refusals(unit, op, probe, result)
    result.duration_s = time.perf_counter() - started_s
    return result


def _run_cases(cases: Sequence[Case], probe: Probe, result: Result, until_s: float) -> None:
    assert isinstance(result.unit, Unit)
    if not (result.unit.together and probe.compiles):
        _run_apart(cases, probe, result, until_s)
        return
    # Where eager raises, no result is left that a program could be made of.
    sound = [case for case in cases if case.expected.forward_error is None]
    # What needs memory to be resized is often refused: it must not take the others with it.
    for joint in ([case for case in sound if not case.resizes], [case for case in sound if case.resizes]):
        for start in range(0, len(joint), CASES_TOGETHER):
            _run_jointly(joint[start : start + CASES_TOGETHER], probe, result, until_s)
    _run_apart([case for case in cases if case.expected.forward_error is not None], probe, result, until_s)


def _run_jointly(cases: Sequence[Case], probe: Probe, result: Result, until_s: float) -> None:
    """All cases in one program; each in its own if that one is not right."""
    joint = _run_together(cases, probe, result) if len(cases) > 1 else Joint.UNDECIDED
    if joint is Joint.RIGHT:
        return
    before = len(result.failures) + result.left_out
    _run_apart(cases, probe, result, until_s)
    if joint is Joint.WRONG and len(result.failures) + result.left_out == before:
        result.add(None, None, [Difference(What.TOGETHER, f"{len(cases)} cases are right only one by one")])


def _run_apart(cases: Sequence[Case], probe: Probe, result: Result, until_s: float) -> None:
    """Each case in a program of its own. When something is wrong and the time half over, the rest is left out."""
    for number, case in enumerate(cases):
        if result.failures and time.perf_counter() > until_s:
            result.left_out += len(cases) - number
            return
        try:
            _add(case, _judge(case, probe, result), probe, result)
        except Exception as error:
            found = Difference(What.HARNESS, f"the sweep itself failed: {describe(error)}")
            result.add(case.sample.index, Variant.FUNCTION, [found])


def _judge(case: Case, probe: Probe, result: Result) -> list[Difference]:
    """Runs a case on the device as often as the backend needs, and says what differs from eager."""
    found: list[Difference] = []
    for number in range(probe.runs_per_case):
        probe.settle()
        try:
            arguments = case.arguments(probe.device)
        except Exception as error:
            return [Difference(What.RAISES, f"copying the arguments to the device raised {describe(error)}")]
        actual = run(case.call, arguments, probe.device)
        late = probe.wait()
        activity = probe.take()
        found += _differences(case, actual) or late
        found += unneeded_fallbacks(activity.fallbacks, case.run_eagerly)
        if number == probe.runs_per_case - 1 and not found and case.expected.forward_error is None:
            found += probe.not_taken(activity)
            result.taken_cases += probe.backend in activity.executed_by and not found
        _note(activity, result)
        if found:
            break
    return found


def _differences(case: Case, actual: Outcome) -> list[Difference]:
    if actual.refusal is not None:
        return [Difference(What.REFUSED, actual.refusal)]
    return differences(case.expected, actual, case.rules)


def _run_together(cases: Sequence[Case], probe: Probe, result: Result) -> Joint:
    """Records all cases before the first is read, so that they are one program; they are counted if all is right."""
    activity = Activity()
    for _ in range(probe.runs_per_case):
        probe.settle()
        try:
            running = [begin(case.call, case.arguments(probe.device), probe.device) for case in cases]
        except Exception:
            # An argument cannot be copied to the device: case by case it can be said which.
            return Joint.UNDECIDED
        outcomes = [finish(each) for each in running]
        late = probe.wait()
        activity = probe.take()
        _note(activity, result)
        if activity.fallbacks:
            return Joint.UNDECIDED
        if late or any(_differences(case, outcome) for case, outcome in zip(cases, outcomes, strict=True)):
            return Joint.WRONG
    if probe.not_taken(activity):
        return Joint.WRONG
    result.taken_cases += len(cases) if probe.backend in activity.executed_by else 0
    for case in cases:
        result.add(case.sample.index, case.variant, [])
    return Joint.RIGHT


def _add(case: Case, found: list[Difference], probe: Probe, result: Result) -> None:
    """Counts a case. Of one that was refused with its backward pass, says whether the backend takes it without."""
    if case.call.differentiate and [each.what for each in found] == [What.REFUSED]:
        forward = replace(case, call=replace(case.call, differentiate=False))
        forward = replace(forward, expected=forward.run_eagerly())
        alone = _judge(forward, probe, result)
        found = found if alone else [Difference(What.REFUSED, f"{found[0].message}\nonly with its backward pass")]
    result.add(case.sample.index, case.variant, found)


def _note(activity: Activity, result: Result) -> None:
    # One example for each operator is enough, and there is one for each shape.
    examples = {each.partition(": ")[0]: each for each in [*activity.mismatches, *result.mismatches]}
    result.mismatches = sorted(examples.values())
    result.fallbacks = sorted({*result.fallbacks, *activity.fallbacks})
