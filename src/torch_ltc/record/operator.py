"""Operators as the recorder sees them: the part that each argument plays in a recording, from the schema."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torch_ltc.program.effects import SIZED_BY_SCALARS, operator_may_fail
from torch_ltc.program.instruction import written_positions
from torch_ltc.pytorch.private import OpOverload, SchemaArgument
from torch_ltc.shapes.rules import rule_of


class Kind(enum.Enum):
    """The part of an argument in a recording."""

    TENSOR = "its value number is in the key; a Python number may stand in its place"
    TENSORS = "a list of the former"
    SCALAR = "its type is in the key, its value is a run-time input"
    SCALARS = "a list of run-time inputs, their types in the key"
    STATIC = "it is in the key as it is"
    STATIC_SCALAR = "type and value are in the key: the result's shape depends on it"
    GENERATOR = "None: the device's generator; anything else is handled where it stands"
    DEVICE = "replaced by the physical device when the program runs"
    DROPPED = "has no meaning on the device (pin_memory)"


@dataclass(slots=True, eq=False)
class Argument:
    """One schema argument. Never changed, though not frozen: thousands are made when the package is imported."""

    name: str
    kind: Kind
    keyword_only: bool
    has_default: bool
    default: object
    written: bool
    optional: bool


_KINDS = {
    "Tensor": Kind.TENSOR,
    "Optional[Tensor]": Kind.TENSOR,
    "List[Tensor]": Kind.TENSORS,
    "Optional[List[Tensor]]": Kind.TENSORS,
    "List[Optional[Tensor]]": Kind.TENSORS,
    "number": Kind.SCALAR,
    "Optional[number]": Kind.SCALAR,
    "float": Kind.SCALAR,
    "Optional[float]": Kind.SCALAR,
    "List[number]": Kind.SCALARS,
    "Generator": Kind.GENERATOR,
    "Optional[Generator]": Kind.GENERATOR,
    "Device": Kind.DEVICE,
    "Optional[Device]": Kind.DEVICE,
}

# Arguments of calls that have templates: one part of the key each, in order.
_PLAIN_KINDS = frozenset({Kind.TENSOR, Kind.SCALAR, Kind.STATIC, Kind.STATIC_SCALAR, Kind.DEVICE})
_DYNAMIC_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Default:
    """In a key: this number is the schema's default, and so part of the program."""

    def __repr__(self) -> str:
        return "default"


DEFAULT = Default()


class Operator:
    """One overload as the recorder sees it. Compared by identity: it is the first part of every key."""

    # Not a dataclass: equality must be identity, and the hot path reads `op`.
    __slots__ = (
        "op",
        "name",
        "arguments",
        "random",
        "dynamic",
        "returns",
        "written",
        "generator_position",
        "positional",
        "checks_numbers",
        "located",
        "kinds",
        "defaults",
        "keywords",
        "rule",
        "required",
        "writes",
        "run_time",
        "has_template",
        "native",
    )

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        self.op = op
        self.name: str = op.name()
        self.arguments = _arguments(op)
        kinds = [a.kind for a in self.arguments]
        self.random = Kind.GENERATOR in kinds
        self.generator_position = kinds.index(Kind.GENERATOR) if self.random else -1
        self.dynamic = _is_dynamic(op)
        self.returns = len(schema.returns)
        # Lists of tensors are slow to check, and their operators refuse no number.
        self.checks_numbers = op.namespace == "aten" and "_foreach_" not in self.name and "_fused_" not in self.name
        # Whether each recording notes its line, for the error that a call of it may raise.
        self.located = operator_may_fail(schema.name, schema)
        self.positional = sum(not a.keyword_only for a in self.arguments)
        self.kinds = tuple(kinds)
        self.defaults = tuple(a.default for a in self.arguments)
        self.keywords = tuple(a.name for a in self.arguments[self.positional :])
        # Says what common calls return without asking PyTorch.
        self.rule = rule_of(self.name)
        # Tensors that autograd may leave undefined all the same; no rule covers that.
        self.required = tuple(i for i, a in enumerate(self.arguments) if a.kind is Kind.TENSOR and not a.optional)
        self.written = tuple(i for i, a in enumerate(self.arguments) if a.written)
        # Also what its schema does not declare.
        self.writes = bool(written_positions(op))
        # Where tensors and numbers are: their place in a key, and their position among the arguments.
        self.run_time = tuple(
            [(1 + i, i) for i, kind in enumerate(kinds) if kind is Kind.TENSOR or kind is Kind.SCALAR]
        )
        self.has_template = self.rule is not None and all(kind in _PLAIN_KINDS for kind in kinds)
        # The operator in C++, where its kernel tries the hit path.
        self.native: Any = None

    def values(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
        """Every argument in schema order, defaults filled in."""
        filled = list(args)
        for argument in self.arguments[len(args) :]:
            filled.append(kwargs.get(argument.name, argument.default))
        return tuple(filled)

    def __repr__(self) -> str:
        return self.name


def _is_dynamic(op: OpOverload) -> bool:
    """True where sizes of results depend on data; `out=` overloads that PyTorch makes of others lack their tags."""
    name = op._overloadname.removesuffix("out").removesuffix("_") or "default"
    packet = getattr(getattr(torch.ops, op.namespace), op._schema.name.partition("::")[2])
    returning = getattr(packet, name) if name in packet.overloads() else op
    return not _DYNAMIC_TAGS.isdisjoint((*op.tags, *returning.tags))


@cache
def _arguments(op: OpOverload) -> tuple[Argument, ...]:
    # Kept: an operator may be looked at several times, and there are thousands.
    schema = op._schema
    sized = schema.name in SIZED_BY_SCALARS
    return tuple([_argument(argument, sized) for argument in schema.arguments])


def _argument(argument: SchemaArgument, sized: bool) -> Argument:
    type_name = str(argument.type)
    kind = _KINDS.get(type_name, Kind.STATIC)
    if argument.name == "pin_memory":
        kind = Kind.DROPPED
    if sized and kind is Kind.SCALAR:
        kind = Kind.STATIC_SCALAR
    alias, has_default = argument.alias_info, argument.has_default_value()
    return Argument(
        name=argument.name,
        kind=kind,
        keyword_only=argument.kwarg_only,
        has_default=has_default,
        default=argument.default_value if has_default else None,
        written=alias is not None and alias.is_write,
        optional=type_name.startswith("Optional"),
    )
