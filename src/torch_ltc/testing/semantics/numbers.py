"""Dtypes, promotion between them, and Python numbers that are handed in when a program runs."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.testing.semantics.table import Stage, case

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@case()
def floating_dtypes(on: Stage) -> Any:
    """Float32, float64, float16 and bfloat16."""
    results = []
    for dtype in FLOATS:
        x = on.ramp(2, 4, dtype=dtype)
        y = (x / 4 - 1).sigmoid() * x
        y.add_(x, alpha=0.5)
        results += [y, y.sum(1), y.to(torch.float32), x @ x.t(), torch.zeros_like(x)]
    return results


@case()
def integer_dtypes(on: Stage) -> Any:
    """Signed and unsigned integers, with eager's overflow, division and remainder."""
    results = []
    for dtype in INTEGERS:
        x = on.tensor([1, 5, 100, 127], dtype) + on.round
        results += [x + x, x * 3, x // 3, x % 7, x.sum(), x.float(), x.max(), x << 1, x & 6]
    signed = on.tensor([-7, -1, 0, 6], torch.int64)
    return [*results, signed // 2, signed % 4, torch.div(signed, 3, rounding_mode="trunc"), signed / 2, -signed]


@case()
def bool_dtype(on: Stage) -> Any:
    """Bool tensors: logic, counting, masks."""
    x = on.ramp(2, 3)
    mask = x > 2
    return [
        mask,
        ~mask,
        mask & (x < 4),
        mask.sum(),
        mask.any(1),
        torch.where(mask, x, -x),
        x.masked_fill(mask, 0.0),
        mask.float(),
        mask ^ (x == 3.5),
    ]


@case()
def complex_dtypes(on: Stage) -> Any:
    """Complex64 and complex128."""
    results = []
    for dtype, part in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        x = torch.complex(on.ramp(3, dtype=part), on.ramp(3, dtype=part) - 2).to(dtype)
        results += [x * x, x.abs(), x + 2j, x * (1 - 1j), x.conj() * x, x.real + x.imag, x.sum(), x.angle()]
    return results


@case()
def promotion(on: Stage) -> Any:
    """Operands of several dtypes are promoted as in eager."""
    whole, real = on.tensor([1, 2, 3], torch.int64), on.ramp(3)
    double, half = on.ramp(3, dtype=torch.float64), on.ramp(3, dtype=torch.float16)
    return [
        whole + 1,
        whole + 1.5,
        whole / 2,
        whole * True,
        real + whole,
        real + double,
        half + real,
        half * 2.5,
        real * double.sum(),
        (whole > 1) + whole,
        (whole > 1) * 2.0,
        real + 1j,
        torch.cat([whole.to(torch.int32), whole]),
        torch.where(whole > 1, whole, 0.5),
    ]


@case()
def numbers_change(on: Stage) -> Any:
    """Python numbers that change from run to run are not those of the first run."""
    x = on.tensor([0.25, 1.0, 2.5, 4.0])
    results = []
    for number in range(4):
        rate = 0.5 + number + on.round
        results += [
            x * rate,
            x + number,
            torch.add(x, x, alpha=rate),
            x.clamp(number, 2.75 + number),
            torch.addcmul(x, x, x, value=rate),
            torch.full((2,), rate, device=on.device),
            x.masked_fill(x > 1, rate),
        ]
        on.sync()
    return results


@case()
def numbers_change_in_place(on: Stage) -> Any:
    """Python numbers that change, in calls that write in place."""
    x = on.ramp(4)
    on.sync()
    seen = []
    for number in range(4):
        x.mul_(0.5 + number)
        x.add_(x, alpha=0.125 * number)
        x[1:3].fill_(number)
        on.sync()
        seen.append(x.clone())
    return seen


@case()
def number_types_change(on: Stage) -> Any:
    """The same call with an integer, a float and a bool in turn."""
    x = on.tensor([1, 2, 3], torch.int64)
    results = []
    for number in (2, 2.0, True, 3, 2.5, False):
        results += [x + number, x * number]
        on.sync()
    return results


@case()
def data_changes(on: Stage) -> Any:
    """Input data that changes from run to run is not that of the first run."""
    results = []
    for number in range(4):
        x = on.tensor([number, number + 1.0, -number])
        results.append(torch.softmax(x * 2, 0).cumsum(0) + torch.tensor(float(number)))
        on.sync()
    return results


@case()
def special_values(on: Stage) -> Any:
    """NaN, infinities, signed zeros, and what comparisons make of them."""
    x = on.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.0])
    return [
        x + 1,
        x * 0,
        1 / x,
        x.max(),
        x.isnan(),
        x == x,
        x.clamp(-2, 2),
        torch.copysign(torch.ones_like(x), x),
        x.nan_to_num(),
        x.sign(),
    ]


@case()
def number_on_cpu(on: Stage) -> Any:
    """A tensor without dimensions on the CPU as an operand."""
    x = on.ramp(3)
    results = []
    for number in range(3):
        results += [x * torch.tensor(number + 0.5), torch.tensor(2, dtype=torch.int64) + x]
        on.sync()
    return results
