"""What is run: the workloads a to j and two small ones for single figures.

A workload builds its model and data for a system, always with the same random numbers, and hands back a step. A step
does one unit of work and returns a tensor with one element to be read, and whatever must stay alive until then: a
result that nobody holds would leave a lazy device nothing to compute.
"""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.models import Lstm, Mlp, ResNet, Transformer, squared_error
from benchmarks.systems import System

Step = Callable[[], tuple[Tensor, object]]

TINY_ADDS = 200
POINTWISE_SIZE = 4 * 1024 * 1024
BATCHES = 4
BRANCHES = 8
GENERATED_TOKENS = 64
DRAWN_SIZES = 50
LARGEST_BATCH = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """One thing to run, and what can be said about it."""

    key: str
    title: str
    build: Callable[[System], Step]
    has_optimizer: bool = True
    # Reads happen inside code that is not ours: what is not recording cannot be told apart on every system.
    hides_reads: bool = False
    # Steps after which the data comes again: steps are compared in whole periods.
    period: int = 1


def _random(*size: int) -> Tensor:
    return torch.randn(*size)


def trainer(
    system: System,
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    optimizer: Callable[[Any], Optimizer],
    loss_of: Callable[[Tensor, Tensor], Tensor] = squared_error,
    schedule: Callable[[Optimizer], LambdaLR] | None = None,
) -> Step:
    """A training step on the next of `batches`, which lie on the device already."""
    model = model.to(system.device)
    data = itertools.cycle([(x.to(system.device), y.to(system.device)) for x, y in batches])
    update = optimizer(model.parameters())
    scheduler = schedule(update) if schedule is not None else None
    loss_function = system.compile_loss(lambda x, y: loss_of(model(x), y))
    apply_update = system.compile_update(update.step)

    def train(x: Tensor, y: Tensor) -> Tensor:
        update.zero_grad()
        loss = loss_function(x, y)
        loss.backward()
        apply_update()
        return loss.detach()

    train_step = system.compile_step(train)

    def step() -> tuple[Tensor, object]:
        loss = train_step(*next(data))
        if scheduler is not None:
            scheduler.step()
        return loss, None

    return step


