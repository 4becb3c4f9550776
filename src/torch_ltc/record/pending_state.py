"""The pending program as kernels see it, in pure Python: where recording stands, values, inputs and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.program.spec import Spec, held_elsewhere
from torch_ltc.program.tree import Node
from torch_ltc.record.buffer import Buffer

__all__ = ["PendingState"]


class PendingState:
    """`base` is the absolute number of the first value of the pending program, `count` that of the next one."""

    __slots__ = ("base", "count", "node", "buffers", "inputs", "scalars", "random", "started")
    node: Node

    def __init__(self) -> None:
        self.base = 0
        self.count = 0
        self.random = False
        # When the first call was recorded, in seconds; 0 before that.
        self.started = 0.0
        # Buffers that the pending program defines. The list stays the same object: kernels keep its `append`.
        self.buffers: list[Buffer] = []
        self.inputs: list[Buffer] = []
        self.scalars: list[Any] = []

    @property
    def scalar_count(self) -> int:
        """How many run-time numbers the program has."""
        return len(self.scalars)

    def clear(self) -> None:
        """Let go of buffers, inputs and numbers. Lists that were taken before stay as they are."""
        for buffer in (*self.buffers, *self.inputs):
            buffer.views = None
        self.buffers.clear()
        self.inputs = []
        self.scalars = []

    def add_buffer(self, buffer: Buffer) -> None:
        """The program defines this buffer."""
        self.buffers.append(buffer)

    def live_outputs(self) -> tuple[list[Buffer], tuple[int, ...]]:
        """Buffers that the program defines and that someone still holds, and the numbers of their values in the
        program."""
        # A buffer is held by its storage, which lives as long as any tensor on it. Counting references is exact here:
        # the lock is held, and nothing else keeps buffers.
        found = held_elsewhere(self.buffers)
        return found, tuple([buffer.number - self.base for buffer in found])

    def new_result(self, spec: Spec, number: int) -> torch.Tensor:
        """A new tensor that is the value with this number; for the extension, which has this."""
        raise NotImplementedError

    def new_view(self, of: torch.Tensor, spec: Spec, number: int) -> torch.Tensor:
        """A view that is the value with this number; for the extension, which has this."""
        raise NotImplementedError

    def is_input(self, buffer: Buffer) -> bool:
        """True when the program takes this buffer."""
        return 0 <= buffer.input < len(self.inputs) and self.inputs[buffer.input] is buffer

    def input_place(self, buffer: Buffer) -> int:
        """The place of this buffer among the program's inputs, or the one that it would get."""
        return buffer.input if self.is_input(buffer) else len(self.inputs)

    # Steps to a child of the present node; each returns the number of the child's first value. An interrupt may come
    # at the end of any call: so there is none between the first change and the last.

    def step_call(self, child: Node, numbers: list[Any]) -> int:
        """Step over a call with these run-time numbers."""
        number = self.count
        self.scalars += numbers
        self.node = child
        self.count = number + child.made
        return number

    def step_input(self, child: Node, buffer: Buffer) -> int:
        """Step over an input, which is this buffer."""
        number, place = self.count, self.input_place(buffer)
        if not self.is_input(buffer):
            buffer.input = place
            self.inputs += [buffer]
        self.node = child
        self.count = number + child.made
        return number

    def step_empty(self, child: Node, buffer: Buffer) -> int:
        """Step over the call that makes memory nobody has written to: this buffer."""
        number = self.count
        self.buffers += [buffer]
        buffer.number = number
        self.node = child
        self.count = number + child.made
        return number

    def take_hits(self) -> int:
        """How many calls the hit path in C++ has recorded since this was last asked."""
        return 0

    def set_begin(self, begin: Callable[[], None]) -> None:
        """What the hit path in C++ calls at the first call of a program: there is none here."""

    def set_note_line(self, note: Callable[[Node], None]) -> None:
        """Let the hit path call this for a call that may fail."""
