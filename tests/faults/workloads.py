"""Small trainings, each with another part of the package at work, on the device and in eager."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from tests.faults.places import Injector
from tests.support.backends import FunctionalBackend, run_functional
from tests.support.graphs import StandInGraphs
from torch_ltc import events
from torch_ltc.compile import background
from torch_ltc.config import settings
from torch_ltc.execute import capture
from torch_ltc.lowering.interface import Backend, Form
from torch_ltc.lowering.serialize import dump_data, load_data
from torch_ltc.program.instruction import Program

__all__ = ["WORKLOADS", "Training", "Workload"]


class Training:
    """Parameters, their velocities and a schedule, on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.losses: list[Any] = []
        made = torch.arange(1.0, 25.0) / 24
        self.load(
            [made[:8].view(4, 2).sin(), made[8:10].cos(), made[10:12].sin() - 0.5, *map(torch.zeros, ((4, 2), 2, 2))]
        )
        self._jit: Callable[..., Tensor] | None = None

    def load(self, values: list[Tensor]) -> None:
        """Give everything this value, in new tensors."""
        self.tensors = [value.to(self.device, copy=True) for value in values]
        for parameter in self.tensors[:3]:
            parameter.requires_grad_()

    def values(self) -> list[Tensor]:
        """All values on the CPU."""
        return [tensor.detach().to("cpu", copy=True) for tensor in self.tensors]

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        x = torch.arange(12.0).view(3, 4).add(number).cos()
        return x.to(self.device), x.sum(1).to(self.device)

    def step(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        """One step of gradient descent with momentum."""
        weight, bias, out, *velocities = self.tensors
        hidden = F.relu(x @ weight + bias)
        loss = F.mse_loss(hidden @ out, y)
        gradients = torch.autograd.grad(loss, [weight, bias, out])
        with torch.no_grad():
            torch._foreach_mul_(velocities, 0.9)
            torch._foreach_add_(velocities, list(gradients))
            torch._foreach_add_([weight, bias, out], velocities, alpha=-rate)
        return loss.detach()

    def selected_step(self, rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The same of chosen rows."""
        return self.step(F.embedding(rows, x), y, 0.1)

    @staticmethod
    def without_data(before: list[Tensor]) -> list[Tensor]:
        """What becomes of these values in a step whose data is wrong: what does not depend on it happens."""
        return [*before[:3], *(velocity * 0.9 for velocity in before[3:])]


Step = Callable[[Training, int, Injector | None], object]


def _rate(number: int) -> float:
    return 0.1 / (number + 1)


def plain_step(training: Training, number: int, injector: Injector | None) -> object:
    """Record a step and sync."""
    loss = training.step(*training.batch(number), _rate(number))
    if training.device == "ltc":
        torch_ltc.sync(wait=True)
        torch_ltc.wait_for_compiles()
    return loss


def reading_step(training: Training, number: int, injector: Injector | None) -> object:
    """Record a step and read its loss."""
    return training.step(*training.batch(number), _rate(number)).item()


def async_step(training: Training, number: int, injector: Injector | None) -> object:
    """Read the loss without waiting for it, then wait."""
    loss = training.step(*training.batch(number), _rate(number))
    if training.device != "ltc":
        return loss
    item = torch_ltc.async_item(loss)
    torch_ltc.sync(wait=True)
    return item.result()


def jit_step(training: Training, number: int, injector: Injector | None) -> object:
    """A step that is replayed."""
    if training.device != "ltc":
        return training.step(*training.batch(number), 0.1)
    if training._jit is None:
        training._jit = torch_ltc.jit(training.step)
    loss = training._jit(*training.batch(number), 0.1)
    torch_ltc.sync(wait=True)
    return loss


def listened_step(training: Training, number: int, injector: Injector | None) -> object:
    """A step with a listener and closures."""
    if injector is None:
        return plain_step(training, number, injector)
    listener = injector.wrap("listener", lambda event: None)
    closure = injector.wrap("step closure", lambda loss: float(loss))
    later = injector.wrap("asynchronous closure", lambda loss: float(loss))
    stop = events.subscribe(listener, events.SyncEvent, events.ExecuteEvent, events.ReadEvent)
    try:
        loss = training.step(*training.batch(number), _rate(number))
        torch_ltc.add_step_closure(closure, (loss,))
        torch_ltc.add_step_closure(later, (loss,), run_async=True)
        torch_ltc.mark_step()
        torch_ltc.closures.wait_step_closures()
        torch_ltc.sync(wait=True)
    finally:
        stop()
    return loss


def selecting_step(training: Training, number: int, injector: Injector | None) -> object:
    """A step with a kernel that looks at its data, and fails itself, whatever calls it."""
    rows: Callable[[], Tensor] = lambda: torch.arange(3)  # noqa: E731
    if injector is not None:
        rows = injector.wrap("rows of a batch", rows, "data")
    loss = training.selected_step(rows().to(training.device), *training.batch(number))
    if training.device == "ltc":
        torch_ltc.sync(wait=True)
        torch_ltc.wait_for_compiles()
    return loss


def selecting_reading_step(training: Training, number: int, injector: Injector | None) -> object:
    """The same, and its loss is read."""
    loss = selecting_step(training, number, injector)
    assert isinstance(loss, Tensor)
    return loss.item()


def selecting_jit_step(training: Training, number: int, injector: Injector | None) -> object:
    """The same in a step that is replayed."""
    if training.device == "ltc" and training._jit is None:
        training._jit = torch_ltc.jit(training.selected_step)
        training.selected_step = training._jit  # type: ignore[method-assign]
    return selecting_step(training, number, injector)


class _Function:
    """A functional program, call by call with PyTorch's kernels."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, *given: Any) -> list[Any]:
        return run_functional(self.program, given)


class OutOfProcessBackend(Backend):
    """The functional form, compiled in the compiler process."""

    name = "faults out of process"
    form = Form.FUNCTIONAL
    compiles_out_of_process = True

    def compile(self, program: Program) -> _Function:
        """A function that walks the program."""
        return _Function(program)

    def dump(self, compiled: Any) -> bytes:
        """The program."""
        return dump_data(compiled.program)

    def load(self, program: Program, data: bytes) -> _Function:
        """The function of a program."""
        del program
        return _Function(load_data(data))


class FaultyFunctional(FunctionalBackend):
    """A functional backend."""

    name = "faults functional"


@dataclass(frozen=True, slots=True)
class Workload:
    """A training with these settings. With `graphs` the CPU has a stand-in for the graphs of a device; with `disk`
    there is a cache folder, and programs are forgotten in the middle, so that they are loaded from it. With `data` its
    data alone are what is wrong."""

    name: str
    step: Step = plain_step
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    exact: bool = True
    graphs: bool = False
    disk: bool = False
    data: bool = False

    @contextmanager
    def surroundings(self) -> Iterator[str]:
        """Settings, graphs and a cache folder, whose name it gives."""
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory()) if self.disk else ""
            chosen = {"tiers": "blocking", "cache_dir": folder or "off", "recompiles": "allow", "hot_after": 2}
            stack.enter_context(settings.scope(**{**chosen, **self.settings}))
            if self.graphs:
                capture._by_device["cpu"] = StandInGraphs()
                stack.callback(capture._by_device.pop, "cpu")
            yield folder
            torch_ltc.wait_for_compiles()
            background.background.wait()


WORKLOADS = (
    Workload("interpreter", settings={"backend": "interpreter"}),
    Workload("interpreter, reading", reading_step, {"backend": "interpreter"}),
    Workload("TorchScript", settings={"backend": "torchscript"}),
    Workload("functional", settings={"backend": "faults functional"}, exact=False),
    Workload("captured", settings={"backend": "interpreter", "cuda_graphs": "always"}, steps=5, graphs=True),
    Workload(
        "captured functional",
        settings={"backend": "faults functional", "cuda_graphs": "always"},
        steps=8,
        exact=False,
        graphs=True,
    ),
    Workload("jit", jit_step, {"backend": "interpreter"}, steps=6),
    Workload("closures and listeners", listened_step, {"backend": "interpreter"}),
    Workload("async_item", async_step, {"backend": "interpreter"}),
    Workload("disk cache", settings={"backend": "torchscript"}, steps=6, disk=True),
    Workload("background", settings={"backend": "torchscript", "tiers": "background"}, steps=5, disk=True),
    Workload("data, interpreter", selecting_step, {"backend": "interpreter"}, steps=6, data=True),
    Workload("data, reading", selecting_reading_step, {"backend": "interpreter"}, steps=6, data=True),
    Workload("data, TorchScript", selecting_step, {"backend": "torchscript"}, steps=6, data=True),
    Workload("data, functional", selecting_step, {"backend": "faults functional"}, steps=6, exact=False, data=True),
    Workload("data, jit", selecting_jit_step, {"backend": "interpreter"}, steps=8, data=True),
    Workload("data, jit of TorchScript", selecting_jit_step, {"backend": "torchscript"}, steps=8, data=True),
    Workload(
        "data, captured",
        selecting_step,
        {"backend": "interpreter", "cuda_graphs": "always"},
        steps=8,
        graphs=True,
        data=True,
    ),
    Workload("compiler process", settings={"backend": "faults out of process", "tiers": "background"}, exact=False),
)
