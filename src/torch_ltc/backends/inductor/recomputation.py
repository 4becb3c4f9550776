"""Values that are computed twice, so that they need not be kept: less memory than eager for a training step.

A program has forward and backward in one graph, and Inductor keeps what backward reads of forward. Of that, what is
cheap to compute from other values that are kept anyway (an activation from what it was applied to, a normalized image
from the image and its statistics) is computed again where backward needs it.

Inductor would compute both at once, because they read the same memory: the second has to come late. So it is chosen by
a condition on a value of backward, between itself and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_ltc.formatting import count_text, size_text
from torch_ltc.pytorch.private import OpOverload

__all__ = ["NOTHING", "Recomputed", "recompute"]

aten = torch.ops.aten
_VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.slice.Tensor, aten.select.int,
})  # fmt: skip
# Smaller values are kept: statistics, biases.
_SMALL_BYTES = 1 << 16
# How much may be read and computed for one value.
_MOST_READS = 3
_MOST_CALLS = 24


@dataclass(frozen=True, slots=True)
class Recomputed:
    """How many values are computed again, and the most bytes that intermediate values take, before and after, counted
    in the order of the program."""

    count: int
    before_bytes: int
    after_bytes: int

    @property
    def text(self) -> str:
        """In words; empty when nothing is computed again."""
        if not self.count:
            return ""
        sizes = f"{size_text(self.after_bytes)} of memory instead of {size_text(self.before_bytes)}"
        return f"{count_text(self.count, 'value')} computed again instead of kept: {sizes}"


NOTHING = Recomputed(0, 0, 0)


def recompute(module: fx.GraphModule) -> Recomputed:
    """Change the graph, which has no writes but those to its inputs at the end."""
    return _Graph(module).rewrite()


class _Graph:
    """The nodes of a graph in order, and what is kept at the moment when most is."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._nodes = list(module.graph.nodes)
        self._position = {node: index for index, node in enumerate(self._nodes)}
        self._first = {node: self._position[node] for node in self._nodes if self._is_kept(node)}
        self._last = {node: self._last_use(node) for node in self._first}
        self._peak, self._before_bytes = self._most_kept()
        self._saved = {node for node, last in self._last.items() if self._first[node] <= self._peak < last}

    def rewrite(self) -> Recomputed:
        """Compute again what can be, where it is used late."""
        chosen: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            if node in self._saved and _is_pointwise(node) and self._is_worth_it(node):
                calls = self._calls_for(node)
                if calls is not None and self._late_value(node) is not None:
                    chosen[node] = calls
                    self._saved.discard(node)
        for node, calls in chosen.items():
            self._repeat(node, calls)
        if chosen:
            self._module.graph.lint()
            self._module.recompile()
        return Recomputed(len(chosen), self._before_bytes, self._most_kept()[1])

    def _is_worth_it(self, node: fx.Node) -> bool:
        """Not for a result of the graph, which has to be kept."""
        return _size_bytes(node) >= _SMALL_BYTES and all(user.op != "output" for user in self._users(node))

    # ---- what is kept

    def _is_kept(self, node: fx.Node) -> bool:
        """True for a value that is written to memory: what only pointwise calls read is computed by each of them."""
        if node.op != "call_function" or _value(node) is None or _is_view(node):
            return False
        return not _is_pointwise(node) or not all(map(_is_pointwise, self._users(node)))

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """Nodes of the original graph that read it, through views too."""
        found: list[fx.Node] = []
        for user in node.users:
            if user in self._position:
                found += self._users(user) if _is_view(user) else [user]
        return found

    def _last_use(self, node: fx.Node) -> int:
        return max([self._position[user] for user in self._users(node)], default=self._position[node])

    def _most_kept(self) -> tuple[int, int]:
        """The position at which most is kept, and how much."""
        change = [0] * (len(self._nodes) + 2)
        for node, last in self._last.items():
            change[self._first[node]] += _size_bytes(node)
            change[last + 1] -= _size_bytes(node)
        most, now, found = 0, 0, 0
        for position, amount in enumerate(change):
            now += amount
            if now > most:
                most, found = now, position
        return found, most

    # ---- what to compute again

    def _calls_for(self, node: fx.Node) -> list[fx.Node] | None:
        """The calls that compute it from what is kept anyway, in order; None if these are too many, or others are
        needed."""
        calls: set[fx.Node] = {node}
        reads: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            for operand in waiting.pop().all_input_nodes:
                if operand in calls:
                    continue
                if operand.op != "call_function" or operand in self._saved:
                    reads.update([operand] if _size_bytes(operand) >= _SMALL_BYTES else [])
                elif _is_pointwise(operand) or _is_view(operand):
                    calls.add(operand)
                    waiting.append(operand)
                elif _size_bytes(operand) >= _SMALL_BYTES or _value(operand) is None:
                    return None
            if len(calls) > _MOST_CALLS or len(reads) > _MOST_READS:
                return None
        return sorted(calls, key=self._position.__getitem__)

    def _is_late(self, user: fx.Node) -> bool:
        """True for what is used after the moment when most is kept."""
        return self._last_use(user) > self._peak if _is_view(user) else self._is_after(user)

    def _is_after(self, node: fx.Node) -> bool:
        return self._position[node] > self._peak

    def _first_late_use(self, node: fx.Node) -> int:
        """Where it has to be there again: at views of it that are taken then, too."""
        users = [user for user in node.users if user in self._position]
        early = [
            reader for user in users if _is_view(user) and not self._is_after(user) for reader in self._users(user)
        ]
        return min(self._position[user] for user in (*users, *early) if self._is_after(user))

    def _late_value(self, node: fx.Node) -> fx.Node | None:
        """A value of backward that is there when the node is used again."""
        between: list[fx.Node] = self._nodes[self._peak + 1 : self._first_late_use(node)]
        for found in reversed(between):
            value = _value(found)
            plain = found.op == "call_function" and not _is_pointwise(found) and not _is_view(found)
            if plain and value is not None and value.is_floating_point() and _size_bytes(found):
                return found
        return None

    # ---- computing it again

    def _repeat(self, node: fx.Node, calls: Sequence[fx.Node]) -> None:
        late, begin = self._late_value(node), self._first_late_use(node)
        assert late is not None
        users = [user for user in node.users if user in self._position and self._is_late(user)]
        last = self._last_use(node)
        graph, copies = self._module.graph, dict[fx.Node, fx.Node]()
        with graph.inserting_before(self._nodes[begin]):
            for call in calls:
                copies[call] = graph.node_copy(call, lambda operand: copies.get(operand, operand))
            again = self._after(copies[node], late)
            for user in users:
                if self._is_after(user):
                    user.replace_input_with(node, again)
                    continue
                view = graph.node_copy(user, lambda operand: again if operand is node else operand)
                for reader in [reader for reader in user.users if self._is_late(reader)]:
                    reader.replace_input_with(user, view)
        for operand in {operand for call in calls for operand in call.all_input_nodes}:
            if operand in self._last:
                self._last[operand] = max(self._last[operand], begin)
        self._last[node] = self._last_use(node)
        self._first[again], self._last[again] = begin, last

    def _after(self, node: fx.Node, late: fx.Node) -> fx.Node:
        """The same value, which cannot be there before `late` is."""
        element = late
        while (value := _value(element)) is not None and value.dim():
            element = self._call(aten.select.int, element, 0, 0)
        return self._call(aten.where.self, self._call(aten.isnan.default, element), node, node)

    def _call(self, op: OpOverload, *args: Any) -> fx.Node:
        made = self._module.graph.call_function(op, args)
        operands: list[Any] = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        # The first operand is a fake tensor.
        with operands[0].fake_mode:
            made.meta["val"] = op(*operands)
        return made


def _value(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _size_bytes(node: fx.Node) -> int:
    value = _value(node)
    if value is None:
        return 0
    count = value.numel()
    # Of a size that changes, what it is in the program that is compiled.
    known: int = count.node.hint if isinstance(count, torch.SymInt) else count
    return known * int(value.element_size())


def _is_pointwise(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return False
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS
