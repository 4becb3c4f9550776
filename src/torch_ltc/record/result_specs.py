"""Result specs on the nodes of the tree, from which kernels make the results of a known call at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ltc.program.instruction import Return, ReturnKind, Returns
from torch_ltc.program.spec import Spec
from torch_ltc.program.tree import Node

__all__ = ["cache_result_specs"]


def cache_result_specs(child: Node, returns: Returns, operands: Sequence[int], specs: Sequence[Spec | None]) -> None:
    """Note on `child` what kernels need to make the common results at once: one new tensor (`size`, `dtype`,
    `spec`), one view that differs in sizes and strides alone (`plan` is its Spec), or several new tensors (`plan`
    is a tuple of their Specs, None for nothing)."""
    if len(returns) != 1:
        items = [item for item in returns if isinstance(item, Return)]
        plain = [i.kind is ReturnKind.NOTHING or _is_new(i, position) for position, i in enumerate(items)]
        if items and len(items) == len(returns) and all(plain):
            child.plan = tuple([item.spec for item in items])
        return
    item = returns[0]
    if isinstance(item, tuple):
        return
    spec, kind = item.spec, item.kind
    if spec is None or not (kind is ReturnKind.FRESH or kind is ReturnKind.VIEW):
        return
    child.spec = spec
    if kind is ReturnKind.FRESH:
        if spec.contiguous:
            child.size, child.dtype = spec.size, spec.dtype
    else:
        base = specs[operands[item.operand]]
        if base is not None and (base.dtype, base.conj, base.neg) == (spec.dtype, spec.conj, spec.neg):
            child.plan = spec


def _is_new(item: Return, position: int) -> bool:
    """True for a contiguous tensor in memory of its own."""
    spec = item.spec
    return item.kind is ReturnKind.FRESH and item.group == position and spec is not None and spec.contiguous
