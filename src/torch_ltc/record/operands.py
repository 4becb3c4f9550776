"""From the arguments of a call to its template: what of it belongs to the program, and what changes from run to run."""

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

    `args`, `kwargs` and `operands` are those of the instruction. `asked` are the arguments as rules of geometry want
    them, in schema order, what is known of the geometry of a tensor in its place.
    """

    # A plain slots class: one is built per new instruction.
    __slots__ = ("args", "kwargs", "operands", "asked")

    def __init__(self, filled: list[Any], operator: Operator, operands: list[int], asked: list[Any]) -> None:
        keywords = operator.keywords
        if keywords:
            split = operator.positional
            self.args: tuple[Any, ...] = tuple(filled[:split])
            self.kwargs: dict[str, Any] = dict(zip(keywords, filled[split:], strict=True))
        else:
            self.args = tuple(filled)
            self.kwargs = {}
        self.operands = tuple(operands)
        self.asked = asked


def make_operands(
    key: tuple[Any, ...], operator: Operator, values: Sequence[Any], slot: int, specs: Sequence[Spec | None]
) -> CallOperands:
    """The template of the call with this key: value numbers, scalar slots from `slot` on, and markers in place of what
    changes. `specs` are the geometries of values by number."""
    filled: list[Any] = []
    asked: list[Any] = []
    operands: list[int] = []
    place = 1
    for kind, value, default in zip(operator.kinds, values, operator.defaults, strict=True):
        if kind is _GENERATOR or kind is _DROPPED:
            filled.append(None if kind is _DROPPED else DEVICE_GENERATOR)
            asked.append(None)
            continue
        part = key[place]
        place += 1
        if kind is _TENSOR and part.__class__ is int:
            operands.append(part)
            filled.append(_values[part] if part < len(_values) else _value(part))
            asked.append(specs[part])
        elif kind is _STATIC or part is None:
            filled.append(part)
            asked.append(value)
        elif part is DEFAULT:
            filled.append(default)
            asked.append(default)
        elif kind is _TENSORS or kind is _SCALARS:
            slot = _add_list(part, value, slot, specs, filled, asked, operands)
        elif kind is _STATIC_SCALAR or kind is _DEVICE:
            filled.append(value if kind is _STATIC_SCALAR else PHYSICAL_DEVICE if part else None)
            asked.append(value)
        else:
            filled.append(scalar_operand(slot, part))
            asked.append(value)
            slot += 1
    return CallOperands(filled, operator, operands, asked)


def _add_list(
    parts: Sequence[Any],
    values: Sequence[Any],
    slot: int,
    specs: Sequence[Spec | None],
    filled: list[Any],
    asked: list[Any],
    operands: list[int],
) -> int:
    """Add a list of tensors or numbers; the slot of the number that comes next."""
    items: list[Any] = []
    geometries: list[Any] = []
    for part, value in zip(parts, values, strict=True):
        if part is None:
            items.append(None)
            geometries.append(None)
        elif part.__class__ is int:
            operands.append(part)
            items.append(_values[part] if part < len(_values) else _value(part))
            geometries.append(specs[part])
        else:
            items.append(scalar_operand(slot, part))
            geometries.append(value)
            slot += 1
    filled.append(tuple(items))
    asked.append(geometries)
    return slot


def _value(number: int) -> Value:
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
