"""PyTorch's optimizers, in every form they have, change parameters on the device as on eager CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from tests.models import training
from tests.models.layer_cases import classification_loss, multilayer_perceptron, vectors
from tests.models.training import Case
from torch_ltc import events
from torch_ltc.config import settings

Options = Mapping[str, Any]

OPTIMIZERS: list[tuple[str, type[Optimizer], Options]] = [
    ("sgd", SGD, {"lr": 0.05}),
    ("sgd_momentum", SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    ("adam", Adam, {"lr": 0.01}),
    ("adam_amsgrad", Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    ("adamw", AdamW, {"lr": 0.01}),
    ("rmsprop", RMSprop, {"lr": 0.01}),
    ("rmsprop_centered", RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("adagrad", Adagrad, {"lr": 0.05, "lr_decay": 0.01}),
    ("adadelta", Adadelta, {"lr": 1.0}),
    ("nadam", NAdam, {"lr": 0.01}),
    ("radam", RAdam, {"lr": 0.01}),
    ("adamax", Adamax, {"lr": 0.01}),
    ("asgd", ASGD, {"lr": 0.05}),
    ("rprop", Rprop, {"lr": 0.01}),
]
# Where PyTorch has a fused CPU kernel, and where the step counter may live on the device.
FUSED = (SGD, Adam, AdamW, Adagrad)
CAPTURABLE = (Adam, AdamW, RMSprop, Adadelta, NAdam, RAdam, Adamax, ASGD, Rprop)


def case(name: str, kind: type[Optimizer], options: Options, cpu_options: Options) -> Case:
    """The training of a small network with one form of one optimizer."""
    return Case(name, multilayer_perceptron, vectors, classification_loss, kind, options, cpu_options)


def _matrices() -> nn.Module:
    """The same network without biases."""
    return nn.Sequential(*(
        nn.Linear(layer.in_features, layer.out_features, bias=False) if isinstance(layer, nn.Linear) else layer
        for layer in multilayer_perceptron().children()
    ))  # fmt: skip


EXACT_CASES = [
    # Its default is the single form, on every device.
    *(
        case(f"adafactor_{name}", Adafactor, {"lr": 0.01, "weight_decay": 0.01, "foreach": foreach}, {})
        for name, foreach in (("default", None), ("single", False), ("foreach", True))
    ),
    Case("muon", _matrices, vectors, classification_loss, Muon, {"lr": 0.01}, {}),
    *(case(f"{name}_default", kind, options, {"foreach": True}) for name, kind, options in OPTIMIZERS),
    *(case(f"{name}_single", kind, {**options, "foreach": False}, {}) for name, kind, options in OPTIMIZERS),
    *(
        case(f"{name}_fused", kind, {**options, "fused": True}, {})
        for name, kind, options in OPTIMIZERS
        if kind in FUSED
    ),
]
# A capturable optimizer computes its bias corrections in float32 on the device instead of in Python's floats.
CAPTURABLE_CASES = [
    case(f"{name}_capturable", kind, {**options, "capturable": True}, {"capturable": False, "foreach": True})
    for name, kind, options in OPTIMIZERS
    if kind in CAPTURABLE
]
# In the middle of their steps ASGD reads its step counter, which lives on the device, unless it is capturable, and
# Adafactor the norms of updates and parameters.
ONE_PROGRAM_CASES = [*(case for case in EXACT_CASES if case.optimizer not in {ASGD, Adafactor}), *CAPTURABLE_CASES]
# Two that take no ordinary step: LBFGS calls for losses, and SparseAdam takes sparse gradients. Both have tests below.
OTHERS = {LBFGS, SparseAdam}


def test_no_optimizer_is_left_out() -> None:
    found = {kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert found - {Optimizer} == {case.optimizer for case in EXACT_CASES} | OTHERS


def identify(case: Case) -> str:
    """The case's name in test reports."""
    return case.name


@pytest.mark.parametrize("case", EXACT_CASES, ids=identify)
def test_interpreter_training_has_the_bits_of_eager(case: Case) -> None:
    training.assert_interpreter_bit_equal(case)