def _probed(system: System, chain: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """A step that computes `chain(x)`, of which the first element is read."""
    compiled = system.compile_loss(chain)

    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        y = compiled(x)
        return y[0], y

    whole = system.compile_step(compute)
    return lambda: whole(x)


def _tiny_adds(system: System) -> Step:
    x = _random(16).to(system.device)

    def chain(x: Tensor) -> Tensor:
        y = x
        for _ in range(TINY_ADDS):
            y = y + x
        return y

    return _probed(system, chain, x)


def _pointwise(system: System) -> Step:
    x = _random(POINTWISE_SIZE).to(system.device)

    def chain(x: Tensor) -> Tensor:
        y = x
        for _ in range(6):
            # Cheap operations only: the chain is bound by memory, not by arithmetic.
            y = ((y * 0.5 + 1.0) * x - 0.25).relu()
        return y

    return _probed(system, chain, x)


def _mlp(system: System) -> Step:
    batch = (_random(128, 1024), _random(128, 1024))
    return trainer(system, Mlp(1024, 3), [batch], lambda parameters: SGD(parameters, lr=0.01))


def _transformer(width: int, batch: int, length: int, optimizer: Callable[[Any], Optimizer]) -> Callable[..., Step]:
    def build(system: System) -> Step:
        data = (_random(batch, length, width), _random(batch, length, width))
        return trainer(system, Transformer(width, 4), [data], optimizer)

    return build


def _resnet(system: System) -> Step:
    batch = (_random(32, 3, 32, 32), torch.randint(0, 10, (32,)))
    return trainer(
        system,
        ResNet(),
        [batch],
        lambda parameters: SGD(parameters, lr=0.01, momentum=0.9),
        nn.functional.cross_entropy,
    )


def _lstm(system: System) -> Step:
    batch = (_random(64, 16, 128), _random(16, 128))
    return trainer(system, Lstm(128), [batch], lambda parameters: SGD(parameters, lr=0.01))


class _Branching(nn.Module):
    """Layers chosen by the data: the sign of a sum decides, eight times."""

    def __init__(self, width: int, choose: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.choose = choose
        self.positive = nn.ModuleList(nn.Linear(width, width) for _ in range(BRANCHES))
        self.negative = nn.ModuleList(nn.Linear(width, width) for _ in range(BRANCHES))

    def forward(self, x: Tensor) -> Tensor:
        for positive, negative in zip(self.positive, self.negative):
            x = positive(x).tanh() if self.choose(x.sum() > 0) else negative(x).relu() - 0.1
        return x


def _control_flow(system: System) -> Step:
    batches = [(_random(64, 128), _random(64, 128)) for _ in range(BATCHES)]
    # A small rate: the paths of the batches differ from each other, and stay nearly the same from step to step.
    return trainer(system, _Branching(128, system.choose), batches, lambda parameters: SGD(parameters, lr=1e-4))


def _generation(system: System) -> Step:
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=1000, n_positions=128, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval().to(system.device)
    model.forward = system.compile_loss(model.forward)
    prompt = torch.randint(0, 1000, (1, 8)).to(system.device)
    mask = torch.ones_like(prompt)

    def step() -> tuple[Tensor, object]:
        tokens = model.generate(
            prompt,
            attention_mask=mask,
            do_sample=False,
            use_cache=True,
            max_new_tokens=GENERATED_TOKENS,
            min_new_tokens=GENERATED_TOKENS,
            pad_token_id=0,
        )
        # The sum of all tokens: one wrong token shows.
        return tokens.sum(), tokens

    return step


def _random_sizes(system: System) -> Step:
    draw = random.Random(0)
    sizes = [draw.randint(1, LARGEST_BATCH) for _ in range(DRAWN_SIZES)]
    batches = [(_random(size, 256), _random(size, 256)) for size in sizes]
    return trainer(system, Mlp(256, 3), batches, lambda parameters: SGD(parameters, lr=0.01))


def _changing_rate(system: System) -> Step:
    return trainer(
        system,
        Mlp(64, 2),
        [(_random(16, 64), _random(16, 64))],
        lambda parameters: Adam(parameters, lr=1e-3),
        schedule=lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + 0.1 * epoch)),
    )


def sgd(parameters: Any) -> Optimizer:
    """Plain gradient descent, the optimizer of the workloads that need no other."""
    return SGD(parameters, lr=0.01)


WORKLOADS: dict[str, Workload] = {
    workload.key: workload
    for workload in (
        Workload("a", "200 tiny adds", _tiny_adds, has_optimizer=False),
        Workload("b", "30 pointwise ops on 4M floats", _pointwise, has_optimizer=False),
        Workload("c", "MLP 3x1024, batch 128, SGD", _mlp),
        Workload("d", "transformer 4x256, seq 128, batch 8, Adam", _transformer(256, 8, 128, Adam)),
        Workload("e", "ResNet-14 on 32x32, batch 32, SGD", _resnet),
        Workload("f", "Python LSTM loop of 64 cells, SGD", _lstm),
        Workload("g", "data-dependent control flow, SGD", _control_flow, period=BATCHES),
        Workload("h", "as d with SGD", _transformer(256, 8, 128, sgd)),
        Workload("i", "GPT-2 generation of 64 tokens", _generation, has_optimizer=False, hides_reads=True),
        Workload("j", "random batch sizes 1 to 32, SGD", _random_sizes, period=DRAWN_SIZES),
        Workload("tiny", "as h at d=64, seq 32, batch 2", _transformer(64, 2, 32, sgd)),
        Workload("rate", "MLP 2x64, Adam, a new lr each step", _changing_rate),
    )
}


def prelude(system: System) -> Step:
    """A tiny training: makes a system import all that it imports late, before memory is measured."""
    return trainer(system, Mlp(8, 2), [(_random(4, 8), _random(4, 8))], sgd)
