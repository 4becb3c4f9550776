"""Functions of attention scores as text: the calls of an FX graph, as plain data that JSON holds, and back.

A graph is `{"inputs": count, "calls": [[operator, args, kwargs], ...], "returned": value}`. Values are numbered: the
inputs, then what each call returns; `{"value": n}` is one of them. Devices are left out: the physical device takes
their place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from torch_ltc.errors import CompileError
from torch_ltc.program.effects import operator_may_fail
from torch_ltc.pytorch.private import OpOverload

__all__ = ["Graph", "UnwritableError", "may_fail", "read", "written"]

Graph = dict[str, Any]
Range = tuple[float, float]
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_PART = "getitem"


class UnwritableError(CompileError):
    """A function of attention scores holds what has no text.

    When: never raised to users; such an attention is recorded call by call.
    """


# ---- text of graphs -------------------------------------------------------------------------------------------------


def written(module: fx.GraphModule) -> Graph:
    """The graph as plain data. Raises `UnwritableError` for calls that are no operators, and for constants that are no
    single number."""
    numbers: dict[fx.Node, int] = {}
    calls: list[Any] = []
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    numbers.update((node, index) for index, node in enumerate(inputs))
    for node in module.graph.nodes:
        if node.op == "output":
            return {"inputs": len(inputs), "calls": calls, "returned": _encoded(node.args[0], numbers)}
        if node.op == "placeholder":
            continue
        numbers[node] = len(inputs) + len(calls)
        if node.op == "get_attr":
            calls.append(_constant(getattr(module, str(node.target))))
        else:
            kwargs = {name: _encoded(value, numbers) for name, value in node.kwargs.items()}
            calls.append([_name(node.target), _encoded(node.args, numbers), kwargs])
    raise UnwritableError("a graph without an end")


def _constant(value: Any) -> list[Any]:
    """A number that the graph holds as a tensor."""
    if not isinstance(value, torch.Tensor) or value.dim() or value.is_complex():
        raise UnwritableError("a tensor inside of the function")
    return ["aten.full.default", [[], value.item()], {"dtype": _encoded(value.dtype, {}), "device": {"device": ""}}]


def _name(target: Any) -> str:
    if target is operator.getitem:
        return _PART
    if not isinstance(target, OpOverload):
        raise UnwritableError(f"a call of {target}")
    return f"{target.namespace}.{target._schema.name.rpartition('::')[2]}.{target._overloadname or 'default'}"


def _encoded(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"value": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_encoded(item, numbers) for item in value]
    if isinstance(value, torch.device):
        return {"device": ""}
    for kind, owner in _NAMED.items():
        if isinstance(value, owner):
            return {kind: str(value).removeprefix("torch.")}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UnwritableError(f"a {type(value).__name__} in the function")


def read(graph: Graph, device: torch.device) -> fx.GraphModule:
    """The graph as a module that computes on `device`."""
    made = fx.Graph()
    values = [made.placeholder(f"v{index}") for index in range(graph["inputs"])]
    for name, args, kwargs in graph["calls"]:
        given = _decoded(args, values, device)
        named = {key: _decoded(value, values, device) for key, value in kwargs.items()}
        values.append(made.call_function(_operator(name), tuple(given), named))
    made.output(_decoded(graph["returned"], values, device))
    return fx.GraphModule(torch.nn.Module(), made, "ScoreGraph")


def _operator(name: str) -> Any:
    if name == _PART:
        return operator.getitem
    namespace, plain, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), plain), overload)
    assert isinstance(found, OpOverload)
    return found


def _decoded(value: Any, values: list[fx.Node], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decoded(item, values, device) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "value":
        return values[content]
    return device if kind == "device" else getattr(torch, content)


# ---- what may go wrong ----------------------------------------------------------------------------------------------

_UNBOUNDED: Range = (float("-inf"), float("inf"))
# Positions are int32.
_LARGEST = 2**31 - 1
_INDEXING = frozenset({"aten.index.Tensor", "flex_lib.zeros_and_scatter.default"})
_SAME = frozenset({"_to_copy", "alias", "detach", "clone", "lift_fresh_copy", "expand", "view", "unsqueeze"})
_DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod"})
# Their numbers were tried when the graph was made.
_TRIED = frozenset({
    "full", "full_like", "new_full", "ones", "new_ones", "zeros", "new_zeros", "scalar_tensor", "clamp", "clamp_min",
    "clamp_max", "masked_fill", "where",
})  # fmt: skip


def may_fail(graph: Graph, ranges: Mapping[int, Range], sizes: Mapping[int, tuple[int, ...]]) -> bool:
    """True unless it is certain that no data makes a call of the graph fail. `ranges` bound the positions among the
    inputs, `sizes` are those of captured tensors."""
    known: dict[int, Range] = dict(ranges)
    for number, (name, args, _) in enumerate(graph["calls"], graph["inputs"]):
        if name in _INDEXING:
            if not _indexes_inside(args, known, sizes):
                return True
        elif name != _PART and _call_may_fail(name, args):
            return True
        known[number] = _range_of(name, args, known)
    return False


def _indexes_inside(args: list[Any], known: Mapping[int, Range], sizes: Mapping[int, tuple[int, ...]]) -> bool:
    indexed, indices = args[:2]
    # Of `zeros_and_scatter` the size itself.
    size = indexed if isinstance(indexed, list) else sizes.get(indexed["value"])
    if size is None or len(indices) > len(size):
        return False
    bounded = [(*_bounds(index, known), length) for index, length in zip(indices, size) if index is not None]
    return all(-length <= low and high < length for low, high, length in bounded)


def _call_may_fail(name: str, args: list[Any]) -> bool:
    namespace, plain, overload = name.split(".")
    if namespace != "aten":
        return True
    if plain in _DIVISIONS:
        # True division has a result for everything.
        return (plain, overload) != ("div", "Tensor") and not (type(args[1]) in (int, float) and args[1] != 0)
    return plain not in _SAME and plain not in _TRIED and operator_may_fail(f"aten::{plain}", _operator(name)._schema)


def _bounds(value: Any, known: Mapping[int, Range]) -> Range:
    if isinstance(value, dict):
        return known.get(value.get("value", -1), _UNBOUNDED)
    return (value, value) if type(value) in (int, float) else _UNBOUNDED


def _range_of(name: str, args: list[Any], known: Mapping[int, Range]) -> Range:
    """The range of what a call returns, from those of its operands."""
    plain = name.split(".")[1] if name != _PART else ""
    if plain in _SAME:
        return _bounds(args[0], known)
    rule = _RANGES.get(plain)
    operands = [_bounds(arg, known) for arg in args]
    if rule is None or len(operands) != rule.__code__.co_argcount:
        return _UNBOUNDED
    low, high = rule(*operands)
    # Also what is no number: infinity less infinity.
    return (low, high) if low >= -_LARGEST and high <= _LARGEST else _UNBOUNDED


def _product(one: Range, other: Range) -> Range:
    corners = [a * b for a in one for b in other]
    return min(corners), max(corners)


def _magnitude(one: Range) -> Range:
    low, high = one
    return max(low, -high, 0), max(-low, high)


_RANGES: dict[str, Any] = {
    "add": lambda one, other: (one[0] + other[0], one[1] + other[1]),
    "sub": lambda one, other: (one[0] - other[1], one[1] - other[0]),
    "mul": _product,
    "neg": lambda one: (-one[1], -one[0]),
    "abs": _magnitude,
    "maximum": lambda one, other: (max(one[0], other[0]), max(one[1], other[1])),
    "minimum": lambda one, other: (min(one[0], other[0]), min(one[1], other[1])),
    "clamp": lambda one, low, high: (min(max(one[0], low[0]), high[0]), min(max(one[1], low[1]), high[1])),
    # By a number greater than zero; its range is that number alone.
    "remainder": lambda one, other: (0, other[1] - 1) if 0 < other[0] == other[1] else _UNBOUNDED,
    "floor_divide": lambda one, other: (
        (one[0] // other[0], one[1] // other[0]) if 0 < other[0] == other[1] else _UNBOUNDED
    ),
}
