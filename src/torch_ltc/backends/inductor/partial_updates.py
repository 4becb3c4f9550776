"""Updates of a part of an input, in programs whose data is checked.

Nothing is written when the data is wrong. For most updates that is a choice between the old and the new value of the
whole input, made where the new value is computed. Where the new value is the old one with a few rows replaced, as in a
cache of keys and values, such a choice would write the whole input: the choice is between old and new rows instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["keep_where"]

aten = torch.ops.aten
# For each operator that replaces a part of its first argument: the position of the new part, and the call that reads
# the old one.
_Read = Callable[[fx.Graph, tuple[Any, ...]], fx.Node]
_PARTIAL: dict[Any, tuple[int, _Read]] = {
    aten.index_copy.default: (3, lambda graph, a: graph.call_function(aten.index_select.default, a[:3])),
    aten.index_put.default: (2, lambda graph, a: graph.call_function(aten.index.Tensor, a[:2])),
    aten.slice_scatter.default: (1, lambda graph, a: graph.call_function(aten.slice.Tensor, (a[0], *a[2:]))),
    aten.select_scatter.default: (1, lambda graph, a: graph.call_function(aten.select.int, (a[0], *a[2:]))),
}


def keep_where(wrong: fx.Node, target: fx.Node, value: fx.Node) -> bool:
    """Have `value`, which replaces a part of `target`, put the old part back where the data is `wrong`. False if that
    cannot be done: it is no such value, or the checks depend on it."""
    known = _PARTIAL.get(value.target)
    if known is None or value.args[0] is not target or _accumulates(value):
        return False
    needed = _ancestors(wrong)
    if value in needed:
        return False
    late = False
    for node in list(value.graph.nodes):
        late |= node is value
        if late and node in needed:
            value.prepend(node)
    position, read = known
    with value.graph.inserting_before(value):
        old = read(value.graph, value.args)
        part = value.graph.call_function(aten.where.self, (wrong, old, value.args[position]))
    value.update_arg(position, part)
    return True


def _accumulates(value: fx.Node) -> bool:
    return value.target is aten.index_put.default and bool(value.kwargs.get("accumulate") or value.args[3:4] == (True,))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and all that it is computed from."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        item = waiting.pop()
        if item not in found:
            found.add(item)
            waiting += item.all_input_nodes
    return found
