"""Numbers that the dtype of a call cannot hold.

PyTorch's kernels raise for some of them, saturate others and wrap the rest, which also depends on the version of
PyTorch. A functional program, in which such a number is cast before it is used, knows nothing of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from torch_ltc.lowering.functionalize import scalar_slots
from torch_ltc.program.instruction import Call, Program, Scalar
from torch_ltc.pytorch.private import OpOverload

# Operators whose kernels convert a number to the dtype of the tensor, and check it on the way. In other arithmetic and
# comparisons the number wraps, or the result has a wider dtype.
_FILLING = ("fill", "full", "full_like", "new_full", "scalar_tensor", "masked_fill", "index_fill")
_CHOOSING = ("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "scatter", "index_put")
_PADDING = ("constant_pad_nd", "fill_diagonal")
_SCALING = ("lerp", "pow", "addcmul", "addcdiv", "addmm", "addmv", "addr", "addbmm", "baddbmm")
_CONVERTING = frozenset((*_FILLING, *_CHOOSING, *_PADDING, *_SCALING))
# Here it is the factor `alpha` that is converted, not the other operand.
_WITH_FACTOR = frozenset(("add", "sub", "rsub"))


class NumberRange(NamedTuple):
    """The finite values that the number in a slot may have."""

    slot: int
    low: float
    high: float
    # An infinity fits.
    infinite: bool
    # NaN fits.
    nan: bool

    def holds(self, number: object) -> bool:
        """True when the number can be converted without a loss of more than digits."""
        if not isinstance(number, (int, float)):
            return True
        if number != number:
            return self.nan
        return self.low <= number <= self.high or (self.infinite and math.isinf(number))


def number_ranges(program: Program) -> tuple[NumberRange, ...]:
    """The ranges of the run-time numbers of a recorded program."""
    specs = program.specs()
    found: dict[NumberRange, None] = {}
    for call in program.calls:
        slots = _slots(call)
        for number in _converted(call) if slots else ():
            spec = specs.get(number)
            if spec is not None and not (spec.dtype.is_complex or spec.dtype is torch.bool):
                found.update((_range(call, slot, spec.dtype), None) for slot in slots)
    return tuple(found)


def all_hold(ranges: Sequence[NumberRange], numbers: Sequence[object]) -> bool:
    """True when every number is in its ranges."""
    return all(item.holds(numbers[item.slot]) for item in ranges)


@cache
def _plain_name(op: OpOverload) -> str:
    return op._schema.name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")


def _slots(call: Call) -> list[int]:
    """The slots of the numbers that the call converts."""
    name = _plain_name(call.op)
    if name in _WITH_FACTOR:
        factor = call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else None)
        return [factor.slot] if isinstance(factor, Scalar) else []
    return scalar_slots(call) if name in _CONVERTING else []


def _converted(call: Call) -> Iterator[int]:
    """The values whose dtype a number is converted to: the results, and what is written to."""
    yield from (number for number in call.numbers if number >= 0)
    yield from call.mutated


def _range(call: Call, slot: int, dtype: torch.dtype) -> NumberRange:
    if dtype.is_floating_point:
        # As a bound, NaN makes everything NaN, or is none: PyTorch changed its mind.
        nan = _plain_name(call.op) != "clamp"
        return NumberRange(slot, torch.finfo(dtype).min, torch.finfo(dtype).max, True, nan)
    # Integers have no negative powers.
    low = 0 if _plain_name(call.op) == "pow" else torch.iinfo(dtype).min
    return NumberRange(slot, low, torch.iinfo(dtype).max, False, False)
