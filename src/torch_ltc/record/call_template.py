"""Templates of calls: what a new instruction has in common with an earlier call of one operator on the same shapes.

Layers repeat, and so do steps that differ in few sizes: most new instructions differ from a known one in value numbers
alone. Shape rules, and the search for the arguments that are run-time inputs, then run once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_ltc.program.instruction import Call
from torch_ltc.program.spec import Spec
from torch_ltc.program.tree import Key, Node
from torch_ltc.record.operands import scalar_operand, value_operand
from torch_ltc.record.operator import Operator
from torch_ltc.source import Source

__all__ = ["CallTemplate", "CallTemplates"]

_MOST_TEMPLATES = 16_384
_NO_VALUE, _ONE_VALUE = (-1,), (0,)
# The value numbers of calls with one result: one tuple for all programs.
_one: list[tuple[int, ...]] = []


class CallTemplate:
    """A call without its value numbers. `layout` is shared by its instructions: kernels lay results out by shapes."""

    # A plain slots class, as the nodes that are made from it.
    __slots__ = (
        "returns",
        "args",
        "kwargs",
        "layout",
        "numbers",
        "made",
        "size",
        "dtype",
        "spec",
        "plan",
        "operands",
        "tensors",
        "scalars",
        "named",
    )

    def __init__(self, node: Node, call: Call, operator: Operator) -> None:
        # Places in the key of tensors and numbers, and where they go: the same for all calls with the signature.
        key, positional = node.key, operator.positional
        found = [(place, position) for place, position in operator.run_time if key[place].__class__ is int]
        self.operands = tuple([place for place, _ in found])
        self.tensors = tuple([pair for pair in found if pair[1] < positional])
        named = [(place, position - positional) for place, position in found if position >= positional]
        self.named = tuple([(place, operator.keywords[position]) for place, position in named])
        self.scalars = tuple([pair for pair in operator.run_time if key[pair[0]].__class__ is type])
        self.returns = call.returns
        self.args = call.args
        self.kwargs = call.kwargs
        self.layout = call.layout
        self.numbers = tuple([number - call.first if number >= 0 else -1 for number in call.numbers])
        self.made = node.made
        self.size, self.dtype, self.spec, self.plan = node.size, node.dtype, node.spec, node.plan

    def instruction(
        self, key: Key, operator: Operator, slot: int, first: int, source: Source, sequence: int | None
    ) -> Call:
        """The call with this key: results are numbered from `first` on, run-time numbers are in `slot` and after."""
        args: list[Any] = list(self.args)
        kwargs = self.kwargs
        for place, position in self.tensors:
            args[position] = value_operand(key[place])
        for place, position in self.scalars:
            args[position] = scalar_operand(slot, key[place])
            slot += 1
        for place, name in self.named:
            # By name only, as the mask of attention.
            kwargs = {**kwargs, name: value_operand(key[place])}
        return Call(
            operator.op,
            tuple(args),
            kwargs,
            tuple([key[place] for place in self.operands]),
            self.returns,
            first,
            source,
            operator.random,
            _numbers(self.numbers, first),
            self.layout,
            sequence,
        )

    def describe(self, node: Node) -> None:
        """Note on a node what kernels need to make the results; see `record/result_specs.py`."""
        node.made = self.made
        node.size, node.dtype, node.spec, node.plan = self.size, self.dtype, self.spec, self.plan


def _numbers(relative: tuple[int, ...], first: int) -> tuple[int, ...]:
    if relative == _ONE_VALUE:
        while len(_one) <= first:
            _one.append((len(_one),))
        return _one[first]
    if relative == _NO_VALUE:
        return relative
    return tuple([first + number if number >= 0 else -1 for number in relative])


class CallTemplates:
    """Templates by operator, operand specs and static arguments."""

    def __init__(self) -> None:
        self._found: dict[Key, CallTemplate] = {}

    def clear(self) -> None:
        """Forget them: shape rules may give other answers from now on."""
        self._found.clear()

    def signature(
        self, key: Key, operator: Operator, numbers: list[Any], specs: Sequence[Spec | None], roots: Sequence[int]
    ) -> Key | None:
        """What the template of a call is found by; None when it has none. `numbers` are its run-time numbers, `specs`
        and `roots` are those of values by number."""
        if not operator.has_template:
            return None
        parts: list[Any] = list(key)
        memory: list[int] = []
        for place, position in operator.run_time:
            part = key[place]
            if part.__class__ is int:
                spec = specs[part]
                if spec is None:
                    return None
                parts[place] = spec
                memory.append(roots[part])
            elif part.__class__ is type and position >= operator.positional:
                return None
        if operator.written and len(set(memory)) != len(memory):
            return None
        # Rules refuse some numbers.
        parts += numbers
        return tuple(parts)

    def find(self, signature: Key) -> CallTemplate | None:
        """The template that was kept under this signature."""
        return self._found.get(signature)

    def keep(self, signature: Key, node: Node, call: Call) -> None:
        """Make a template of a new instruction."""
        if len(self._found) >= _MOST_TEMPLATES:
            self._found.clear()
        self._found[signature] = CallTemplate(node, call, node.key[0])
