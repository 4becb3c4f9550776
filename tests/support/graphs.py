"""A stand-in for the graphs of a device: takes down the operators of a launch on the CPU, with their very arguments,
and replays them into the memory that the launch made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
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
            storage.copy_(value)


class StandInGraph:
    """Operators that were taken down."""

    def __init__(self, calls: list[tuple[Any, Any, Any, list[Any]]]) -> None:
        self._calls = calls
        self.replays = 0

    def replay(self) -> None:
        """Run them again, in the same memory."""
        self.replays += 1
        for func, args, kwargs, made in self._calls:
            for target, result in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(target, torch.Tensor) and target.data_ptr() != result.data_ptr():
                    target.copy_(result)


class StandInGraphs:
    """Captures on the CPU. Operators named in `refused` cannot be captured."""

    def __init__(self, refused: frozenset[str] = frozenset()) -> None:
        self.refused = refused
        self.made: list[StandInGraph] = []

    def pool(self) -> None:
        """Memory is the allocator's."""

    def capture(self, launch: Callable[[], None], generator: torch.Generator | None, pool: None) -> StandInGraph:
        """Take down what `launch` calls, and undo what it did."""
        state = None if generator is None else generator.get_state()
        taking = _TakesDown(self.refused)
        try:
            with taking:
                launch()
        finally:
            taking.undo()
            if generator is not None and state is not None:
                generator.set_state(state)
        self.made.append(StandInGraph(taking.calls))
        return self.made[-1]
