"""Views, and writes through them."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.testing.semantics.table import Stage, case


@case()
def view_chain(on: Stage) -> Any:
    """Views of views have eager's values, strides and offsets."""
    x = on.ramp(4, 6) * 2
    narrowed = x.t()[1:5]
    return [x, narrowed, narrowed[:, ::2], x.view(2, 12).select(1, 3), x.unfold(1, 3, 2), x.diagonal(1)]


@case()
def write_through_view(on: Stage) -> Any:
    """A write through a view is seen in its base and in its other views."""
    x = on.ramp(3, 4) + 1
    row, column = x[1], x[:, 2]
    row.mul_(10)
    column.sub_(3)
    return [x, row, column, x.sum(1)]


@case()
def write_to_base(on: Stage) -> Any:
    """A write to the base is seen in views made before it."""
    x = on.ramp(3, 4) + 1
    view = x.t()[1:]
    x.neg_()
    return [view, view * 2, x]


@case()
def overlapping_views(on: Stage) -> Any:
    """Writes through views that overlap happen in order."""
    x = on.ramp(6) * 1
    left, right = x[:4], x[2:]
    left.add_(1)
    right.mul_(2)
    left.sub_(right.clone())
    return [x, left, right]


@case()
def value_before_write(on: Stage) -> Any:
    """A value taken before a write keeps the old value."""
    x = on.ramp(3, 3) * 1
    before = x + 0
    doubled = x * 2
    x[0].fill_(7)
    return [before, doubled, x, x * 2]


@case()
def assignment(on: Stage) -> Any:
    """Copy_, index assignment and fill_ through views."""
    x = on.ramp(4, 4) * 1
    x[1:3, 1:3] = on.tensor([[1.0, 2.0], [3.0, 4.0]])
    x[0] = 5.0
    x[:, 3].copy_(x[:, 0])
    x.t()[2].fill_(-1)
    return x


@case()
def reinterpreted(on: Stage) -> Any:
    """The same memory seen with another dtype, as real and imaginary parts, and with free strides."""
    x = on.ramp(4, 2) * 1
    numbers = torch.view_as_complex(x)
    numbers.mul_(2j)
    windows = x.as_strided((3, 3), (2, 1), 1)
    return [x, numbers, torch.view_as_real(numbers)[:, 1], windows, x.view(torch.int32)]


@case()
def view_of_input(on: Stage) -> Any:
    """A view of an input is a view of it, also after the program."""
    x = on.ramp(3, 4)
    view = x.t()[1]
    result = view + 1
    on.sync()
    view.mul_(3)
    return [x, view, result]


@case()
def conjugate_views(on: Stage) -> Any:
    """Conjugate and negative views, lazy ones included."""
    x = torch.view_as_complex(on.ramp(3, 2)) * 1
    return [x.conj(), x.conj() * x, x.imag, x.conj().imag, x.conj().resolve_conj()]


@case()
def lists_of_views(on: Stage) -> Any:
    """Split, unbind, chunk and tensor_split give views, and writes to them reach the base."""
    x = on.ramp(6, 4) * 1
    parts = x.split(2)
    columns = x.unbind(1)
    parts[1].mul_(-1)
    columns[0].add_(100)
    return [x, list(parts), list(columns), list(x.chunk(4, 1)), list(x.tensor_split((1, 4)))]
