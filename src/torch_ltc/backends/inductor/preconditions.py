"""Preconditions of calls on their data, where eager checks them and Inductor's code does not survive a violation.

A wrong index in a kernel with several threads ends the process, because an exception cannot leave a parallel region;
an integer division by zero ends it in any case. So they are checked beside the computation, and the call gets
operands that meet them. The table lists them by operator; it builds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.program.instruction import Call, Integer, Value, value_numbers
from torch_ltc.program.spec import Spec


@dataclass(frozen=True, slots=True)
class Within:
    """Every element is at least `low` and less than `high`, or is `ignored`."""

    low: Integer
    high: Integer
    ignored: int | None = None


@dataclass(frozen=True, slots=True)
class Probability:
    """Every element is in the closed interval from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Divides:
    """Integer division of `dividend` by every element has a result."""

    dividend: Any


@dataclass(frozen=True, slots=True)
class Precondition:
    """A condition on the value `number`, which stands in the place `argument` of a call, or there in a list at
    `position`."""

    argument: str
    position: int | None
    number: int
    condition: Within | Probability | Divides


@dataclass(frozen=True, slots=True)
class Shape:
    """Dtype and size of a value, symbolic where it is."""

    dtype: torch.dtype
    size: tuple[Integer, ...]
    numel: int


Shapes = Mapping[int, Spec | Shape]


class Operands:
    """The arguments of a call by name, and the shapes of its tensors."""

    def __init__(self, call: Call, specs: Shapes) -> None:
        names = [argument.name for argument in call.op._schema.arguments]
        self._named: dict[str, Any] = {**dict(zip(names, call.args)), **call.kwargs}
        self._specs = specs

    def __getitem__(self, name: str) -> Any:
        return self._named[name]

    def spec(self, value: Value) -> Spec | Shape:
        """The shape of a tensor."""
        return self._specs[value.number]

    def size(self, name: str) -> tuple[Any, ...]:
        """The size of a tensor; one without dimensions is indexed like one of a single element."""
        return self.spec(self[name]).size or (1,)

    def precondition(self, name: str, condition: Within | Probability | Divides) -> Iterator[Precondition]:
        """This condition on a tensor argument, unless it has no elements."""
        value = self[name]
        if isinstance(value, Value) and self.spec(value).numel:
            yield Precondition(name, None, value.number, condition)


Rule = Callable[[Operands], Iterator[Precondition]]


def _embedding(given: Operands) -> Iterator[Precondition]:
    return given.precondition("indices", Within(0, given.size("weight")[0]))


def _embedding_backward(given: Operands) -> Iterator[Precondition]:
    return given.precondition("indices", Within(0, given["num_weights"], given["padding_idx"]))


def _along_dim(given: Operands) -> Iterator[Precondition]:
    return given.precondition("index", Within(0, given.size("self")[given["dim"]]))


def _along_dim_from_both_ends(given: Operands) -> Iterator[Precondition]:
    length = given.size("self")[given["dim"]]
    return given.precondition("index", Within(-length, length))


def _anywhere(given: Operands) -> Iterator[Precondition]:
    count = math.prod(given.size("self"))
    return given.precondition("index", Within(-count, count))


def _each_dim(given: Operands) -> Iterator[Precondition]:
    dim = 0
    for position, value in enumerate(given["indices"]):
        if value is None:
            dim += 1
            continue
        spec = given.spec(value)
        if spec.dtype.itemsize == 1:
            # A mask: it takes as many dimensions as it has, and what is wrong with it shows in its shape.
            dim += len(spec.size)
            continue
        length = given.size("self")[dim]
        if spec.numel:
            yield Precondition("indices", position, value.number, Within(-length, length))
        dim += 1


def _classes(given: Operands) -> Any:
    size = given.size("self")
    return size[0] if len(size) == 1 else size[1]


def _class_or_ignored(given: Operands) -> Iterator[Precondition]:
    return given.precondition("target", Within(0, _classes(given), given["ignore_index"]))


def _class(given: Operands) -> Iterator[Precondition]:
    return given.precondition("target", Within(0, given.size("self")[-1]))


