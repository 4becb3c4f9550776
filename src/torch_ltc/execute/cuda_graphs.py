"""CUDA graphs: launches taken down by the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CudaGraphs"]


class CudaGraphs:
    """Captures on a stream of its own."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def pool(self) -> Any:
        """A pool of memory for graphs that are replayed one after the other."""
        return torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], None], generator: torch.Generator | None, pool: Any) -> torch.cuda.CUDAGraph:
        """Take down what `launch` launches on the present device."""
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool, self._streams[device], capture_error_mode="thread_local"):
            launch()
        return graph
