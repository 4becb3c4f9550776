"""Running one training on a device, what came of it, and how two of them are compared.

Owns the order of a step (seed, forward, backward, optimizer, then read) and the record of it: a `Training` holds plain
CPU data and the events of every step, so that the tests only compare. It knows no model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torch_ltc
from torch_ltc import events
from torch_ltc.config import settings

STEPS = 5
# Steps are counted from 0. The first creates the optimizer's state; the second is the first execution of the program
# that every later step repeats, and the third, its second execution, compiles it: from here on every step is the same.
FIRST_STEADY_STEP = 2
FIRST_STEP_WITHOUT_COMPILE = 3

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """A model, its data and its optimizer; `loss` gets the model and a batch on the model's device."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    # PyTorch prefers foreach for every accelerator but not for CPU, and the two forms round differently: on CPU it has
    # to be asked for, on the device the default is what is tested.
    cpu_options: Mapping[str, Any] = field(default_factory=lambda: {"foreach": True})


@dataclass(slots=True)
class Observed:
    """The events of one step, in order."""

    syncs: list[events.SyncEvent] = field(default_factory=list)
    compiles: list[events.CompileEvent] = field(default_factory=list)
    runs: list[events.ExecuteEvent] = field(default_factory=list)
    fallbacks: list[events.FallbackEvent] = field(default_factory=list)


@dataclass(slots=True)
class Training:
    """What a training gave: per step the loss, the gradients by parameter name and the events; the state at its end."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    observed: list[Observed] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def observe() -> Iterator[Observed]:
    """The events of the device while the block runs, those of programs that were queued in it included."""
    observed = Observed()
    unsubscribe = [
        events.subscribe(observed.syncs.append, events.SyncEvent),
        events.subscribe(observed.compiles.append, events.CompileEvent),
        events.subscribe(observed.runs.append, events.ExecuteEvent),
        events.subscribe(observed.fallbacks.append, events.FallbackEvent),
    ]
    try:
        yield observed
        torch_ltc.wait_device_ops()
    finally:
        for stop in unsubscribe:
            stop()


def read(tensor: Tensor) -> Tensor:
    """The values now, on CPU, not aliased with anything."""
    return tensor.detach().cpu().clone()


def run(case: Case, device: str, steps: int = STEPS) -> Training:
    """Train a model built with a fixed seed for some steps on `device`."""
    torch.manual_seed(0)
    model = copy.deepcopy(case.build()).to(device)
    options = {**case.options, **(case.cpu_options if device == "cpu" else {})}
    optimizer = case.optimizer(model.parameters(), **options)
    data = torch.Generator().manual_seed(1)
    training = Training()
    for step in range(steps):
        batch = case.batch(data)
        with observe() as observed:
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = case.loss(model, tuple(tensor.to(device) for tensor in batch))
            loss.backward()
            optimizer.step()
            training.losses.append(read(loss))
            training.gradients.append(
                {name: read(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            )
        training.observed.append(observed)
    training.state = {name: read(tensor) for name, tensor in model.state_dict().items()}
    return training


# Each training is looked at by several tests; cases compare by identity, so that the key is exact.
@cache
def eager_training(case: Case) -> Training:
    """The training on eager CPU: the oracle."""
    return run(case, "cpu")


@cache
def device_training(case: Case, backend: str) -> Training:
    """The training on the device with one backend; fallbacks are allowed here, since a test counts them."""
    with settings.scope(backend=backend, fallback="allow"):
        return run(case, "ltc")


def assert_equal(actual: Training, expected: Training, *, rtol: float, atol: float) -> None:
    """Losses, gradients and final state agree within the tolerances; zero means bit for bit."""

    def compare(what: str, left: Tensor, right: Tensor) -> None:
        torch.testing.assert_close(
            left, right, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what} differs\n{text}"
        )

    assert len(actual.losses) == len(expected.losses)
    for step, (left, right) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        compare(f"loss of step {step}", left, right)
    for step, (lefts, rights) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        assert lefts.keys() == rights.keys()
        for name, right in rights.items():
            compare(f"gradient of {name} in step {step}", lefts[name], right)
    assert actual.state.keys() == expected.state.keys()
    for name, right in expected.state.items():
        compare(f"final {name}", actual.state[name], right)


def assert_learned(training: Training) -> None:
    """The training did something: a comparison of two models that never changed would prove nothing."""
    assert len({loss.item() for loss in training.losses}) > 1
    assert any(gradient.abs().max() > 0 for gradient in training.gradients[-1].values())


def assert_interpreter_bit_equal(case: Case) -> None:
    """On the interpreter every loss, gradient and final value has the bits of CPU eager."""
    expected = eager_training(case)
    assert_learned(expected)
    assert_equal(device_training(case, "interpreter"), expected, rtol=0.0, atol=0.0)


def assert_torchscript_close(case: Case) -> None:
    """On TorchScript every loss, gradient and final value is that of CPU eager within float32 rounding."""
    assert_equal(device_training(case, "torchscript"), eager_training(case), rtol=1e-4, atol=1e-5)


def assert_one_program_per_step(case: Case, backend: str) -> None:
    """In steady state forward, backward and optimizer are one program, the same in every step."""
    steady = device_training(case, backend).observed[FIRST_STEADY_STEP:]
    counts = [[(sync.reason.name, sync.source) for sync in observed.syncs] for observed in steady]
    assert [len(count) for count in counts] == [1] * len(steady), counts
    assert len({observed.syncs[0].program for observed in steady}) == 1
    assert all(observed.syncs[0].known for observed in steady)


def assert_compiles_stop(case: Case) -> None:
    """After the third step TorchScript runs what it has compiled, and compiles nothing more."""
    steady = device_training(case, "torchscript").observed[FIRST_STEP_WITHOUT_COMPILE:]
    assert [len(observed.compiles) for observed in steady] == [0] * len(steady)
    # Whether this training or an earlier one with the same program compiled it does not matter: it runs compiled.
    assert [(run.backend, run.failed) for observed in steady for run in observed.runs] == [
        ("torchscript", False)
    ] * len(steady)


def assert_no_fallbacks(case: Case, backend: str) -> None:
    """No operation of the training had to run eagerly."""
    observed = device_training(case, backend).observed
    assert [(event.op, event.reason) for step in observed for event in step.fallbacks] == []
