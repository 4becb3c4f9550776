"""Reductions, scans and what chooses along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec
from torch_ltc.shapes.broadcasting import fits
from torch_ltc.shapes.table import (
    Rule,
    contiguous,
    fresh,
    fresh_contiguous,
    require,
    rule,
    rules,
    several,
    wrap,
)

Dimensions = int | Sequence[int] | None


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


def _summed(spec: Spec, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.int64 if not spec.dtype.is_floating_point and not spec.dtype.is_complex else spec.dtype


@rule("sum", "prod")
def total(spec: Spec, dtype: torch.dtype | None) -> Returns:
    """Everything added up."""
    require(not spec.dtype.is_complex)
    return fresh_contiguous(_summed(spec, dtype), ())


@rule("sum.dim_IntList", "prod.dim_int")
def total_along(spec: Spec, dimensions: Dimensions, keep: bool, dtype: torch.dtype | None) -> Returns:
    """Dimensions added up."""
    require(spec.contiguous and not spec.dtype.is_complex)
    return fresh_contiguous(_summed(spec, dtype), reduced(spec, dimensions, keep))


@rule("mean")
def mean(spec: Spec, dtype: torch.dtype | None) -> Returns:
    """The mean of everything."""
    require(spec.dtype.is_floating_point and dtype in (None, spec.dtype))
    return fresh_contiguous(spec.dtype, ())


@rule("mean.dim")
def mean_along(spec: Spec, dimensions: Dimensions, keep: bool, dtype: torch.dtype | None) -> Returns:
    """The mean along dimensions."""
    require(spec.dtype.is_floating_point and dtype in (None, spec.dtype) and spec.contiguous)
    return fresh_contiguous(spec.dtype, reduced(spec, dimensions, keep))


@rule("amax", "amin", "logsumexp")
def extreme_along(spec: Spec, dimensions: Dimensions, keep: bool) -> Returns:
    """The extreme along dimensions."""
    require(spec.dtype.is_floating_point and spec.contiguous)
    return fresh_contiguous(spec.dtype, reduced(spec, dimensions, keep))


@rule("max", "min")
def extreme(spec: Spec) -> Returns:
    """The extreme of everything."""
    require(not spec.dtype.is_complex)
    return fresh_contiguous(spec.dtype, ())


@rule("max.dim", "min.dim")
def extreme_and_place(spec: Spec, dimension: int, keep: bool) -> Returns:
    """The extreme along a dimension, and where it is."""
    require(not spec.dtype.is_complex and spec.contiguous and spec.size)
    size = reduced(spec, dimension, keep)
    return several(contiguous(spec.dtype, size), contiguous(torch.int64, size))


@rule("argmax", "argmin")
def place_of_extreme(spec: Spec, dimension: int | None, keep: bool) -> Returns:
    """Where the extreme is."""
    require(not spec.dtype.is_complex and spec.dtype is not torch.bool and spec.contiguous and spec.size)
    return fresh_contiguous(torch.int64, reduced(spec, dimension, keep))


@rule("any", "all")
def truth(spec: Spec) -> Returns:
    """One truth value."""
    require(spec.dtype is not torch.uint8)
    return fresh_contiguous(torch.bool, ())


@rule("any.dim", "all.dim")
def truth_along(spec: Spec, dimension: int, keep: bool) -> Returns:
    """Truth values along a dimension."""
    require(spec.dtype is not torch.uint8 and spec.contiguous and spec.size)
    return fresh_contiguous(torch.bool, reduced(spec, dimension, keep))


@rule("var.correction", "std.correction")
def variance(spec: Spec, dimensions: Dimensions, correction: Any, keep: bool) -> Returns:
    """The variance along dimensions."""
    require(spec.dtype.is_floating_point and spec.contiguous and spec.size)
    return fresh_contiguous(spec.dtype, reduced(spec, dimensions, keep))


@rule("linalg_vector_norm")
def vector_norm(spec: Spec, order: Any, dimensions: Dimensions, keep: bool, dtype: torch.dtype | None) -> Returns:
    """The norm along dimensions."""
    require(spec.dtype.is_floating_point and spec.contiguous and dtype is None and fits(order, spec.dtype))
    return fresh_contiguous(spec.dtype, reduced(spec, dimensions, keep))


@rule("cumsum")
def running_total(spec: Spec, dimension: int, dtype: torch.dtype | None) -> Returns:
    """Sums up to each place."""
    require(spec.contiguous and spec.size and not spec.dtype.is_complex)
    wrap(dimension, len(spec.size))
    return fresh_contiguous(_summed(spec, dtype), spec.size)


@rule("topk")
def largest(spec: Spec, count: int, dimension: int, largest_first: bool, in_order: bool) -> Returns:
    """The largest or smallest along a dimension, and where they are."""
    require(spec.contiguous and spec.size and not spec.dtype.is_complex and spec.dtype is not torch.bool)
    dimension = wrap(dimension, len(spec.size))
    require(0 < count <= spec.size[dimension])
    size = (*spec.size[:dimension], count, *spec.size[dimension + 1 :])
    return several(contiguous(spec.dtype, size), contiguous(torch.int64, size))


def _sorted(spec: Spec, dimension: int) -> Returns:
    require(spec.contiguous and spec.size and not spec.dtype.is_complex)
    wrap(dimension, len(spec.size))
    return several(spec, contiguous(torch.int64, spec.size))


@rule("sort")
def in_order(spec: Spec, dimension: int, descending: bool) -> Returns:
    """The tensor sorted, and where everything was."""
    return _sorted(spec, dimension)


@rule("sort.stable")
def in_stable_order(spec: Spec, stable: bool | None, dimension: int, descending: bool) -> Returns:
    """The tensor sorted, and where everything was."""
    return _sorted(spec, dimension)


def _softmax() -> Rule:
    def softmax(spec: Spec, dimension: int, half_to_float: bool) -> Returns:
        require(spec.dtype.is_floating_point and spec.contiguous and spec.size and not half_to_float)
        wrap(dimension, len(spec.size))
        return fresh(spec)

    return softmax


rules.add("_softmax", _softmax())
rules.add("_log_softmax", _softmax())


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(gradient: Spec, output: Spec, dimension: int, dtype: torch.dtype) -> Returns:
    """The gradient of either."""
    require(gradient is output and gradient.contiguous and gradient.size)
    require(gradient.dtype is dtype and dtype.is_floating_point)
    wrap(dimension, len(gradient.size))
    return fresh(gradient)
