"""Gradients and training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_ltc.events import SyncEvent, SyncReason, subscribe
from torch_ltc.testing.semantics.table import Stage, case

STEPS = 4


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def _batch(on: Stage, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * on.round + number)
    inputs = torch.randn(5, 6, generator=generator)
    return inputs.to(on.device), torch.randint(0, 3, (5,), generator=generator).to(on.device)


def _train(on: Stage, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for number in range(STEPS):
        inputs, labels = _batch(on, number)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@case(tolerance=(1e-4, 1e-5))
def mlp_adam(on: Stage) -> Any:
    """An MLP trained by Adam."""
    model = _model().to(on.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = _train(on, model, optimizer)
    moments = [optimizer.state[each]["exp_avg_sq"] for each in model.parameters()]
    return [losses, [each.detach() for each in model.parameters()], moments]


@case(tolerance=(1e-4, 1e-5))
def mlp_sgd(on: Stage) -> Any:
    """An MLP trained by SGD with momentum, its rate changed between steps."""
    model = _model().to(on.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = _train(on, model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.025
    return [losses, _train(on, model, optimizer), [each.detach() for each in model.parameters()]]


@case()
def one_program_per_step(on: Stage) -> Any:
    """A training step, forward, backward and optimizer, is one program, the same in every step."""
    model = _model().to(on.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(on, model, optimizer)
    on.sync()
    syncs: list[SyncEvent] = []

    def listen(event: Any) -> None:
        syncs.append(event)

    stop = subscribe(listen, SyncEvent)
    try:
        _train(on, model, optimizer)
    finally:
        stop()
    steps = [each for each in syncs if each.reason is SyncReason.OPTIMIZER]
    on.claim(len(syncs) == len(steps) == STEPS, f"{STEPS} steps were {len(syncs)} programs")
    on.claim(len({each.program for each in syncs}) == 1, "the steps were not one program again and again")
    return [each.detach() for each in model.parameters()]


@case(tolerance=(1e-5, 1e-5))
def gradients(on: Stage) -> Any:
    """Gradients of views, writes, indexing and reductions."""
    x = on.ramp(4, 4).requires_grad_()
    y = on.ramp(4).requires_grad_()
    hidden = (x.t()[1:] * y).clone()
    hidden[0].mul_(2)
    hidden = hidden.index_select(0, on.tensor([0, 2, 2], torch.int64)).sigmoid() + y.max()
    total = (hidden * torch.stack([y, y, y])).sum() + x.diagonal().prod() * 1e-3
    total.backward()
    return [total.detach(), x.grad, y.grad]


@case(tolerance=(1e-5, 1e-5))
def more_gradients(on: Stage) -> Any:
    """Gradients that add up over two backward passes, and a gradient of a gradient."""
    x = on.ramp(3).requires_grad_()
    (x * x).sum().backward()
    on.sync()
    (x * 3).sum().backward()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return [x.grad, first.detach(), second]


# Gradients reach 300 and one of them cancels to 0: eager itself is off by 5e-4 there, against float64.
@case(tolerance=(1e-4, 2e-3))
def running_statistics(on: Stage) -> Any:
    """Batch normalisation writes its running statistics in training and leaves them in evaluation."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU()).to(on.device)
    images = (on.ramp(2, 2, 6, 6) * 0.01).sin()
    # Of a plain sum, and of a bias before the normalisation, the gradient is what rounding leaves of a zero.
    weights = (on.ramp(2, 3, 4, 4) * 0.7).cos()
    for _ in range(3):
        (model(images) * weights).sum().backward()
        on.sync()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    result = model(images)
    gradients = [each.grad for each in model.parameters()]
    return [trained, result.detach(), dict(model.state_dict()), gradients]