def _classes_or_end(given: Operands) -> Iterator[Precondition]:
    return given.precondition("target", Within(-1, given.size("self")[-1]))


def _pooled_from(given: Operands) -> Iterator[Precondition]:
    return given.precondition("indices", Within(0, math.prod(given.size("self")[-2:])))


def _unpooled_to(given: Operands) -> Iterator[Precondition]:
    return given.precondition("indices", Within(0, math.prod(given["output_size"])))


def _sorts(given: Operands) -> Iterator[Precondition]:
    return given.precondition("sorter", Within(0, given.size("sorted_sequence")[-1]))


def _probability(given: Operands) -> Iterator[Precondition]:
    return given.precondition("self", Probability())


def _divisor(given: Operands) -> Iterator[Precondition]:
    return given.precondition("other", Divides(given["self"]))


_RULES: dict[str, Rule] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "gather": _along_dim,
    "scatter": _along_dim,
    "scatter_add": _along_dim,
    "scatter_reduce": _along_dim,
    "index_select": _along_dim,
    "index_add": _along_dim,
    "index_copy": _along_dim,
    "index_reduce": _along_dim,
    "index_fill": _along_dim_from_both_ends,
    "take": _anywhere,
    "put": _anywhere,
    "index": _each_dim,
    "index_put": _each_dim,
    "_unsafe_index": _each_dim,
    "_unsafe_index_put": _each_dim,
    "nll_loss_forward": _class_or_ignored,
    "nll_loss_backward": _class_or_ignored,
    "nll_loss2d_forward": _class_or_ignored,
    "nll_loss2d_backward": _class_or_ignored,
    "multi_margin_loss": _class,
    "multilabel_margin_loss_forward": _classes_or_end,
    "max_pool2d_with_indices_backward": _pooled_from,
    "max_unpool2d": _unpooled_to,
    "max_unpool3d": _unpooled_to,
    "searchsorted": _sorts,
    "binary_cross_entropy": _probability,
}
_INTEGER_DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod"})
_INDEX_ARGUMENTS = frozenset({"index", "indices", "offsets", "sorter"})


def _plain_name(call: Call) -> str:
    namespace, _, name = str(call.op._schema.name).partition("::")
    return name if namespace == "aten" else ""


def _divides_integers(call: Call) -> bool:
    spec = call.flat_returns[0].spec
    assert spec is not None
    return not (spec.dtype.is_floating_point or spec.dtype.is_complex)


def preconditions(call: Call, specs: Shapes) -> list[Precondition]:
    """All preconditions of a call on its data."""
    name = _plain_name(call)
    if name in _INTEGER_DIVISIONS:
        return list(_divisor(Operands(call, specs))) if _divides_integers(call) else []
    rule = _RULES.get(name)
    return [] if rule is None else list(rule(Operands(call, specs)))


def has_preconditions(call: Call) -> bool:
    """True for a call of an operator in the table."""
    name = _plain_name(call)
    return _divides_integers(call) if name in _INTEGER_DIVISIONS else name in _RULES


def is_checked(call: Call, specs: Shapes) -> bool:
    """True when its preconditions are all that a call demands of its data. The number of elements that a mask selects
    is not among them."""
    if not has_preconditions(call):
        return False
    return _RULES.get(_plain_name(call)) is not _each_dim or not _has_mask(Operands(call, specs))


def _has_mask(given: Operands) -> bool:
    return any(value is not None and given.spec(value).dtype.itemsize == 1 for value in given["indices"])


def indexes_unknown(call: Call) -> bool:
    """True for a call with indices about which the table says nothing."""
    if _plain_name(call) in _RULES:
        return False
    arguments = zip(call.op._schema.arguments, (*call.args, *call.kwargs.values()))
    return any(argument.name in _INDEX_ARGUMENTS and list(value_numbers(value)) for argument, value in arguments)


def divides_by_zero(call: Call) -> bool:
    """True for an integer division by a constant zero, which fails whatever the data."""
    if _plain_name(call) not in _INTEGER_DIVISIONS or not _divides_integers(call):
        return False
    divisor = call.args[1]
    return not isinstance(divisor, Value) and divisor == 0
