"""The table of rules: which JAX function computes which functional operator.

A rule takes the operator's arguments in schema order, keyword-only ones by name: JAX arrays in the place of tensors,
plain Python values elsewhere. It returns an array, or a list in the place of each list and several returns. The caller
casts what it returns to the dtype that was recorded, so that a rule need not care about the dtype of its result.

Rules name operators by text: an overload that the installed PyTorch does not have is left out instead of failing the
import.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torch_ltc.errors import BackendError
from torch_ltc.pytorch.private import OpOverload

Function = TypeVar("Function", bound=Callable[..., Any])


class Wants(enum.Enum):
    """Things a rule is given besides the arguments of its operator."""

    NOTHING = "nothing"
    SPEC = "the spec of the first tensor, by the name `spec`"
    MEMORY = "in the place of the first tensor the memory that it lies in, see `rules_memory.py`"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    function: Callable[..., Any]
    wants: Wants = Wants.NOTHING


RULES: dict[OpOverload, Rule] = {}
# Names that the installed PyTorch does not have. A test asks that this list is short.
ABSENT: list[str] = []


def overload(name: str) -> OpOverload | None:
    """The overload that this name means, `add.Tensor`, `mm` or `prims:iota`; None if there is none."""
    namespace, _, plain = name.partition(":")
    if not plain:
        namespace, plain = "aten", name
    packet, _, last = plain.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    result: OpOverload | None = getattr(found, last or "default", None)
    return result


def rule(*names: str, wants: Wants = Wants.NOTHING) -> Callable[[Function], Function]:
    """Make the decorated function the rule of these operators. `name` alone means `name.default`."""

    def add(function: Function) -> Function:
        add_rules(function, names, wants)
        return function

    return add


def add_rules(function: Callable[..., Any], names: Iterable[str], wants: Wants = Wants.NOTHING) -> None:
    """Make `function` the rule of these operators; a second rule for one operator is an error."""
    for name in names:
        op = overload(name)
        if op is None:
            ABSENT.append(name)
        elif op in RULES:
            raise BackendError(f"{op} has two rules", hint="remove one of them")
        else:
            RULES[op] = Rule(function, wants)
