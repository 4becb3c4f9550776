"""The operands of a new instruction: arguments with value numbers and scalar slots in the place of run-time inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_ltc.program.instruction import DEVICE_GENERATOR, PHYSICAL_DEVICE, Scalar, Value
from torch_ltc.program.spec import Spec
from torch_ltc.record.operator import DEFAULT, Kind, Operator

# Names of their own: members of an enumeration are slow to look up.
_TENSOR, _TENSORS, _SCALARS, _STATIC = Kind.TENSOR, Kind.TENSORS, Kind.SCALARS, Kind.STATIC
_STATIC_SCALAR, _DEVICE, _GENERATOR, _DROPPED = Kind.STATIC_SCALAR, Kind.DEVICE, Kind.GENERATOR, Kind.DROPPED

_values: list[Value] = []
_scalars: dict[tuple[int, type], Scalar] = {}


class CallOperands:
    """A call as a program holds it.

    `args`, `kwargs` and `operands` are those of the instruction. `shape_args` are the arguments as shape rules take
    them, in schema order, with the spec of each tensor in its place.
    """

    # A plain slots class: one is built per new instruction.
    __slots__ = ("args", "kwargs", "operands", "shape_args")

    def __init__(self, filled: list[Any], operator: Operator, operands: list[int], shape_args: list[Any]) -> None:
        keywords = operator.keywords
        if keywords:
            split = operator.positional
            self.args: tuple[Any, ...] = tuple(filled[:split])
            self.kwargs: dict[str, Any] = dict(zip(keywords, filled[split:], strict=True))
        else:
            self.args = tuple(filled)
            self.kwargs = {}
        self.operands = tuple(operands)
        self.shape_args = shape_args


def make_operands(
    key: tuple[Any, ...], operator: Operator, values: Sequence[Any], slot: int, specs: Sequence[Spec | None]
) -> CallOperands:
    """The operands of the call with this key: value numbers, scalar slots from `slot` on, and markers in place of
    run-time inputs. `specs` are those of values by number."""
    filled: list[Any] = []
    shape_args: list[Any] = []
    operands: list[int] = []
    place = 1
    for kind, value, default in zip(operator.kinds, values, operator.defaults, strict=True):
        if kind is _GENERATOR or kind is _DROPPED:
            filled.append(None if kind is _DROPPED else DEVICE_GENERATOR)
            shape_args.append(None)
            continue
        part = key[place]
        place += 1
        if kind is _TENSOR and part.__class__ is int:
            operands.append(part)
            filled.append(_values[part] if part < len(_values) else value_operand(part))
            shape_args.append(specs[part])
        elif kind is _STATIC or part is None:
            filled.append(part)
            shape_args.append(value)
        elif part is DEFAULT:
            filled.append(default)
            shape_args.append(default)
        elif kind is _TENSORS or kind is _SCALARS:
            slot = _add_list(part, value, slot, specs, filled, shape_args, operands)
        elif kind is _STATIC_SCALAR or kind is _DEVICE:
            filled.append(value if kind is _STATIC_SCALAR else PHYSICAL_DEVICE if part else None)
            shape_args.append(value)
        else:
            filled.append(scalar_operand(slot, part))
            shape_args.append(value)
            slot += 1
    return CallOperands(filled, operator, operands, shape_args)


def _add_list(
    parts: Sequence[Any],
    values: Sequence[Any],
    slot: int,
    specs: Sequence[Spec | None],
    filled: list[Any],
    shape_args: list[Any],
    operands: list[int],
) -> int:
    """Add a list of tensors or numbers; the slot of the number that comes next."""
    items: list[Any] = []
    specs_of_items: list[Any] = []
    for part, value in zip(parts, values, strict=True):
        if part is None:
            items.append(None)
            specs_of_items.append(None)
        elif part.__class__ is int:
            operands.append(part)
            items.append(_values[part] if part < len(_values) else value_operand(part))
            specs_of_items.append(specs[part])
        else:
            items.append(scalar_operand(slot, part))
            specs_of_items.append(value)
            slot += 1
    filled.append(tuple(items))
    shape_args.append(specs_of_items)
    return slot


def value_operand(number: int) -> Value:
    """The operand that stands for this value; one object for all programs."""
    while len(_values) <= number:
        _values.append(Value(len(_values)))
    return _values[number]


def scalar_operand(slot: int, kind: type) -> Scalar:
    """The operand that stands for the number in this slot."""
    scalar = _scalars.get((slot, kind))
    if scalar is None:
        scalar = _scalars[slot, kind] = Scalar(slot, kind)
    return scalar
