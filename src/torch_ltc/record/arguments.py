"""The arguments of a call as the recorder looks at them: tensors, numbers, and what stays as it is."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torch_ltc.program.instruction import Return, ReturnKind, Returns, flatten_returns
from torch_ltc.program.tree import Key
from torch_ltc.pytorch.private import is_alias_of
from torch_ltc.record.operator import Kind, Operator

NUMBER_TYPES = frozenset({int, float, bool, complex})


def statics_of(operator: Operator, values: tuple[Any, ...]) -> Key:
    """The part of a call besides its operands that its results depend on: static arguments, and types of numbers."""
    parts: list[Any] = []
    for argument, value in zip(operator.arguments, values, strict=True):
        kind = argument.kind
        if kind is Kind.TENSOR:
            parts.append(type(value) if type(value) in NUMBER_TYPES else value is None)
        elif kind is Kind.TENSORS:
            parts.append(None if value is None else tuple([item is None for item in value]))
        elif kind is Kind.SCALAR:
            parts.append(type(value))
        elif kind is Kind.SCALARS:
            parts.append(tuple([type(item) for item in value]))
        elif kind is Kind.STATIC_SCALAR:
            parts.append((type(value), value))
        elif kind is Kind.STATIC:
            parts.append(freeze(value))
        elif kind is Kind.DEVICE:
            parts.append(value is not None)
    return tuple(parts)


def operand_tensors(operator: Operator, values: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors of a call in argument order, lists opened."""
    tensors: list[torch.Tensor] = []
    for argument, value in zip(operator.arguments, values, strict=True):
        if argument.kind is Kind.TENSOR:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
        elif argument.kind is Kind.TENSORS and value is not None:
            tensors.extend(item for item in value if isinstance(item, torch.Tensor))
    return tensors


# Up to this many tensors are compared with each other.
_FEW = 8


def storage_groups(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor the place of the first one that shares its storage."""
    if len(tensors) <= _FEW:
        # Asking for the storages would give them objects of Python, and autograd adds up in place only where nobody
        # else has a storage: a call that is new would be followed by other calls than a known one.
        return [next(j for j, one in enumerate(tensors) if one is t or is_alias_of(one, t)) for t in tensors]
    first: dict[int, int] = {}
    return [first.setdefault(t.untyped_storage()._cdata, i) for i, t in enumerate(tensors)]


def result_numbers(returns: Returns, first: int) -> tuple[int, ...]:
    """Value number of each return, lists opened, -1 where it makes no value."""
    numbers: list[int] = []
    for item in returns if len(returns) == 1 and isinstance(returns[0], Return) else flatten_returns(returns):
        kind = item.kind  # type: ignore[union-attr]
        if kind is ReturnKind.FRESH or kind is ReturnKind.VIEW:
            numbers.append(first)
            first += 1
        else:
            numbers.append(-1)
    return tuple(numbers)


def freeze(value: Any) -> Any:
    """A hashable form of a static argument."""
    return tuple([freeze(item) for item in value]) if isinstance(value, (list, tuple)) else value


def plain_number(value: Any) -> Any:
    """A Python number from a NumPy scalar or a symbolic one."""
    if isinstance(value, torch.Tensor):
        return value.item()
    kinds: tuple[Any, ...] = (bool, int, float, complex)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    return _reject(value)


def _reject(value: object) -> NoReturn:
    raise TypeError(f"expected a number, got {type(value).__name__}: {value!r}")
