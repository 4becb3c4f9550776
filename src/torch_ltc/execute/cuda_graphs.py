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
        self.lost_states = 0

    def pool(self) -> Any:
        """A pool of memory for graphs that are replayed one after the other."""
        return torch.cuda.graph_pool_handle()

    def size_bytes(self, pool: Any) -> int:
        """Bytes of the segments that the allocator keeps for the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(pool))

    def total_bytes(self) -> int:
        """Bytes that the present device has."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def capture(self, launch: Callable[[], None], generator: torch.Generator | None, pool: Any) -> torch.cuda.CUDAGraph:
        """Take down what `launch` launches on the present device."""
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        raised: list[Exception] = []
        before = torch.cuda.current_stream()
        # PyTorch adds the one that belongs to the device by itself.
        generators = [torch.cuda.default_generators[device], *([] if generator is None else [generator])]
        states = [each.get_state() for each in generators]
        try:
            # Other threads may go on using the device meanwhile.
            with torch.cuda.graph(graph, pool, self._streams[device], capture_error_mode="thread_local"):
                try:
                    launch()
                except Exception as error:
                    raised.append(error)
                    raise
        except Exception:
            # Ending a capture that has failed raises an error of its own, which says nothing, and leaves the generators
            # in the state of the capture: whatever draws from them next would fail. They get a new state, and graphs
            # that were captured before keep the old one.
            self.lost_states += 1
            for each, state in zip(generators, states, strict=True):
                fresh = torch.Generator(each.device)
                fresh.set_state(state)
                each.graphsafe_set_state(fresh.graphsafe_get_state())
            if raised:
                raise raised[0] from None
            raise
        finally:
            # That error leaves the stream of the capture in its place: whatever is launched next would run beside the
            # programs, and nobody would wait for it.
            torch.cuda.set_stream(before)
        return graph
