"""Forward lines of backward calls: the line of the forward pass that a call of the backward pass belongs to.

Autograd numbers its nodes in the order in which forward calls make them. Counted from the beginning of a program, a
call has the same number whenever the program is recorded, so that a known program tells the lines of its nodes without
being asked call by call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from torch_ltc.program.instruction import Call
from torch_ltc.program.tree import Node
from torch_ltc.pytorch.private import backward_pass
from torch_ltc.record.call_site import Source, backward_number, forward_number, paired, sequence_number

__all__ = ["ForwardLines"]

# Programs that are looked through besides the pending one: a read between forward and backward cuts it in two.
_MOST_EARLIER = 4


class ForwardLines:
    """Finds forward lines in the pending program and in the latest ones. Its user holds the recorder's lock."""

    __slots__ = ("_first", "_thread", "_earlier", "_lines")

    def __init__(self) -> None:
        # The number of the next node when the pending program began, -1 if it began in a backward pass; and the thread,
        # because each thread counts by itself.
        self._first = -1
        self._thread = 0
        # First number and last node of each program that was cut, the latest last.
        self._earlier: deque[tuple[int, Node]] = deque(maxlen=_MOST_EARLIER)
        # Lines by number, for each program that was looked through; its first number tells it from others.
        self._lines: dict[int, dict[int, Source]] = {}

    def begin(self) -> None:
        """The first call of a program is recorded on this thread."""
        self._thread = threading.get_ident()
        self._first = sequence_number() if backward_pass() < 0 else -1

    def end(self, node: Node) -> None:
        """The program that comes to `node` was cut."""
        self._lines.clear()
        if node.parent is not None and self._first >= 0:
            self._earlier.append((self._first, node))
        self._first = -1

    def number_of(self, values: Iterable[object]) -> int | None:
        """The number of the autograd node of the call that is being recorded with these arguments, counted from the
        beginning of the program; None if it has none."""
        if self._first < 0 or threading.get_ident() != self._thread:
            return None
        number = forward_number(values)
        return None if number is None else number - self._first

    def line_of(self, backward: Source, node: Node) -> Source:
        """The line of a call of the backward pass, with the forward line if it is known. The pending program has come
        to `node`."""
        number = backward_number() if backward.file else None
        if number is None:
            return backward
        for first, end in ((self._first, node), *reversed(self._earlier)):
            found = self._of(first, end).get(number - first) if first >= 0 else None
            if found is not None:
                return paired(backward, found)
        return backward

    def _of(self, first: int, end: Node) -> dict[int, Source]:
        """The lines of one program by number. Made once: what comes to it later belongs to the backward pass."""
        known = self._lines.get(first)
        if known is None:
            known = self._lines[first] = {}
            node: Node | None = end
            while node is not None:
                call = node.instruction
                if isinstance(call, Call) and call.sequence is not None:
                    # Of several calls with one number, the first made the node.
                    known[call.sequence] = call.source
                node = node.parent
        return known
