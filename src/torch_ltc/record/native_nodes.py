"""Nodes of the tree in C++: what the hit path compares and makes, written down when a known call is recorded again.

A program that is recorded once costs nothing here. From its third recording on, what can be hit in C++ is.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.native.recording import native
from torch_ltc.program.instruction import Call, Return, ReturnKind
from torch_ltc.program.spec import Spec
from torch_ltc.program.tree import Node
from torch_ltc.record.arguments import operand_tensors
from torch_ltc.record.operator import DEFAULT, Kind, Operator

__all__ = ["link_call", "link_empty", "link_input", "make_native_operator"]

# As in native/node.h.
_KINDS = {
    Kind.TENSOR: 0,
    Kind.TENSORS: 1,
    Kind.SCALAR: 2,
    Kind.SCALARS: 3,
    Kind.STATIC: 4,
    Kind.STATIC_SCALAR: 4,
    Kind.GENERATOR: 5,
    Kind.DEVICE: 6,
    Kind.DROPPED: 7,
}
_RESHAPING = frozenset(f"aten::{name}" for name in ("resize_", "resize_as_", "set_", "addbmm_"))
_FRESH, _SHARED, _VIEW, _SAME, _NOTHING, _CONSTANT = range(6)
_Result = tuple[int, int, Spec | None]


def make_native_operator(operator: Operator, versions: list[int], unrecorded: bool = False) -> Any:
    """The operator in C++, whose kernel tries the hit path, unless it is `unrecorded`. `versions` are places of lists
    of tensors whose versions it counts up."""
    schema = operator.op._schema
    kinds = [_KINDS[kind] for kind in operator.kinds]
    made = native.Operator(schema.name, schema.overload_name, kinds, operator.random, versions)
    made.unrecorded = unrecorded
    # Not those that give a tensor another shape.
    reshapes = torch.Tag.inplace_view in operator.op.tags or schema.name in _RESHAPING
    made.at_once = not reshapes and not any(a.written and a.keyword_only for a in operator.arguments)
    return made


def link_call(parent: Node, child: Node, operator: Operator, values: tuple[Any, ...]) -> None:
    """Recording goes from `parent` to `child` by this call: let the hit path do so the next time."""
    if not child.known:
        child.known = True
        return
    if child.native is None:
        made = native.Node(child)
        if operator.native is not None:
            _describe(made, child, operator, values)
        # Described: an interrupt may have come before.
        child.native = made
    # Only the kernel in Python knows which numbers a random operator takes: each must have been there.
    child.native.set_numbers(() if operator.random and child.checked is None else child.checked)
    _expect(parent, child)


def link_input(parent: Node, child: Node, index: int, spec: Spec) -> None:
    """Recording goes from `parent` to `child` by taking an input."""
    if not child.known:
        child.known = True
        return
    if child.native is None:
        made = native.Node(child)
        made.describe_input(index, spec)
        child.native = made
    _expect(parent, child)


def link_empty(parent: Node, child: Node, spec: Spec) -> None:
    """Recording goes from `parent` to `child` by taking memory that nobody has written to."""
    if not child.known:
        child.known = True
        return
    if child.native is None:
        made = native.Node(child)
        made.describe_empty(spec)
        child.native = made
    _expect(parent, child)


def _expect(parent: Node, child: Node) -> None:
    if parent.parent is None and parent.native is None:
        parent.native = native.Node(parent)
    if parent.native is not None and child.native.described:
        parent.native.expect(child.native)


def _describe(made: Any, child: Node, operator: Operator, values: tuple[Any, ...]) -> None:
    call = child.instruction
    assert isinstance(call, Call)
    tensors = operand_tensors(operator, values)
    returns: list[tuple[bool, list[_Result]]] = []
    position = 0
    for declared in call.returns:
        results: list[_Result] = []
        for item in declared if isinstance(declared, tuple) else (declared,):
            result = _result(item, position, tensors)
            if result is None:
                return
            results.append(result)
            position += 1
        returns.append((isinstance(declared, tuple), results))
    made.located = child.located
    made.describe_call(operator.native, child.key, values, DEFAULT, returns, child.made)


def _result(item: Return, position: int, tensors: list[Any]) -> _Result | None:
    """How to make one result; None when only Python can."""
    kind, spec = item.kind, item.spec
    if kind is ReturnKind.SAME:
        return _SAME, item.operand, None
    if kind is ReturnKind.CONSTANT:
        return (_CONSTANT, item.constant, None) if type(item.constant) is int else None
    if kind is ReturnKind.NOTHING or spec is None:
        return _NOTHING, -1, None
    if kind is ReturnKind.FRESH:
        if spec.conj or spec.neg:
            return None
        return (_FRESH, -1, spec) if item.group == position else (_SHARED, item.group, spec)
    base = tensors[item.operand]
    alike = base.dtype is spec.dtype and base.is_conj() == spec.conj and base.is_neg() == spec.neg
    return (_VIEW, item.operand, spec) if alike else None
