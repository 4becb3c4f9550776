"""Copies, and tensors made of nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.shapes.broadcasting import fits, preserved
from torch_ltc.shapes.table import contiguous, fresh, fresh_contiguous, require, rule

Sizes = Sequence[int]


def _strided(layout: torch.layout | None) -> None:
    require(layout in (None, torch.strided))


def _copied(spec: Spec, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> Spec:
    kept = spec.dtype if dtype is None else dtype
    require(not kept.is_complex and not spec.dtype.is_complex)
    if memory_format is torch.contiguous_format:
        return contiguous(kept, spec.size)
    require(memory_format in (None, torch.preserve_format))
    return make_spec(kept, spec.size, preserved(spec))


@rule("clone")
def clone(spec: Spec, memory_format: torch.memory_format | None) -> Returns:
    """A copy."""
    return fresh(_copied(spec, None, memory_format))


@rule("_to_copy")
def to_copy(
    spec: Spec,
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: Any,
    pin_memory: bool | None,
    non_blocking: bool,
    memory_format: torch.memory_format | None,
) -> Returns:
    """A copy of another dtype."""
    _strided(layout)
    return fresh(_copied(spec, dtype, memory_format))


@rule("zeros_like", "ones_like", "empty_like")
def like(
    spec: Spec,
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: Any,
    pin_memory: bool | None,
    memory_format: torch.memory_format | None,
) -> Returns:
    """A new tensor in the layout of another."""
    _strided(layout)
    return fresh(_copied(spec, dtype, memory_format))


@rule("full_like")
def full_like(spec: Spec, value: Any, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any) -> Returns:
    """A new tensor in the layout of another, filled with a number."""
    require(fits(value, spec.dtype if dtype is None else dtype))
    return like(spec, dtype, layout, *rest)  # type: ignore[return-value]


def _made(size: Sizes, dtype: torch.dtype | None, layout: torch.layout | None) -> Returns:
    _strided(layout)
    require(min(size, default=1) > 0)
    return fresh_contiguous(torch.get_default_dtype() if dtype is None else dtype, size)


@rule("zeros", "ones", "empty.memory_format")
def made(
    size: Sizes,
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: Any,
    pin_memory: bool | None,
    memory_format: torch.memory_format | None = None,
) -> Returns:
    """A new row-major tensor."""
    require(memory_format in (None, torch.contiguous_format))
    return _made(size, dtype, layout)


@rule("new_zeros", "new_ones", "new_empty")
def new(spec: Spec, size: Sizes, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any) -> Returns:
    """A new row-major tensor of the dtype of another."""
    return _made(size, spec.dtype if dtype is None else dtype, layout)


@rule("full")
def full(size: Sizes, value: Any, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any) -> Returns:
    """A new row-major tensor filled with a number."""
    kept = _dtype_of(value) if dtype is None else dtype
    require(fits(value, kept) or (kept.is_floating_point and value in (float("inf"), float("-inf"))))
    return _made(size, kept, layout)


@rule("scalar_tensor")
def scalar_tensor(value: Any, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any) -> Returns:
    """A number as a tensor."""
    kept = torch.get_default_dtype() if dtype is None else dtype
    require(fits(value, kept))
    return _made((), kept, layout)


def _dtype_of(value: Any) -> torch.dtype:
    kinds: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    found = kinds.get(type(value))
    require(found is not None)
    assert found is not None
    return found


@rule("empty_strided")
def empty_strided(
    size: Sizes, stride: Sizes, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any
) -> Returns:
    """A new tensor of the geometry that is asked for."""
    _strided(layout)
    require(len(size) == len(stride) and min((*size, 1)) > 0 and min((*stride, 0)) >= 0)
    kept = torch.get_default_dtype() if dtype is None else dtype
    return fresh(make_spec(kept, tuple(size), tuple(stride)))


def _counted(start: Any, end: Any, step: Any, dtype: torch.dtype | None, layout: torch.layout | None) -> Returns:
    require(type(start) is int and type(end) is int and type(step) is int and step != 0)
    kept = torch.int64 if dtype is None else dtype
    require(kept is torch.int64)
    return _made((len(range(start, end, step)),), kept, layout)


@rule("arange")
def arange(end: Any, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any) -> Returns:
    """Whole numbers in order."""
    return _counted(0, end, 1, dtype, layout)


@rule("arange.start")
def arange_start(start: Any, end: Any, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any) -> Returns:
    """Whole numbers in order."""
    return _counted(start, end, 1, dtype, layout)


@rule("arange.start_step")
def arange_step(
    start: Any, end: Any, step: Any, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any
) -> Returns:
    """Whole numbers in order."""
    return _counted(start, end, step, dtype, layout)
