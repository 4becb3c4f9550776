"""Models train on every compiling backend as on eager CPU: the same losses, one program a step, compiled once."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import torch_ltc
from tests.models import training
from tests.models.layer_cases import LAYER_CASES
from tests.models.training import Case, Training
from tests.models.transformer_cases import TRANSFORMER_CASES
from torch_ltc import events
from torch_ltc.config import settings

STEPS = 6
# Steps are counted from 0. By the fourth the program is hot, and numbers that change have been seen to change.
FIRST_STEP_WITHOUT_COMPILE = 4
# A compiler adds up in another order than eager. Losses are sums of few terms. Gradients are compared at the scale of
# the largest gradient of the step: one that cancels, like that of a bias before a batch norm, is nothing but rounding.
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3

NAMES = ("mlp_adam", "convnet", "encoder", "attention_dropout", "bert", "llama")
CASES = {case.name: case for case in (*LAYER_CASES, *TRANSFORMER_CASES)}
needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="the extra [xla] is not installed")
BACKENDS = ["torchscript", "inductor", pytest.param("xla", marks=needs_jax)]

each_case = pytest.mark.parametrize("case", [CASES[name] for name in NAMES], ids=lambda case: case.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@cache
def eager_training(case: Case) -> Training:
    return training.run(case, "cpu", STEPS)


@cache
def device_training(case: Case, backend: str) -> tuple[Training, list[events.RefusalEvent]]:
    """The training on the device, and what the backend refused."""
    refusals: list[events.RefusalEvent] = []
    stop = events.subscribe(refusals.append, events.RefusalEvent)  # type: ignore[arg-type]
    try:
        with settings.scope(backend=backend, fallback="allow"):
            return training.run(case, "ltc", STEPS), refusals
    finally:
        stop()


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor], step: int) -> None:
    assert actual.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name],
            gradient,
            rtol=0.0,
            atol=GRADIENT_TOLERANCE * scale,
            msg=lambda text, name=name: f"gradient of {name} in step {step}\n{text}",
        )


@each_backend
@each_case
def test_losses_and_gradients_are_those_of_eager(case: Case, backend: str) -> None:
    expected = eager_training(case)
    training.assert_learned(expected)
    actual, _ = device_training(case, backend)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=LOSS_TOLERANCE, atol=0.0)
    for step, (ours, theirs) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        assert_gradients_close(ours, theirs, step)


@each_backend
@each_case
def test_a_step_is_one_program_that_the_backend_runs(case: Case, backend: str) -> None:
    trained, refusals = device_training(case, backend)
    assert refusals == []
    steady = trained.observed[FIRST_STEP_WITHOUT_COMPILE - 1 :]
    assert [[sync.reason.name for sync in step.syncs] for step in steady] == [["OPTIMIZER"]] * len(steady)
    assert len({sync.program for step in steady for sync in step.syncs}) == 1
    assert [(run.backend, run.failed) for step in steady for run in step.runs] == [(backend, False)] * len(steady)
    assert [event.op for step in trained.observed for event in step.fallbacks] == []


@each_backend
@each_case
def test_compiling_ends_with_the_fourth_step(case: Case, backend: str) -> None:
    trained, _ = device_training(case, backend)
    steady = trained.observed[FIRST_STEP_WITHOUT_COMPILE:]
    assert [len(step.compiles) for step in steady] == [0] * len(steady)


def scheduled_losses(device: str, steps: int) -> list[Tensor]:
    """A training in which the learning rate and the bias corrections of Adam are other numbers in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)).to(device)
    optimizer = Adam(model.parameters(), lr=0.05, foreach=True)
    scheduler = CosineAnnealingLR(optimizer, steps)
    inputs, labels = torch.rand(16, 12).to(device), torch.arange(16).remainder(3).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return [loss.cpu() for loss in losses]


@each_backend
def test_numbers_that_change_in_every_step_are_no_reason_to_compile_again(backend: str) -> None:
    compiles: list[events.CompileEvent] = []
    expected = scheduled_losses("cpu", 12)
    stop = events.subscribe(compiles.append, events.CompileEvent)  # type: ignore[arg-type]
    try:
        with settings.scope(backend=backend, backend_failure="error"):
            actual = scheduled_losses("ltc", 12)
    finally:
        stop()
    torch.testing.assert_close(actual, expected, rtol=LOSS_TOLERANCE, atol=0.0)
    assert {event.backend for event in compiles} == {backend}
    # The first step, which makes the state of the optimizer, is a program of its own.
    assert len(compiles) == len({event.program for event in compiles})


def draws(x: Tensor) -> dict[str, Tensor]:
    """Random numbers of every common kind; masks of one shape, of another shape and of another layout among them."""
    return {
        "mask": F.dropout(x, 0.3),
        "second mask": F.dropout(x + 1, 0.3),
        "transposed mask": F.dropout(x[:2].t(), 0.5),
        "feature mask": F.dropout2d(x.view(2, 3, 3, 3), 0.5),
        "uniform": torch.rand_like(x),
        "normal": torch.empty_like(x).normal_(),
        "bernoulli": torch.bernoulli(x / 2),
        "integers": torch.randint(100, x.shape, device=x.device),
        "permutation": torch.randperm(20, device=x.device),
    }


@pytest.mark.parametrize("backend", ["interpreter", *BACKENDS])
def test_random_numbers_have_the_bits_of_eager(backend: str) -> None:
    x = torch.ones(6, 9)
    with settings.scope(backend=backend):
        for seed in range(4):
            torch.manual_seed(seed)
            expected = draws(x)
            torch.manual_seed(seed)
            actual: dict[str, Any] = draws(x.to("ltc"))
            torch_ltc.sync()
            for name, theirs in expected.items():
                ours = actual[name].cpu()
                # A mask is scaled by the backend, which may round; where it is zero was drawn.
                assert torch.equal(ours == 0, theirs == 0), (name, seed)
                exact = {} if "mask" in name else {"rtol": 0.0, "atol": 0.0}
                torch.testing.assert_close(ours, theirs, **exact, msg=lambda text, name=name: f"{name}\n{text}")
