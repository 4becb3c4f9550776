"""A stand-in for the graphs of a device: takes down the operators of a launch on the CPU, with their very arguments,
and replays them into the memory that the launch made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import torch_ltc
from torch_ltc.debug.history import history
from torch_ltc.execute import capture
from torch_ltc.program.instruction import written_positions
from torch_ltc.pytorch.kernel_calls import call_kernel
from torch_ltc.shapes.stand_ins import dropped_warnings

# Kernels of the CPU raise where the divisor is a zero of integers; those of a device do not, and a graph cannot.
_DIVIDES = frozenset(
    f"aten::{name}{tail}" for name in ("floor_divide", "remainder", "fmod", "div") for tail in ("", "_")
)


class _TakesDown(TorchDispatchMode):
    def __init__(self, refused: frozenset[str]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.refused = refused
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self.refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        named = kwargs or {}
        if func._schema.name in _DIVIDES and not any(map(_has_fractions, tree_leaves((args, named)))):
            raise RuntimeError("the stand-in does not divide integers in graphs")
        for position, argument in enumerate(func._schema.arguments):
            if position in written_positions(func):
                value = args[position] if position < len(args) else named.get(argument.name)
                for tensor in tree_leaves(value):
                    self._save(tensor)
        made = func(*args, **named)
        self.calls.append((func, args, named, tree_leaves(made)))
        return made

    def _save(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            self._saved.setdefault(storage._cdata, (storage, storage.clone()))

    def undo(self) -> None:
        for storage, value in self._saved.values():
            # Resizing moves memory, also to the size that it has.
            if storage.nbytes() != value.nbytes():
                storage.resize_(value.nbytes())
            storage.copy_(value)


def _has_fractions(value: Any) -> bool:
    """True for a number or tensor of a dtype that has quotients by zero."""
    return isinstance(value, (float, complex)) or (
        isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    )


class StandInGraph:
    """Operators that were taken down."""

    def __init__(self, calls: list[tuple[Any, Any, Any, list[Any]]], pool: int) -> None:
        self._calls = calls
        self._tensors = [each for each in tree_leaves(calls) if isinstance(each, torch.Tensor)]
        self._addresses = [each.data_ptr() for each in self._tensors]
        self.pool = pool

    def keep_state(self) -> None:
        """Draw from a generator of one's own from now on."""
        own: dict[torch.Generator, torch.Generator] = {}

        def kept(value: Any) -> Any:
            return own.setdefault(value, value.clone_state()) if isinstance(value, torch.Generator) else value

        self._calls = [(func, *tree_map(kept, (args, kwargs)), made) for func, args, kwargs, made in self._calls]

    def replay(self) -> None:
        """Run them again, in the same memory. No code of the host runs in a graph: nothing warns."""
        if [each.data_ptr() for each in self._tensors] != self._addresses:
            raise RuntimeError("a graph is launched that would use memory which has moved")
        for func, args, kwargs, made in self._calls:
            with dropped_warnings():
                results = tree_leaves(call_kernel(func, args, kwargs))
            for target, result in zip(made, results, strict=True):
                if isinstance(target, torch.Tensor) and target.data_ptr() != result.data_ptr():
                    target.copy_(result)


class StandInGraphs:
    """Captures on the CPU. Operators named in `refused` cannot be captured. Each graph holds `graph_bytes`, and
    capturing raises when all that are alive would hold more than `room_bytes`. A capture that fails leaves the graphs
    that are there with the old state of the generators, as CUDA's do."""

    def __init__(self, refused: frozenset[str] = frozenset()) -> None:
        self.refused = refused
        # How many were made.
        self.captures = 0
        self.graph_bytes = 1000
        self.room_bytes = 1 << 40
        self.lost_states = 0
        self._alive: weakref.WeakSet[StandInGraph] = weakref.WeakSet()
        self._pools = 0

    def pool(self) -> int:
        """The number of a pool: memory is the allocator's."""
        self._pools += 1
        return self._pools

    def size_bytes(self, pool: int) -> int:
        """What the graphs in the pool are said to hold."""
        return self.graph_bytes * sum(graph.pool == pool for graph in self._alive)

    def total_bytes(self) -> int:
        """What the device is said to have."""
        return 2 * self.room_bytes

    def alive(self) -> int:
        """Graphs that were not dropped."""
        return len(self._alive)

    def capture(self, launch: Callable[[], None], generator: torch.Generator | None, pool: int) -> StandInGraph:
        """Take down what `launch` calls, and undo what it did."""
        if (self.alive() + 1) * self.graph_bytes > self.room_bytes:
            raise torch.OutOfMemoryError("the stand-in is out of memory")
        state = None if generator is None else generator.get_state()
        taking = _TakesDown(self.refused)
        try:
            with taking:
                launch()
        except Exception:
            self.lost_states += 1
            for graph in self._alive:
                graph.keep_state()
            raise
        finally:
            taking.undo()
            if generator is not None and state is not None:
                generator.set_state(state)
        graph = StandInGraph(taking.calls, pool)
        self._alive.add(graph)
        self.captures += 1
        return graph


@contextmanager
def graphs_on_the_cpu() -> Iterator[StandInGraphs]:
    """The CPU has graphs in this block, and no program is known before or after it."""
    made = StandInGraphs()
    with mock.patch.dict(capture._by_device, {"cpu": made}):
        torch_ltc.ir_cache.reset()
        history.clear()
        yield made
        torch_ltc.sync(wait=True)
        torch_ltc.ir_cache.reset()
