"""Sizes and strides: empty tensors, tensors without dimensions, unusual layouts, several results, large programs."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.testing.semantics.table import Stage, case

LONG = 5_000
"""Calls of the long program."""


@case()
def empty_tensors(on: Stage) -> Any:
    """Tensors without elements as inputs, results and operands."""
    x = on.tensor([]).reshape(0, 3)
    weight = on.ramp(3, 2)
    return [
        x + 1,
        x @ weight,
        x.sum(),
        x.sum(0),
        torch.cat([x, on.ramp(2, 3)]),
        x.t() @ x,
        weight[:0] * 2,
        torch.empty(0, device=on.device),
    ]


@case()
def zero_dimensions(on: Stage) -> Any:
    """Tensors without dimensions as inputs and results."""
    x, weight = on.tensor(2.5), on.ramp(3)
    total = (weight * x).sum()
    x.mul_(2)
    return [x, total, total * weight, total.reshape(1), weight[1], weight[1] + 1, x.expand(2, 2)]


@case()
def unusual_inputs(on: Stage) -> Any:
    """Inputs that are transposed, sliced with a step, or start within their memory."""
    base = on.ramp(6, 8)
    on.sync()
    transposed, stepped, inner = base.t(), base[::2, 1::3], base[2:5, 3:7]
    return [transposed * 2, stepped + 1, inner.sum(0), transposed @ base, stepped.exp().sum(), inner.contiguous()]


@case()
def expanded_inputs(on: Stage) -> Any:
    """Expanded inputs, whose elements share memory."""
    row = on.ramp(1, 4).expand(3, 4)
    on.sync()
    return [row + 1, row.sum(0), row @ row.t(), row.contiguous(), row.clone(), row.reshape(-1)]


@case()
def result_strides(on: Stage) -> Any:
    """Results lie in memory as in eager."""
    x, y = on.ramp(2, 3, 4), on.ramp(4, 3, 2)
    transposed = x.permute(2, 1, 0)
    return [
        transposed.relu(),
        transposed + y,
        transposed * transposed,
        (x.transpose(0, 1) + 1).reshape(-1, 4).t().exp(),
        transposed.contiguous() - 1,
        torch.empty_like(transposed).zero_(),
        x.sum(1, keepdim=True),
        torch.stack([x, x], 1),
        x.transpose(1, 2).reshape(8, 3),
        torch.einsum("abc,dc->adb", x, on.ramp(5, 4)),
    ]


@case(tolerance=(1e-4, 1e-4))
def channels_last(on: Stage) -> Any:
    """Channels_last stays channels_last."""
    x = (on.ramp(2, 3, 5, 5) * 0.01).to(memory_format=torch.channels_last)
    weight = on.ramp(4, 3, 3, 3) * 0.01
    hidden = torch.nn.functional.conv2d(x, weight, padding=1).relu()
    return [x, hidden, torch.nn.functional.max_pool2d(hidden, 2), hidden + x.sum()]


@case(tolerance=(1e-5, 1e-5))
def several_results(on: Stage) -> Any:
    """Calls with several results."""
    x = on.tensor([[3.0, -1.0, 2.0, 5.0], [0.0, 4.0, -2.0, 1.0]]) + on.round
    values, places = x.max(1)
    return [
        values,
        places,
        *torch.sort(x, 1),
        *torch.topk(x, 2, 1),
        *torch.var_mean(x, 1),
        *torch.native_layer_norm(x, [4], None, None, 1e-5),
        *torch.aminmax(x),
    ]


@case()
def unused_results(on: Stage) -> Any:
    """Of a call with several results only some are used."""
    x = on.ramp(3, 4)
    return [x.max(1).indices, torch.sort(x, 1, descending=True).values, x.split(2, 1)[1], x.unbind(0)[2]]


@case()
def numbers_read(on: Stage) -> Any:
    """Numbers read from results: item, bool, len, tolist."""
    x = on.ramp(2, 3)
    return [x.sum().item(), int(x.argmax()), bool((x > 1).all()), (x * 2).tolist(), len(x), float(x[1, 1])]


@case()
def sizes_change(on: Stage) -> Any:
    """The same code with another size is right, and the first size is right again."""
    results = []
    for size in (3, 5, 3, 1, 5):
        x = on.ramp(size, 2)
        results.append((x @ x.t()).sum(0) + size)
        on.sync()
    return results


@case()
def held_results_change(on: Stage) -> Any:
    """Other results are held of the same calls."""
    kept = []
    for number in range(4):
        x = on.ramp(4)
        left, right = x * 2 + number, x.exp() - number
        if number % 2:
            del left
            kept.append(right)
        else:
            kept.append(left)
        on.sync()
    return kept


@case(slow=True, tolerance=(1e-4, 1e-4))
def long_program(on: Stage) -> Any:
    """A program of 5,000 calls."""
    x = on.ramp(8)
    y = x
    for number in range(LONG // 2):
        y = y * 0.5
        y = y + x if number % 3 else y.flip(0)
    return y


@case()
def short_programs(on: Stage) -> Any:
    """A program of a single call, and one of none."""
    on.sync()
    x = on.ramp(3)
    on.sync()
    y = -x
    on.sync()
    on.sync()
    return [x, y]
