"""Running one semantics case on eager and on the device, and judging it.

Owns the number of rounds and the comparison after each. Importing it fills the table.
"""

from __future__ import annotations

import time

import torch

from torch_ltc.errors import CompileError
from torch_ltc.testing.compare import Rules, differences
from torch_ltc.testing.outcome import Outcome, describe, first_line, observed
from torch_ltc.testing.placement import distinct, tensors_in
from torch_ltc.testing.probe import Probe
from torch_ltc.testing.records import CaseUnit, Difference, Result, What
from torch_ltc.testing.semantics import (  # noqa: F401 (each adds its cases to the table)
    aliasing,
    failures,
    numbers,
    random_numbers,
    reentrance,
    shapes,
    training,
    views,
)
from torch_ltc.testing.semantics.table import Case, SpecError, Stage, table

ROUNDS = 3
"""Enough that a program is compiled at its second execution and then runs once more."""
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def run_case(unit: CaseUnit, probe: Probe) -> Result:
    """Runs a case in rounds, until one of them differs."""
    case = table.get(unit.case)
    result = Result(unit)
    started_s = time.perf_counter()
    found: list[Difference] = []
    for number in range(ROUNDS):
        try:
            found = _round(case, number, probe, result)
        except Exception as error:
            found = [Difference(What.HARNESS, f"the case failed on the CPU: {describe(error)}")]
        if found:
            break
    probe.settle()
    result.add(None, None, found)
    result.duration_s = time.perf_counter() - started_s
    return result


def _round(case: Case, number: int, probe: Probe, result: Result) -> list[Difference]:
    probe.settle()
    expected = _observed(case, Stage(probe.eager, number, probe.spec))
    probe.take()
    stage = Stage(probe.device, number, probe.spec)
    try:
        actual = _observed(case, stage)
    except SpecError as error:
        return [Difference(What.CLAIM, f"{error}\nin round {number + 1} of {ROUNDS}")]
    except CompileError as error:
        return [Difference(What.REFUSED, first_line(str(error)))]
    except Exception as error:
        return [Difference(What.RAISES, f"{describe(error)}\nin round {number + 1} of {ROUNDS}")]
    found = differences(expected, actual, _rules(case, probe)) or probe.wait()
    found = [Difference(each.what, f"{each.message}\nin round {number + 1} of {ROUNDS}") for each in found]
    activity = probe.take()
    if number == ROUNDS - 1 and not found:
        found = probe.not_taken(activity) if case.compiled else []
        result.taken_cases += probe.backend in activity.executed_by and not found
    return found


def _observed(case: Case, stage: Stage) -> Outcome:
    """The values of the case, read; tensors that share memory are known by the first of them."""
    torch.manual_seed(stage.round)
    given = case.function(stage)
    return Outcome(result=observed(given, distinct(tensors_in(given))))


def _rules(case: Case, probe: Probe) -> Rules:
    tolerances = dict(probe.spec.tolerances)
    if case.tolerance is not None:
        tolerances |= dict.fromkeys(FLOATING, case.tolerance)
    return Rules(
        exact=probe.spec.exact_values,
        device=probe.device,
        uninitialized=not probe.spec.computes,
        tolerances=tolerances,
    )
