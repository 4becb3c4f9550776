"""Memory that tensors share or do not share, and writes to the inputs of a program."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.testing.placement import storage_key
from torch_ltc.testing.semantics.table import Stage, case


@case()
def results_that_share(on: Stage) -> Any:
    """Two results that share memory still do after the program."""
    base = on.ramp(4, 3) * 2
    left, right = base[:3], base[1:]
    del base
    on.sync()
    left.add_(100)
    return [left, right]


@case()
def input_returned(on: Stage) -> Any:
    """An input that is returned is the input."""
    x = on.ramp(2, 3)
    same = x.contiguous().reshape(2, 3).to(torch.float32)
    result = same * 2
    on.sync()
    same.add_(1)
    return [x, same, result]


@case()
def same_tensor_twice(on: Stage) -> Any:
    """One tensor given twice to one call."""
    x = on.ramp(3, 3)
    results = [x + x, x @ x, torch.addmm(x, x, x), torch.cat([x, x])]
    x.mul_(x)
    x.t().add_(x.t())
    return [*results, x]


@case()
def inputs_that_share(on: Stage) -> Any:
    """Two inputs of one program that share memory."""
    x = on.ramp(4, 4)
    on.sync()
    part = x[1:3]
    x.mul_(2)
    between = part + 1
    part.sub_(1)
    return [x, part, between, x.sum()]


@case()
def input_written(on: Stage) -> Any:
    """An input written in place keeps its memory, and everyone who holds it sees the new value."""
    x = on.ramp(3, 4)
    view = x[1:]
    on.sync()
    identity = storage_key(x)
    for number in range(3):
        x.mul_(number + 1.5)
        x.add_(1)
        on.sync()
    on.claim(storage_key(x) == identity, "a tensor that was written in place has other memory")
    return [x, view, view.sum()]


@case()
def no_results(on: Stage) -> Any:
    """A program whose results nobody holds still writes to its inputs."""
    x, y = on.ramp(5), on.ramp(5)
    on.sync()
    x.add_(y)
    x.exp().sum()
    y.zero_()
    on.sync()
    return [x, y]


@case()
def equal_results(on: Stage) -> Any:
    """Results that are equal are tensors of their own: a later write to one is not seen in the other."""
    x = on.ramp(4)
    left, right = x * 2, x * 2
    zeros, other_zeros = torch.zeros(3, device=on.device), torch.zeros(3, device=on.device)
    on.sync()
    left.add_(1)
    zeros.add_(5)
    on.sync()
    return [left, right, zeros, other_zeros]


@case()
def copies_of_inputs(on: Stage) -> Any:
    """A copy of an input is a copy: a later write to the input is not seen in it."""
    x = on.ramp(4)
    copies = [x.clone(), x + 0, x * 1, x.reshape(2, 2).clone(), torch.cat([x])]
    on.sync()
    x.fill_(-3)
    on.sync()
    return [*copies, x]


@case()
def fresh_constants(on: Stage) -> Any:
    """A constant that a program makes is fresh in every run, although an earlier run's was written to."""
    results = []
    for _ in range(4):
        ones = torch.ones(3, device=on.device)
        numbers = torch.arange(3.0, device=on.device)
        on.sync()
        ones.mul_(7)
        numbers.sub_(1)
        on.sync()
        results.append([ones, numbers])
    return results


@case()
def earlier_results(on: Stage) -> Any:
    """Results of earlier runs keep their values when the same program runs again."""
    x = on.ramp(4)
    results = []
    for number in range(4):
        results.append([x * 3 + number, (x - number).sum()])
        on.sync()
    return results


@case()
def swapped_inputs(on: Stage) -> Any:
    """A program that swaps two inputs, and one that copies one into the other."""
    x, y = on.ramp(3), on.ramp(3) * -1
    on.sync()
    for _ in range(3):
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)
        on.sync()
    z = x.clone()
    z.copy_(y).add_(x)
    return [x, y, z]


@case()
def parameter_update(on: Stage) -> Any:
    """A parameter updated in place is seen through views that were made before, from program to program."""
    weight = torch.nn.Parameter(on.ramp(3, 2))
    view = weight.detach()[1]
    on.sync()
    seen = []
    for number in range(3):
        (weight * (number + 1)).sum().backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None
        on.sync()
        seen.append(view.clone())
    return [weight.detach(), view, seen]
