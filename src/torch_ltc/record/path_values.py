"""Specs and aliasing of the values on the path to a node of the tree.

Reading sizes and strides off tensors takes microseconds each. The values of a pending program are known from its
instructions, and only needed where an instruction is new.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_ltc.program.instruction import Call, Input, Return, ReturnKind
from torch_ltc.program.spec import Spec
from torch_ltc.program.tree import Node

# Afterwards a tensor looks at its memory in another way than the value that it is.
_RESIZE = torch.ops.aten.resize_.default


# On no path.
_NOWHERE = Node((), None, None)


class PathValues:
    """The values of one path, by value number: `specs` (None: read it off the tensor) and `roots`, which are equal for
    values that share memory. `written` has the roots that a call of the path writes to."""

    __slots__ = ("specs", "roots", "written", "_node")

    def __init__(self, root: Node) -> None:
        self.specs: list[Spec | None] = []
        self.roots: list[int] = []
        self.written: set[int] = set()
        self._node = root

    def follow(self, node: Node) -> None:
        """Know the values on the way to `node`. Costs as much as there is between it and where this was last."""
        last = self._node
        if node is last:
            return
        # An interrupt may leave it half done: it is nowhere then, and begins anew the next time.
        self._node = _NOWHERE
        if node.parent is last:
            self._add(node)
            self._node = node
            return
        path = [node]
        above = node.parent
        while above is not last and above is not None:
            path.append(above)
            above = above.parent
        if above is None:
            # Another path, from the root on.
            path.pop()
            self.specs.clear()
            self.roots.clear()
            self.written.clear()
        for each in reversed(path):
            self._add(each)
        self._node = node

    def writes_to(self, node: Node, input_buffer: int) -> bool:
        """True when a call on the way to `node` writes to this input buffer."""
        self.follow(node)
        return -1 - input_buffer in self.written

    def of(self, numbers: Sequence[int], groups: bool) -> tuple[list[Spec | None], list[int] | None]:
        """The specs of these values, and, if asked for, what is equal for those that share memory."""
        specs = self.specs
        return [specs[number] for number in numbers], [self.roots[number] for number in numbers] if groups else None

    def _add(self, node: Node) -> None:
        instruction = node.instruction
        if instruction.__class__ is Input:
            self.specs.append(instruction.spec)
            self.roots.append(-1 - instruction.buffer)
        elif isinstance(instruction, Call):
            numbers = instruction.numbers
            if len(numbers) == 1 and isinstance(item := instruction.returns[0], Return):
                if numbers[0] >= 0:
                    self._add_value(instruction, item)
            else:
                for item, number in zip(instruction.flat_returns, numbers, strict=True):
                    if number >= 0:
                        self._add_value(instruction, item)
            # Asking the operator of the key is quicker than asking the instruction.
            if node.key[0].writes:
                for number in instruction.mutated:
                    self.written.add(self.roots[number])
                if instruction.op is _RESIZE:
                    for number in instruction.operands:
                        self.specs[number] = None

    def _add_value(self, call: Call, item: Return) -> None:
        self.specs.append(item.spec)
        is_view = item.kind is ReturnKind.VIEW
        self.roots.append(self.roots[call.operands[item.operand]] if is_view else call.numbers[item.group])
