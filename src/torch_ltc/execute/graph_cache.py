"""The graphs of captured programs: how much memory they hold, and which are dropped when it is too much.

Each captured program has a pool of memory of its own: the outputs of one must not be the scratch memory of another.
What bounds the memory is therefore how many programs stay captured. Those that were not used for longest are dropped,
and all of them before the device runs out of memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Protocol

from torch_ltc.config import settings
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcWarning
from torch_ltc.events import GraphsDroppedEvent, emit
from torch_ltc.formatting import size_text
from torch_ltc.lowering.out_of_memory import memory_needed

__all__ = ["GraphHolder", "GraphCache", "graph_cache"]

# Captured programs that are kept, whatever their size.
_MOST_PROGRAMS = 128
# The part of the device's memory that graphs may hold where the setting `graph_bytes` does not say.
_SHARE = 0.5


class GraphHolder(Protocol):
    """A program whose graphs hold memory."""

    size_bytes: int

    def drop(self) -> None:
        """Let go of the graphs."""


class GraphCache:
    """Captured programs, the least recently used first. Workers use it; anybody may ask for figures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A program that leaves the program cache takes its graphs along.
        self._used: OrderedDict[int, weakref.ref[GraphHolder]] = OrderedDict()
        self._warned = False

    def add(self, captured: GraphHolder, total_bytes: int) -> None:
        """A program was captured on a device with this much memory. Others are dropped to make room for it."""
        bound = settings.graph_bytes or int(total_bytes * _SHARE)
        with self._lock:
            self._used[id(captured)] = weakref.ref(captured)
            alive = self._alive()
            size_bytes = sum(each.size_bytes for each in alive)
            dropped = []
            while len(alive) > 1 and (size_bytes > bound or len(alive) > _MOST_PROGRAMS):
                dropped.append(alive.pop(0))
                size_bytes -= dropped[-1].size_bytes
                del self._used[id(dropped[-1])]
        self._drop(dropped, "the setting graph_bytes")

    def touch(self, captured: GraphHolder) -> None:
        """Mark a program as just used."""
        with self._lock:
            if id(captured) in self._used:
                self._used.move_to_end(id(captured))

    def make_room(self) -> bool:
        """Drop all graphs; True when there were some. Says so, once."""
        with self._lock:
            dropped = self._alive()
            self._used.clear()
        held = size_text(sum(each.size_bytes for each in dropped))
        self._drop(dropped, "the device is out of memory")
        if dropped and not self._warned:
            self._warned = True
            deferred.add_warning(
                f"the device is out of memory: the graphs of {len(dropped)} programs ({held}) were dropped, and are "
                "captured again later\n  try: a smaller batch, cuda_graphs = 'off', or a bound with graph_bytes",
                LtcWarning,
            )
        return bool(dropped)

    def clear(self) -> None:
        """Drop all graphs: their programs are forgotten."""
        with self._lock:
            dropped = self._alive()
            self._used.clear()
        for captured in dropped:
            captured.drop()

    def figures(self) -> dict[str, int]:
        """Programs and bytes, under names for memory figures."""
        with self._lock:
            alive = self._alive()
        return {"graphs.count": len(alive), "graphs.bytes": sum(each.size_bytes for each in alive)}

    def _alive(self) -> list[GraphHolder]:
        found = [(identity, reference()) for identity, reference in self._used.items()]
        for identity, captured in found:
            if captured is None:
                del self._used[identity]
        # One that has let go of its graphs by itself holds nothing.
        return [captured for _, captured in found if captured is not None and captured.size_bytes]

    @staticmethod
    def _drop(dropped: list[GraphHolder], reason: str) -> None:
        size_bytes = sum(each.size_bytes for each in dropped)
        for captured in dropped:
            captured.drop()
        if dropped:
            emit(GraphsDroppedEvent(len(dropped), size_bytes, reason))


graph_cache = GraphCache()
memory_needed.add(graph_cache.make_room)
