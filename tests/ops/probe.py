"""What the device did during a case, seen through its events.

Owns the choice of device: for "ltc" it imports the package, sets the backend and listens; for "cpu" (the sweep
comparing eager with itself, to test the sweep) there is nothing to listen to. Also owns the judgement on fallbacks.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.records import Difference, What

COMPILERS = frozenset({"torchscript"})
"""Backends that compile from the second sight of a program on: a case runs twice on them."""


@dataclass(slots=True)
class Activity:
    """What happened on the device during one run of a case."""

    fallbacks: list[str] = field(default_factory=list)
    executed_by: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)


class Probe:
    """Sets up a device for the sweep and says what it did in each run."""

    def __init__(self, device: str, backend: str) -> None:
        self.device = device
        self.backend = backend
        self.listens = device != "cpu"
        self._activity = Activity()
        self._package: Any = None
        if self.listens:
            self._subscribe()

    @property
    def runs_per_case(self) -> int:
        return 2 if self.listens and self.backend in COMPILERS else 1

    def settle(self) -> None:
        """Ends what the last case left behind, so that a failure of it cannot show in the next one."""
        if self._package is not None:
            # The case that recorded it has been judged already.
            with contextlib.suppress(self._package.errors.LtcError):
                self._package.sync(wait=True)
        self.take()

    def take(self) -> Activity:
        """What happened since the last call."""
        activity, self._activity = self._activity, Activity()
        return activity

    def _subscribe(self) -> None:
        # Imported here because the sweep must also run without the package, comparing eager with itself.
        events = importlib.import_module("torch_ltc.events")
        self._package = importlib.import_module("torch_ltc")
        settings = importlib.import_module("torch_ltc.config").settings
        settings.backend = self.backend
        settings.fallback = "allow"
        settings.hot_after = self.runs_per_case if self.backend in COMPILERS else settings.hot_after
        events.subscribe(self._on_fallback, events.FallbackEvent)
        events.subscribe(self._on_execute, events.ExecuteEvent)
        events.subscribe(self._on_mismatch, events.MismatchEvent)

    def _on_fallback(self, event: Any) -> None:
        # Sparse tensors live on the physical device by design: calls that take or make them run there.
        if "strided" not in event.reason:
            self._activity.fallbacks.append(event.op)

    def _on_execute(self, event: Any) -> None:
        if not event.failed:
            self._activity.executed_by.append(event.backend)

    def _on_mismatch(self, event: Any) -> None:
        self._activity.mismatches.append(f"{event.op}: promised {event.inferred}, got {event.actual}")


def unneeded_fallbacks(fallbacks: Iterable[str], run_eagerly: Callable[[], object]) -> list[Difference]:
    """A difference for each operator that ran eagerly although the shape of its result does not depend on data.

    `run_eagerly` runs the same case on the CPU; it is called only when indexing fell back, to see whether the index
    was a mask: PyTorch tags all indexing as data-dependent.
    """
    names = sorted(set(fallbacks))
    masked = True
    if any(name.startswith("aten::index") for name in names):
        with _MaskedIndexing() as watcher:
            run_eagerly()
        masked = watcher.seen
    unneeded = [name for name in names if not is_dynamic(name) or (name.startswith("aten::index") and not masked)]
    return [Difference(What.FALLBACK, f"unneeded fallback of {name}") for name in unneeded]


def is_dynamic(name: str) -> bool:
    """Whether the operator's result has no shape before it runs: tagged so by PyTorch, or not a tensor at all."""
    namespace, _, rest = name.partition("::")
    base, _, overload_name = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        return False
    overloads = packet.overloads()
    chosen = [overload_name] if overload_name in overloads else [each for each in ["default"] if each in overloads]
    return any(_overload_is_dynamic(getattr(packet, each)) for each in chosen or overloads)


def _overload_is_dynamic(overload: Any) -> bool:
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(overload.tags):
        return True
    return any("Tensor" not in str(result.type) for result in overload._schema.returns)


class _MaskedIndexing(TorchDispatchMode):
    """Sees whether a tensor is indexed with a mask, so that the size of the result depends on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            self.seen |= any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return func(*args, **(kwargs or {}))
