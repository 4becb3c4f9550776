"""Copies, and tensors made of nothing."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.shapes.broadcasting import fits
from torch_ltc.shapes.rules.meta_kernels import copied
from torch_ltc.shapes.table import contiguous, fresh, fresh_contiguous, overload, require, rule, rules

_FACTORIES = "zeros ones full scalar_tensor empty.memory_format empty_strided new_zeros new_ones new_empty"
_KINDS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64}
_LIMITS = (float("inf"), float("-inf"))


@rule("clone")
def clone(spec: Spec, memory_format: torch.memory_format | None, dtype: torch.dtype | None = None) -> Returns:
    """A copy, of another dtype if one is given."""
    kept = dtype or spec.dtype
    require(not kept.is_complex and not spec.dtype.is_complex)
    if memory_format is torch.contiguous_format:
        return fresh(contiguous(kept, spec.size))
    require(memory_format in (None, torch.preserve_format))
    return fresh(copied(spec, kept))


@rule("_to_copy", "zeros_like", "ones_like", "empty_like")
def like(spec: Spec, dtype: torch.dtype | None, layout: torch.layout | None, *rest: Any) -> Returns:
    """A new tensor in the layout of another."""
    require(layout in (None, torch.strided))
    return clone(spec, rest[-1], dtype)


@rule("full_like")
def full_like(spec: Spec, value: Any, *options: Any) -> Returns:
    """A new tensor in the layout of another, filled with a number."""
    require(fits(value, options[0] or spec.dtype))
    return like(spec, *options)


def _add_factory(name: str) -> None:
    places = {argument.name: i for i, argument in enumerate(overload(name)._schema.arguments)}
    size, stride, value, like = (places.get(named) for named in ("size", "stride", "fill_value", "self"))
    value = places.get("s", value)
    last = places.get("memory_format")

    def factory(*args: Any) -> Returns:
        dtype: torch.dtype | None = args[places["dtype"]]
        require(args[places["layout"]] in (None, torch.strided))
        require(last is None or args[last] in (None, torch.contiguous_format))
        if dtype is None and like is not None:
            dtype = args[like].dtype
        if dtype is None and name == "full":
            dtype = _KINDS.get(type(args[1]))
        dtype = dtype or torch.get_default_dtype()
        if value is not None:
            require(fits(args[value], dtype) or (dtype.is_floating_point and args[value] in _LIMITS))
        if size is None:
            return fresh_contiguous(dtype, ())
        require(min(args[size], default=0) >= 0)
        if stride is None:
            return fresh_contiguous(dtype, args[size])
        require(len(args[size]) == len(args[stride]) and min((*args[stride], 0)) >= 0)
        return fresh(make_spec(dtype, tuple(args[size]), tuple(args[stride])))

    rules.add(name, factory)


for _name in _FACTORIES.split():
    _add_factory(_name)
