"""The table of rules, and the answers that they give.

A rule is called with the arguments of an operator in schema order, defaults filled in, a `Spec` in place of each
tensor. It gives the returns, or None when it is not sure; `Unsure` raised anywhere below it means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Return, ReturnKind, Returns
from torch_ltc.program.spec import Spec, make_spec, row_major

Rule = Callable[..., Returns | None]

# Answers kept: most calls return what another one returned before.
_KEPT = 65_536


class Unsure(Exception):
    """The rule cannot tell; PyTorch is asked."""


class _Rules:
    """Rules by the full name of the operator."""

    def __init__(self) -> None:
        self._by_name: dict[str, Rule] = {}

    def add(self, name: str, rule: Rule) -> None:
        """A second rule for one operator is a mistake."""
        if name in self._by_name:
            raise ValueError(f"there are two rules for aten::{name}")
        self._by_name[name] = rule

    def get(self, name: str) -> Rule | None:
        """The rule of the operator with this name, such as "aten::add.Tensor"."""
        return self._by_name.get(name.removeprefix("aten::"))

    def names(self) -> list[str]:
        """Operators that have a rule."""
        return [f"aten::{name}" for name in self._by_name]


rules = _Rules()
rule_of = rules.get


def quick(
    rule: Rule, asked: Sequence[Any], specs: Sequence[Spec | None], groups: Sequence[int] | None = None
) -> Returns | None:
    """What the rule says about a call, or None when it cannot tell.

    `asked` are the arguments, `specs` the geometries of the operands, None where one is not known. For a call that
    writes, `groups` are equal for operands that share memory.
    """
    for spec in specs:
        if spec is None or (not spec.plain and (spec.size != (0,) or rule is not _rule_of_cat())):
            return None
    if groups is not None and not _may_write(specs, groups):
        return None
    try:
        return rule(*asked)
    except Unsure:
        return None


def _rule_of_cat() -> Rule | None:
    # The one operator for which an operand without elements is usual.
    return rules.get("cat")


def _may_write(specs: Sequence[Spec | None], groups: Sequence[int]) -> bool:
    """False when memory may overlap in a way that eager looks at."""
    for spec in specs:
        if spec is None or (not spec.contiguous and spec.overlaps_itself()):
            return False
    if len(set(groups)) == len(groups):
        return True
    first: dict[int, Spec | None] = {}
    return all(first.setdefault(group, spec) is spec for spec, group in zip(specs, groups, strict=True))


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of these operators of ATen."""

    def add(function: Rule) -> Rule:
        for name in names:
            rules.add(name, function)
        return function

    return add


_fresh: dict[Spec, Returns] = {}
_views: dict[Spec, Returns] = {}
_same: dict[Spec, Returns] = {}


def fresh(spec: Spec) -> Returns:
    """One new tensor."""
    returns = _fresh.get(spec)
    if returns is None:
        returns = _keep(_fresh, spec, Return(ReturnKind.FRESH, spec, group=0))
    return returns


def view(spec: Spec) -> Returns:
    """One view of the first operand."""
    returns = _views.get(spec)
    if returns is None:
        returns = _keep(_views, spec, Return(ReturnKind.VIEW, spec, operand=0))
    return returns


def same(spec: Spec) -> Returns:
    """The first operand, written to."""
    returns = _same.get(spec)
    if returns is None:
        returns = _keep(_same, spec, Return(ReturnKind.SAME, spec, operand=0))
    return returns


def _keep(kept: dict[Spec, Returns], spec: Spec, answer: Return) -> Returns:
    if not spec.plain:
        raise Unsure
    if len(kept) >= _KEPT:
        kept.clear()
    returns = kept[spec] = (answer,)
    return returns


def contiguous(dtype: torch.dtype, size: Iterable[int]) -> Spec:
    """The geometry of a new row-major tensor."""
    sizes = tuple(size)
    return make_spec(dtype, sizes, row_major(sizes))


def fresh_contiguous(dtype: torch.dtype, size: Iterable[int]) -> Returns:
    """One new row-major tensor."""
    return fresh(contiguous(dtype, size))


def several(*specs: Spec | None) -> Returns:
    """Several new tensors, None where a return is left out."""
    found: list[Return] = []
    for position, spec in enumerate(specs):
        if spec is None:
            found.append(Return(ReturnKind.NOTHING))
        elif spec.plain:
            found.append(Return(ReturnKind.FRESH, spec, group=position))
        else:
            raise Unsure
    return tuple(found)


def list_of_views(specs: Iterable[Spec]) -> Returns:
    """One list of views of the first operand."""
    found = tuple([Return(ReturnKind.VIEW, spec, operand=0) for spec in specs])
    if not all(item.spec is not None and item.spec.plain for item in found):
        raise Unsure
    return (found,)


def require(condition: Any) -> None:
    """Give up unless this holds."""
    if not condition:
        raise Unsure


def wrap(dimension: int, rank: int) -> int:
    """A dimension counted from the front."""
    if not -rank <= dimension < rank:
        raise Unsure
    return dimension + rank if dimension < 0 else dimension
