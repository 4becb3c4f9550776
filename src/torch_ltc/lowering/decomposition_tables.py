"""Decomposition tables for functional programs: PyTorch's own, and what PyTorch has none for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from torch_ltc.program.composite_gradients import FORMULAS
from torch_ltc.pytorch.private import (
    DispatchKey,
    OpOverload,
    core_aten_decompositions,
    get_decompositions,
    has_kernel_for,
    pw_cast_for_opmath,
)

aten = torch.ops.aten
Table = Mapping[OpOverload, Callable[..., Any]]


def one_by_one(op: OpOverload) -> Callable[..., Any]:
    """A call on lists of tensors as calls on their elements: PyTorch's own slow form."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)

    return run


@cache
def list_operators() -> Table:
    """Each operator on lists of tensors that PyTorch has a slow form for, with that form."""
    found: dict[OpOverload, Callable[..., Any]] = {}
    for name in dir(aten):
        if name.startswith("_foreach_") and not name.endswith("_"):
            packet = getattr(aten, name)
            for overload in packet.overloads():
                op = getattr(packet, overload)
                if has_kernel_for(op.name(), "CompositeExplicitAutograd"):
                    found[op] = one_by_one(op)
    return found


def lerp(self: torch.Tensor, end: torch.Tensor, weight: float) -> Any:
    """Linear interpolation by a number, in the two forms that PyTorch's kernel has."""
    if abs(weight) < 0.5:
        return aten.add.Tensor(self, aten.mul.Tensor(aten.sub.Tensor(end, self), weight))
    return aten.sub.Tensor(end, aten.mul.Tensor(aten.sub.Tensor(end, self), 1 - weight))


@pw_cast_for_opmath
def addmm(self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, beta: Any = 1, alpha: Any = 1) -> Any:
    """A product of matrices and an addition that broadcasts. From 2.15 on PyTorch's own has an `expand` in between."""
    return _added(self, aten.mm.default(mat1, mat2), beta, alpha)


@pw_cast_for_opmath
def addmv(self: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, beta: Any = 1, alpha: Any = 1) -> Any:
    """As `addmm`, of a matrix and a vector; an empty product leaves the other summand its size."""
    product = aten.mv.default(mat, vec)
    return self * beta if product.numel() == 0 and beta != 0 else _added(self, product, beta, alpha)


def _added(self: torch.Tensor, product: torch.Tensor, beta: Any, alpha: Any) -> Any:
    if not self.is_floating_point() and not self.is_complex():
        beta, alpha = int(beta), int(alpha)
    product = product * alpha
    # The product is laid out as the result is: it comes first.
    return product if beta == 0 else product + self * beta


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
    table.update(list_operators())
    table.update(_OURS)
    table[aten.lerp.Scalar] = lerp
    table[aten.addmm.default], table[aten.addmv.default] = addmm, addmv
    for op in _NOT_DECOMPOSED:
        table.pop(op, None)
    return table


@cache
def only_ours() -> Table:
    """No decomposition but those that PyTorch lacks: for compilers that bring their own table."""
    return dict(_OURS)
