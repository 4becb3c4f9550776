"""CUDA graphs: launches taken down by the driver, in memory of one pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CudaGraphs"]


class CudaGraphs:
    """Captures on a stream of its own; all graphs share one pool of memory, since one worker replays them in turn."""

    def __init__(self) -> None:
        self._pools: dict[int, Any] = {}
        # Graphs that are alive. A pool ends with the last graph that uses it.
        self._alive: dict[int, weakref.WeakSet[torch.cuda.CUDAGraph]] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def capture(self, launch: Callable[[], None], generator: torch.Generator | None) -> torch.cuda.CUDAGraph:
        """Take down what `launch` launches on the present device."""
        device = torch.cuda.current_device()
        alive = self._alive.setdefault(device, weakref.WeakSet())
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()
        if not alive:
            self._pools[device] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        # Other threads may go on using the device meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pools[device], self._streams[device], capture_error_mode=mode):
            launch()
        alive.add(graph)
        return graph
