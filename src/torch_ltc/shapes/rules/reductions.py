"""Reductions, scans and what chooses along a dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec
from torch_ltc.shapes.broadcasting import fits
from torch_ltc.shapes.table import contiguous, fresh, fresh_contiguous, overload, require, rule, rules, several, wrap

Dimensions = int | Sequence[int] | None
# The dtype of the result, given the operand and the argument `dtype`; raises NoRule for operands that it may not take.
Gives = Callable[[Spec, "torch.dtype | None"], torch.dtype]


def _summed(spec: Spec, dtype: torch.dtype | None) -> torch.dtype:
    require(not spec.dtype.is_complex)
    return dtype or (spec.dtype if spec.dtype.is_floating_point else torch.int64)


def _own(spec: Spec, dtype: torch.dtype | None) -> torch.dtype:
    require(spec.dtype.is_floating_point and dtype in (None, spec.dtype))
    return spec.dtype


def _extreme(spec: Spec, dtype: torch.dtype | None) -> torch.dtype:
    require(not spec.dtype.is_complex)
    return spec.dtype


def _place(spec: Spec, dtype: torch.dtype | None) -> torch.dtype:
    require(not spec.dtype.is_complex and spec.dtype is not torch.bool and spec.size)
    return torch.int64


def _truth(spec: Spec, dtype: torch.dtype | None) -> torch.dtype:
    require(spec.dtype is not torch.uint8)
    return torch.bool


_FAMILIES: tuple[tuple[str, Gives], ...] = (
    ("sum sum.dim_IntList prod prod.dim_int", _summed),
    ("mean mean.dim amax amin logsumexp var.correction std.correction linalg_vector_norm", _own),
    ("max min", _extreme),
    ("argmax argmin", _place),
    ("any all any.dim all.dim", _truth),
)


def reduced(spec: Spec, dimensions: Dimensions, keep: bool) -> tuple[int, ...]:
    """The size that is left; no dimensions given means all of them."""
    rank = len(spec.size)
    given = (dimensions,) if isinstance(dimensions, int) else dimensions
    if not given:
        return (1,) * rank if keep else ()
    if not rank:
        require(all(i in (0, -1) for i in given) and len(given) == 1)
        return ()
    chosen = {wrap(i, rank) for i in given}
    require(len(chosen) == len(given))
    if keep:
        return tuple([1 if i in chosen else n for i, n in enumerate(spec.size)])
    return tuple([n for i, n in enumerate(spec.size) if i not in chosen])


def _add_rule(name: str, gives: Gives) -> None:
    places = {argument.name: i for i, argument in enumerate(overload(name)._schema.arguments)}
    along, keep, dtype, order = (places.get(argument) for argument in ("dim", "keepdim", "dtype", "ord"))

    def reduction(*args: Any) -> Returns:
        spec: Spec = args[0]
        kind = gives(spec, None if dtype is None else args[dtype])
        require(order is None or fits(args[order], spec.dtype))
        if along is None:
            return fresh_contiguous(kind, ())
        require(spec.contiguous and (spec.size or kind is not torch.bool))
        return fresh_contiguous(kind, reduced(spec, args[along], keep is not None and args[keep]))

    rules.add(name, reduction)


for _names, _gives in _FAMILIES:
    for _name in _names.split():
        _add_rule(_name, _gives)


@rule("max.dim", "min.dim")
def extreme_and_place(spec: Spec, dimension: int, keep: bool) -> Returns:
    """The extreme along a dimension, and where it is."""
    require(not spec.dtype.is_complex and spec.contiguous and spec.size)
    size = reduced(spec, dimension, keep)
    return several(contiguous(spec.dtype, size), contiguous(torch.int64, size))


@rule("cumsum")
def running_total(spec: Spec, dimension: int, dtype: torch.dtype | None) -> Returns:
    """Sums up to each place."""
    require(spec.contiguous and spec.size and dtype is not torch.bool)
    wrap(dimension, len(spec.size))
    return fresh_contiguous(_summed(spec, dtype), spec.size)


@rule("topk")
def largest(spec: Spec, count: int, dimension: int, *options: bool) -> Returns:
    """The largest or smallest along a dimension, and where they are."""
    require(spec.contiguous and spec.size and not spec.dtype.is_complex and spec.dtype is not torch.bool)
    dimension = wrap(dimension, len(spec.size))
    require(0 < count <= spec.size[dimension])
    size = (*spec.size[:dimension], count, *spec.size[dimension + 1 :])
    return several(contiguous(spec.dtype, size), contiguous(torch.int64, size))


@rule("sort")
def in_order(spec: Spec, dimension: int, descending: bool) -> Returns:
    """The tensor sorted, and where everything was."""
    require(spec.contiguous and spec.size and not spec.dtype.is_complex)
    wrap(dimension, len(spec.size))
    return several(spec, contiguous(torch.int64, spec.size))


@rule("sort.stable")
def in_stable_order(spec: Spec, stable: bool | None, dimension: int, descending: bool) -> Returns:
    """The tensor sorted, and where everything was."""
    return in_order(spec, dimension, descending)


@rule("_softmax", "_log_softmax")
def softmax(spec: Spec, dimension: int, half_to_float: bool) -> Returns:
    """The same spec."""
    require(spec.dtype.is_floating_point and spec.contiguous and spec.size and not half_to_float)
    wrap(dimension, len(spec.size))
    return fresh(spec)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(gradient: Spec, output: Spec, dimension: int, dtype: torch.dtype) -> Returns:
    """The gradient of either."""
    require(gradient is output and dtype is gradient.dtype)
    return softmax(gradient, dimension, False)
