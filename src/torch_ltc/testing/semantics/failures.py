"""An error in the middle of a program: what does not depend on it is right, and the device goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.errors import ExecutionError
from torch_ltc.testing.semantics.table import Stage, case

GOOD, BAD = 1, 9
"""Places in a tensor of four elements."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Results of a program that looks something up, which fails when the place is past the end."""

    before: torch.Tensor
    found: torch.Tensor
    dependent: torch.Tensor
    after: torch.Tensor

    def error(self) -> Exception | None:
        """The error that reading what was found raises, if it does."""
        try:
            self.found.cpu()
        except Exception as error:
            return error
        return None


def _look_up(on: Stage, place: int) -> Lookup:
    x = on.ramp(4)
    before = x * 2
    found = x.gather(0, on.tensor([0, place], torch.int64))
    return Lookup(before, found, found + 1, (x + 1).sum())


@case(compiled=False)
def error_in_the_middle(on: Stage) -> Any:
    """A failing call raises an ExecutionError; what does not depend on it is right."""
    good = []
    for _ in range(2):
        good.append(_look_up(on, GOOD))
        on.sync()
    if not on.lazy:
        return [good[0].dependent, good[1].before, good[1].after]
    bad = _look_up(on, BAD)
    error = bad.error()
    on.claim(isinstance(error, ExecutionError), f"a failing lookup raised {error!r} instead of an ExecutionError")
    try:
        value = bad.dependent.tolist()
    except ExecutionError:
        value = None
    on.claim(value is None, f"a result of what failed could be read: {value}")
    return [good[0].dependent, bad.before, bad.after]


@case(compiled=False)
def error_and_writes(on: Stage) -> Any:
    """A write to an input happens once, also when a call before or after it fails."""
    weight = on.ramp(3)
    on.sync()
    for place in (GOOD, GOOD, BAD, GOOD):
        weight.mul_(2)
        lookup = _look_up(on, place if on.lazy else GOOD)
        weight.add_(1)
        error = lookup.error()
        on.claim((error is None) == (place == GOOD), f"a lookup at {place} of 4 raised {error!r}")
    return [weight, weight.sum()]


@case(compiled=False)
def usable_after_error(on: Stage) -> Any:
    """After an error the same program runs on good data, and so do others."""
    results: list[torch.Tensor] = []
    for place in (GOOD, GOOD, BAD, 2, 3):
        lookup = _look_up(on, place if on.lazy else min(place, 3))
        if place == BAD:
            error = lookup.error()
            on.claim(error is not None, f"a lookup at {place} of 4 did not fail")
        else:
            results += [lookup.before, lookup.found, lookup.dependent, lookup.after]
        on.sync()
    return [*results, on.ramp(3) * 5]


@case()
def error_of_the_caller(on: Stage) -> Any:
    """An error of the caller raises at the call, and what was recorded before it stays."""
    x = on.ramp(2, 3) * 2
    raised = False
    try:
        x @ x
    except RuntimeError:
        raised = True
    return [raised, x, x + 1]
