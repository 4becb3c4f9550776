"""The table of shape rules, and the answers that they give.

A rule is called with the arguments of an operator in schema order, defaults filled in, a `Spec` in place of each
tensor. It gives the returns, or raises `NoRule` where it is not sure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Return, ReturnKind, Returns
from torch_ltc.program.spec import Spec, make_spec, row_major
from torch_ltc.pytorch.private import OpOverload

Rule = Callable[..., Returns]

# Answers kept: most calls return what another one returned before.
_KEPT = 65_536


class NoRule(Exception):
    """The rule does not cover this call; PyTorch infers its shape."""


class _Rules:
    """Rules by the full name of the operator."""

    def __init__(self) -> None:
        self._by_name: dict[str, Rule] = {}

    def add(self, name: str, rule: Rule) -> None:
        """Add the rule of one operator; a second one is a mistake."""
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


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of these operators of ATen."""

    def add(function: Rule) -> Rule:
        for name in names:
            rules.add(name, function)
        return function

    return add


def overload(name: str) -> OpOverload:
    """The operator of ATen with this name, such as "add.Tensor"."""
    packet, _, tail = name.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), tail or "default")
    return found


def apply_rule(
    rule: Rule, shape_args: Sequence[Any], specs: Sequence[Spec | None], groups: Sequence[int] | None = None
) -> Returns | None:
    """The returns of a call by its rule; None where the rule does not cover it.

    `shape_args` are the arguments, `specs` those of the operands, None where one is not known. For a call that writes,
    `groups` are equal for operands that share memory.
    """
    for spec in specs:
        # An empty operand is common for `cat` alone.
        if spec is None or (not spec.plain and (spec.size != (0,) or rule is not rules.get("cat"))):
            return None
    if groups is not None and not _may_write(specs, groups):
        return None
    try:
        return rule(*shape_args)
    except NoRule:
        return None


def _may_write(specs: Sequence[Spec | None], groups: Sequence[int]) -> bool:
    """False when memory may overlap in a way that eager checks."""
    for spec in specs:
        if spec is None or (not spec.contiguous and spec.overlaps_itself()):
            return False
    if len(set(groups)) == len(groups):
        return True
    first: dict[int, Spec | None] = {}
    return all(first.setdefault(group, spec) is spec for spec, group in zip(specs, groups, strict=True))


class _Answers:
    """One return of one kind, one object per spec."""

    def __init__(self, kind: ReturnKind, operand: int = -1, group: int = -1) -> None:
        self._kind, self._operand, self._group = kind, operand, group
        self._kept: dict[Spec, Returns] = {}

    def __call__(self, spec: Spec) -> Returns:
        returns = self._kept.get(spec)
        if returns is None:
            if not spec.plain:
                raise NoRule
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            returns = self._kept[spec] = (Return(self._kind, spec, self._operand, self._group),)
        return returns


# One new tensor; one view of the first operand; the first operand, written to.
fresh = _Answers(ReturnKind.FRESH, group=0)
view = _Answers(ReturnKind.VIEW, operand=0)
same = _Answers(ReturnKind.SAME, operand=0)


def contiguous(dtype: torch.dtype, size: Iterable[int]) -> Spec:
    """The spec of a new row-major tensor."""
    sizes = tuple(size)
    return make_spec(dtype, sizes, row_major(sizes))


def fresh_contiguous(dtype: torch.dtype, size: Iterable[int]) -> Returns:
    """One new row-major tensor."""
    return fresh(contiguous(dtype, size))


def several(*specs: Spec | None) -> Returns:
    """Several new tensors, None where a return is left out."""
    require(all(spec is None or spec.plain for spec in specs))
    return tuple(
        [
            Return(ReturnKind.NOTHING) if spec is None else Return(ReturnKind.FRESH, spec, group=position)
            for position, spec in enumerate(specs)
        ]
    )


def masked(mask: Sequence[bool], *specs: Spec) -> Returns:
    """New tensors for the gradients that the mask asks for."""
    return several(*(spec if wanted else None for spec, wanted in zip(specs, mask, strict=True)))


def require(condition: Any) -> None:
    """Raise `NoRule` unless this holds."""
    if not condition:
        raise NoRule


def wrap(dimension: int, rank: int) -> int:
    """A dimension counted from the front."""
    if not -rank <= dimension < rank:
        raise NoRule
    return dimension + rank if dimension < 0 else dimension
