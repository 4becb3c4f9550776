"""Decomposition tables for functional programs: PyTorch's own, and what PyTorch has none for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from torch_ltc.program.composite_gradients import FORMULAS

aten = torch.ops.aten
Table = Mapping[OpOverload, Callable[..., Any]]


def one_by_one(op: OpOverload) -> Callable[..., Any]:
    """A call on lists of tensors as calls on their elements: PyTorch's own slow form."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)

    return run


def _list_operators() -> dict[OpOverload, Callable[..., Any]]:
    found: dict[OpOverload, Callable[..., Any]] = {}
    for name in dir(aten):
        if name.startswith("_foreach_") and not name.endswith("_"):
            packet = getattr(aten, name)
            for overload in packet.overloads():
                op = getattr(packet, overload)
                if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd"):
                    found[op] = one_by_one(op)
    return found


def lerp(self: torch.Tensor, end: torch.Tensor, weight: float) -> Any:
    """Linear interpolation by a number, in the two forms that PyTorch's kernel has."""
    if abs(weight) < 0.5:
        return aten.add.Tensor(self, aten.mul.Tensor(aten.sub.Tensor(end, self), weight))
    return aten.sub.Tensor(end, aten.mul.Tensor(aten.sub.Tensor(end, self), 1 - weight))


_OURS: dict[OpOverload, Callable[..., Any]] = dict(FORMULAS)
# Small, exact, and in neither form core ATen: every backend is glad not to see them.
_ALSO_DECOMPOSED = (
    aten._to_copy,
    aten.t,
    aten.unsafe_chunk,
    aten.unsafe_split,
    aten.unsafe_split_with_sizes,
    aten._unsafe_view,
    aten._reshape_alias,
    aten.addmm,
    aten.addmv,
    aten.baddbmm,
    aten.rsub,
    aten.lerp,
    aten.addcmul,
    aten.addcdiv,
    aten.masked_fill,
    aten.native_dropout_backward,
    aten.threshold_backward,
)
_NOT_DECOMPOSED = {aten._to_copy.default}


@cache
def core_aten() -> Table:
    """PyTorch's core ATen decompositions, and a few more."""
    table: dict[OpOverload, Callable[..., Any]] = dict(core_aten_decompositions())
    extra: Any = get_decompositions(_ALSO_DECOMPOSED)
    table.update(extra)
    table.update(_list_operators())
    table.update(_OURS)
    table[aten.lerp.Scalar] = lerp
    for op in _NOT_DECOMPOSED:
        table.pop(op, None)
    return table


@cache
def only_ours() -> Table:
    """No decomposition but those that PyTorch lacks: for compilers that bring their own table."""
    return dict(_OURS)
