"""Operators on lists of tensors, of which optimizers are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Return, ReturnKind, Returns
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.shapes.broadcasting import elementwise_strides, fits
from torch_ltc.shapes.table import require, rule, rules

Specs = Sequence[Spec]

_NAMES = (
    "sqrt neg exp abs reciprocal sign log add sub mul div maximum minimum clamp_max clamp_min pow addcmul addcdiv lerp"
)
# Not the values of addcmul and addcdiv as one tensor, which the device reads.
_ALSO_TENSOR = ("add", "mul", "div")


def _check(targets: Specs, others: Sequence[Any]) -> None:
    """Floating tensors in lists of one length, equal sizes and dtypes side by side, and numbers that fit."""
    require(targets)
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
                    require(_is_taken(item, dtype))
        else:
            require(_is_taken(other, dtype))


def _is_taken(number: object, dtype: torch.dtype) -> bool:
    """True for a number that every operator takes; some refuse bools."""
    return not isinstance(number, bool) and fits(number, dtype)


def _in_place(targets: Specs, *others: Any) -> Returns:
    _check(targets, others)
    return ()


def _fresh(targets: Specs, *others: Any) -> Returns:
    _check(targets, others)
    lists = [other for other in others if isinstance(other, (list, tuple)) and isinstance(other[0], Spec)]
    made = []
    for position, spec in enumerate(targets):
        strides = elementwise_strides(spec.size, (spec, *(other[position] for other in lists)))
        made.append(Return(ReturnKind.FRESH, make_spec(spec.dtype, spec.size, strides), group=position))
    return (tuple(made),)


def _add(name: str) -> None:
    for packet, function in ((f"_foreach_{name}", _fresh), (f"_foreach_{name}_", _in_place)):
        for tail in getattr(torch.ops.aten, packet).overloads():
            if tail in ("default", "Scalar", "List", "ScalarList") or (tail == "Tensor" and name in _ALSO_TENSOR):
                rules.add(packet if tail == "default" else f"{packet}.{tail}", function)


for _name in _NAMES.split():
    _add(_name)


@rule("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
def fused(targets: Specs, gradients: Specs, *rest: Any) -> Returns:
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