@pytest.mark.parametrize("case", CAPTURABLE_CASES, ids=identify)
def test_capturable_training_equals_eager_within_rounding(case: Case) -> None:
    expected = training.eager_training(case)
    training.assert_learned(expected)
    training.assert_equal(training.device_training(case, "interpreter"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", EXACT_CASES + CAPTURABLE_CASES, ids=identify)
def test_torchscript_training_equals_eager_within_rounding(case: Case) -> None:
    training.assert_torchscript_close(case)


@pytest.mark.blocking_session
@pytest.mark.parametrize("case", ONE_PROGRAM_CASES, ids=identify)
def test_steady_step_is_one_program_compiled_once(case: Case) -> None:
    training.assert_one_program_per_step(case, "torchscript")
    training.assert_compiles_stop(case)
    training.assert_no_fallbacks(case, "torchscript")


def minimise_with_lbfgs(device: str) -> list[Tensor]:
    """The parameters after three steps of LBFGS, which reads losses and dot products to decide how to go on."""
    torch.manual_seed(0)
    model: nn.Module = copy.deepcopy(multilayer_perceptron()).to(device)
    inputs, labels = (tensor.to(device) for tensor in vectors(torch.Generator().manual_seed(1)))
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return [training.read(parameter) for parameter in model.parameters()]


def test_lbfgs_takes_the_same_path_as_on_eager() -> None:
    with settings.scope(backend="interpreter"):
        actual = minimise_with_lbfgs("ltc")
    torch.testing.assert_close(actual, minimise_with_lbfgs("cpu"), rtol=0.0, atol=0.0)


def test_sparse_gradients_change_the_rows_that_eager_changes() -> None:
    def train(device: str) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True).to(device)
        optimizer = SparseAdam(table.parameters(), lr=0.1)
        for rows in ([0, 2, 2], [3, 0, 1]):
            optimizer.zero_grad()
            table(torch.tensor(rows, device=device)).square().sum().backward()
            optimizer.step()
        return training.read(table.weight)

    with settings.scope(backend="interpreter"):
        actual = train("ltc")
    torch.testing.assert_close(actual, train("cpu"), rtol=0.0, atol=0.0)


def train_with(
    device: str, kind: type[Optimizer], steps: int, start: tuple[nn.Module, Any] | None = None, late: bool = False
) -> tuple[nn.Module, Any]:
    """A network and its optimizer after some steps, begun with the state of others of any device. With `late`, its last
    layer joins the optimizer after two steps."""
    model = copy.deepcopy(multilayer_perceptron() if start is None else start[0]).to(device)
    layers = list(model.children())
    first = [parameter for layer in layers[:-1] for parameter in layer.parameters()]
    optimizer: Any = kind(first if late else model.parameters(), lr=0.01)  # type: ignore[call-arg]
    if start is not None:
        optimizer.load_state_dict(copy.deepcopy(start[1].state_dict()))
    inputs, labels = (tensor.to(device) for tensor in vectors(torch.Generator().manual_seed(1)))
    for step in range(steps):
        if late and step == 2:
            optimizer.add_param_group({"params": layers[-1].parameters(), "lr": 0.02})
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model, optimizer


def assert_same_parameters(actual: nn.Module, expected: nn.Module) -> None:
    """Equal to the bit."""
    pairs = [[training.read(parameter) for parameter in model.parameters()] for model in (actual, expected)]
    torch.testing.assert_close(pairs[0], pairs[1], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", [SGD, Adam, RMSprop])
def test_parameters_that_join_an_optimizer_late_are_trained_as_on_eager(kind: type[Optimizer]) -> None:
    models = []
    for device in ("ltc", "cpu"):
        torch.manual_seed(0)
        with settings.scope(backend="interpreter"):
            model, optimizer = train_with(device, kind, 4, late=True)
        assert len(optimizer.param_groups) == 2
        models.append(model)
    assert_same_parameters(*models)


@pytest.mark.parametrize("kind", [Adam, AdamW, RMSprop, Adagrad])
@pytest.mark.parametrize(("before", "after"), [("cpu", "ltc"), ("ltc", "cpu")])
def test_the_state_of_an_optimizer_goes_from_one_device_to_the_other(
    kind: type[Optimizer], before: str, after: str
) -> None:
    torch.manual_seed(0)
    start = multilayer_perceptron()
    fresh = kind(start.parameters())
    with settings.scope(backend="interpreter"):
        half = train_with(before, kind, 3, (start, fresh))
        actual, _ = train_with(after, kind, 3, half)
    expected, _ = train_with("cpu", kind, 3, train_with("cpu", kind, 3, (start, fresh)))
    assert_same_parameters(actual, expected)


def test_clipping_the_gradients_belongs_to_the_program_of_the_step() -> None:
    syncs: list[events.SyncEvent] = []
    train_with("ltc", Adam, 1)
    stop = events.subscribe(syncs.append, events.SyncEvent)
    try:
        train_with("ltc", Adam, 3)
    finally:
        stop()
    assert [sync.reason for sync in syncs] == [events.SyncReason.OPTIMIZER] * 3
