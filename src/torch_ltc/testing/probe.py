"""The activity of the device during a case, seen through its events.

Owns the settings of a run: for "ltc" it chooses the backend and listens; for "cpu" (eager compared with itself, which
tests the conformance run) there is nothing to choose. Also owns the judgement on fallbacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ltc import events, ir_cache
from torch_ltc.api import sync, wait_device_ops
from torch_ltc.config import SETTINGS, settings
from torch_ltc.errors import CompileError, LtcError
from torch_ltc.execute.capture import graphs_of
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.registry import registry
from torch_ltc.pytorch.private import TorchDispatchMode
from torch_ltc.record.buffer import physical_device
from torch_ltc.testing.outcome import describe, first_line
from torch_ltc.testing.records import Difference, What

RUNS_PER_CASE = 2
"""A compiler runs a case twice: what is wrong only in the second run of a compiled program shows then."""
RUNS_PER_CAPTURED_CASE = 4
"""With `cuda_graphs = "always"` the second run captures, and the next two replay."""


@dataclass(slots=True)
class Activity:
    """The activity of the device during one run of a case."""

    fallbacks: list[str] = field(default_factory=list)
    executed_by: list[str] = field(default_factory=list)
    """The backend of each program that ran to its end."""
    programs: list[int] = field(default_factory=list)
    """And which program it was."""
    mismatches: list[str] = field(default_factory=list)


class Probe:
    """A device set up for a run, and its activity in each case. Made by `opened`."""

    def __init__(self, device: str, backend: Backend | None) -> None:
        self.device = device
        self.backend = "" if backend is None else backend.name
        self.spec: Backend = backend or registry.reference
        """Its attributes say how strictly to judge; eager compared with itself is held to the interpreter's."""
        self.eager = str(physical_device())
        """The device on which eager computes the expected values: programs run there too."""
        self.compiles = backend is not None and backend is not registry.reference
        self._activity = Activity()
        self._refusals: dict[int, Difference] = {}

    @property
    def runs_per_case(self) -> int:
        """The number of runs of a case on the device."""
        if self.backend and settings.cuda_graphs == "always" and graphs_of(physical_device()) is not None:
            return RUNS_PER_CAPTURED_CASE
        return RUNS_PER_CASE if self.compiles else 1

    def settle(self) -> None:
        """Ends what the last case left behind, so that a failure of it cannot show in the next one."""
        if self.backend:
            # The case that recorded it has been judged already.
            with contextlib.suppress(LtcError):
                sync(wait=True)
        self.take()

    def wait(self) -> list[Difference]:
        """Waits for programs that nobody read from, as one that only makes views; what one of them raised."""
        try:
            if self.backend:
                wait_device_ops()
        except CompileError as error:
            return [Difference(What.REFUSED, first_line(str(error)))]
        except LtcError as error:
            return [Difference(What.RAISES, f"a program raised {describe(error)}")]
        return []

    def wait_for(self, results: object) -> Exception | None:
        """Runs what is pending while `results` are held; the error that it raised, if it did."""
        try:
            if self.backend:
                sync(wait=True)
        except LtcError as error:
            return error
        return None

    def take(self) -> Activity:
        """The activity since the last call."""
        activity, self._activity = self._activity, Activity()
        return activity

    def not_taken(self, activity: Activity) -> list[Difference]:
        """A difference if another backend than the one under test ran something."""
        if not self.compiles:
            return []
        for backend, program in zip(activity.executed_by, activity.programs, strict=True):
            if backend != self.backend:
                # A program is refused once, and then run by the other one whenever it comes again.
                unknown = Difference(What.REFUSED, f"{backend} ran it instead of {self.backend}")
                return [self._refusals.get(program, unknown)]
        return []

    def on_event(self, event: events.Event) -> None:
        """Listener."""
        activity = self._activity
        match event:
            # Sparse tensors live on the physical device by design: calls that take or make them run there.
            case events.FallbackEvent() if "strided" not in event.reason:
                activity.fallbacks.append(event.op)
            case events.ExecuteEvent(failed=False):
                activity.executed_by.append(event.backend)
                activity.programs.append(event.program)
            case events.RefusalEvent():
                # To take a program and then to fail with it is not to refuse it.
                what = What.REFUSED if event.stage == "compile" else What.RAISES
                self._refusals[event.program] = Difference(what, first_line(event.reason))
            case events.MismatchEvent():
                activity.mismatches.append(f"{event.op}: promised {event.inferred}, got {event.actual}")


@contextlib.contextmanager
def opened(device: str, backend: Backend | None) -> Iterator[Probe]:
    """A probe of the backend, with settings under which it compiles every program; all is put back at the end."""
    probe = Probe(device, backend)
    if backend is None:
        yield probe
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(settings.scope(**_settings(backend)))
        # Programs that this process knows may be compiled, or refused, already; and afterwards by this run.
        ir_cache.reset()
        stack.callback(ir_cache.reset)
        kinds = (events.FallbackEvent, events.ExecuteEvent, events.RefusalEvent, events.MismatchEvent)
        stack.callback(events.subscribe(probe.on_event, *kinds))
        stack.callback(probe.settle)
        yield probe


def _settings(backend: Backend) -> dict[str, str | int | bool]:
    """Programs are compiled as early as can be, and a program that the backend refuses raises."""
    hot = SETTINGS["hot_after"]
    changes: dict[str, str | int | bool] = {"backend": backend.name, "fallback": "allow", "hot_after": hot.minimum or 1}
    # What is tested is what this process compiles of this very program, at the run that is looked at.
    changes |= {"tiers": "blocking", "cache_dir": "off", "promotion": False, "eager_regions": "off"}
    return {**changes, "backend_failure": "error"}


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
    """True when the shape of the result depends on data: tagged so by PyTorch, or not a tensor at all."""
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
