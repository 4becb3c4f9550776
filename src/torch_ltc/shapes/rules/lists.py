"""Operators on lists of tensors, of which optimizers are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Return, ReturnKind, Returns
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.shapes.broadcasting import fits, preserved
from torch_ltc.shapes.table import Rule, require, rules

Specs = Sequence[Spec]

_BINARY = "add sub mul div maximum minimum clamp_max clamp_min pow"
_UNARY = "sqrt neg exp abs reciprocal sign log"
_TERNARY = "addcmul addcdiv"
_OVERLOADS = ("Scalar", "List", "ScalarList", "Tensor")


def _check(targets: Specs, others: Sequence[Any]) -> None:
    """Floating tensors in lists of one length, equal sizes and dtypes side by side, and numbers that fit."""
    dtype = targets[0].dtype
    require(dtype.is_floating_point and all(target.dtype is dtype for target in targets))
    for other in others:
        if isinstance(other, Spec):
            require(not other.size and other.dtype is dtype)
        elif isinstance(other, (list, tuple)):
            require(len(other) == len(targets))
            for target, item in zip(targets, other, strict=True):
                if isinstance(item, Spec):
                    require(item.size == target.size and item.dtype is dtype)
                else:
                    require(fits(item, dtype))
        else:
            require(fits(other, dtype))


def _in_place(targets: Specs, *others: Any) -> Returns:
    require(targets)
    _check(targets, others)
    return ()


def _fresh(targets: Specs, *others: Any) -> Returns:
    require(targets)
    _check(targets, others)
    made = []
    for position, spec in enumerate(targets):
        require(all(_like(other, position, spec) for other in others))
        own = spec if spec.contiguous else make_spec(spec.dtype, spec.size, preserved(spec))
        made.append(Return(ReturnKind.FRESH, own, group=position))
    return (tuple(made),)


def _like(other: Any, position: int, spec: Spec) -> bool:
    """True when this operand beside `spec` does not change the layout of the result."""
    if not isinstance(other, (list, tuple)):
        return True
    item = other[position]
    return not isinstance(item, Spec) or item.stride == spec.stride


def _add(name: str, overloads: Sequence[str]) -> None:
    for overload in overloads:
        if (overload or "default") not in getattr(torch.ops.aten, f"_foreach_{name}").overloads():
            continue
        tail = f".{overload}" if overload else ""
        pairs: tuple[tuple[str, Rule], ...] = (
            (f"_foreach_{name}_{tail}", _in_place),
            (f"_foreach_{name}{tail}", _fresh),
        )
        for full_name, function in pairs:
            rules.add(full_name, function)


for _name in _UNARY.split():
    _add(_name, ("",))
for _name in _BINARY.split():
    _add(_name, _OVERLOADS)
for _name in _TERNARY.split():
    _add(_name, ("Scalar", "ScalarList"))
_add("lerp", ("Scalar", "List", "ScalarList"))


def _fused(targets: Specs, gradients: Specs, *rest: Any) -> Returns:
    """A step of an optimizer in one call; lists of state are as long as that of the parameters, or empty."""
    require(targets and len(gradients) == len(targets))
    dtype = targets[0].dtype
    require(dtype.is_floating_point)
    for target, gradient in zip(targets, gradients, strict=True):
        require(target.dtype is dtype and gradient.dtype is dtype and gradient.size == target.size)
    for state in rest:
        if isinstance(state, (list, tuple)):
            require(len(state) in (0, len(targets)))
        else:
            # A scale of the gradients, or a rate that is a tensor.
            require(not isinstance(state, Spec))
    return ()


for _name in ("sgd", "adam", "adamw", "adagrad"):
    rules.add(f"_fused_{_name}_", _fused)
