"""`torch_ltc.jit` of the functions that it is made for, against eager on the CPU, with and without verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from torch_ltc.replay.function import JitFunction

Wrap = Callable[[Any], Any]


class Wrapped:
    """Wraps functions with jit on ltc, not at all on the CPU, and remembers them."""

    def __init__(self, device: str, verify_every: int) -> None:
        self.device = device
        self._verify_every = verify_every
        self.made: list[JitFunction] = []

    def __call__(self, function: Callable[..., Any]) -> Any:
        """The function, or what replays it."""
        if self.device == "cpu":
            return function
        made: JitFunction = torch_ltc.jit(function, verify_every=self._verify_every)
        self.made.append(made)
        return made

    def counts(self) -> tuple[int, int]:
        """Calls that were recorded and replayed."""
        calls = [each for function in self.made for each in function._calls.values()]
        return sum(each.recordings for each in calls), sum(each.replays for each in calls)


def batches(count: int, *size: int) -> list[Tensor]:
    """Random batches, the same each time."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*size, generator=generator) for _ in range(count)]


def decoding(wrap: Wrapped) -> list[Tensor]:
    """Attention over a cache of fixed size, one token after the other."""
    torch.manual_seed(1)
    project = nn.Linear(8, 24).to(wrap.device)
    keys, values = torch.zeros(12, 8).to(wrap.device), torch.zeros(12, 8).to(wrap.device)
    places = torch.arange(12).to(wrap.device)

    @torch.no_grad()
    def step(token: Tensor, position: Tensor) -> Tensor:
        query, key, value = project(token).chunk(3, -1)
        keys.index_copy_(0, position, key)
        values.index_copy_(0, position, value)
        scores = (query @ keys.t()).masked_fill(places > position, float("-inf"))
        return scores.softmax(-1) @ values

    function = wrap(step)
    token = torch.ones(1, 8).to(wrap.device)
    seen = []
    for position in range(12):
        token = function(token, torch.tensor([position]).to(wrap.device))
        seen.append(token)
    return [*seen, keys, values]


def evaluation(wrap: Wrapped) -> list[Tensor]:
    """Evaluation between steps of training that is not replayed."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).to(wrap.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def evaluate(x: Tensor) -> Tensor:
        return model(x).argmax(-1).sum(), model(x).square().mean()

    function = wrap(evaluate)
    seen: list[Tensor] = []
    for x in batches(6, 5, 4):
        model.eval()
        for other in batches(3, 5, 4):
            seen += function(other.to(wrap.device))
        model.train()
        model[2].p = 0.0
        optimizer.zero_grad()
        model(x.to(wrap.device)).square().mean().backward()
        optimizer.step()
    return seen


def accumulation(wrap: Wrapped) -> list[Tensor]:
    """Two functions: one that accumulates gradients, one that steps and clears them."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3).to(wrap.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def backward(x: Tensor) -> Tensor:
        loss = model(x).square().mean() / 3
        loss.backward()
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    micro, step = wrap(backward), wrap(update)
    seen = []
    for number, x in enumerate(batches(36, 5, 4)):
        seen.append(micro(x.to(wrap.device)))
        if number % 3 == 2:
            step()
    return [*seen, *model.parameters()]


def adversarial(wrap: Wrapped) -> list[Tensor]:
    """A generator and a discriminator that are trained in turn, with parameters that are frozen in between."""
    torch.manual_seed(4)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).to(wrap.device)
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(wrap.device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9)

    def train_critic(real: Tensor, noise: Tensor) -> Tensor:
        critic.requires_grad_(True)
        of_critic.zero_grad()
        with torch.no_grad():
            made = generator(noise)
        loss = critic(made).mean() - critic(real).mean()
        loss.backward()
        of_critic.step()
        return loss

    def train_generator(noise: Tensor) -> Tensor:
        critic.requires_grad_(False)
        of_generator.zero_grad()
        loss = -critic(generator(noise)).mean()
        loss.backward()
        of_generator.step()
        return loss

    one, other = wrap(train_critic), wrap(train_generator)
    seen = []
    for real, noise in zip(batches(16, 5, 4), batches(16, 5, 3), strict=True):
        seen.append(one(real.to(wrap.device), noise.to(wrap.device)))
        seen.append(other(noise.to(wrap.device)))
    return [*seen, *generator.parameters(), *critic.parameters()]


def method(wrap: Wrapped) -> list[Tensor]:
    """A trainer whose step is a method."""

    class Trainer:
        def __init__(self) -> None:
            torch.manual_seed(5)
            self.model = nn.Linear(4, 2).to(wrap.device)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.5)

        def step(self, x: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss

    trainer = Trainer()
    step = wrap(trainer.step)
    seen = []
    for x in batches(16, 5, 4):
        seen.append(step(x.to(wrap.device)))
        trainer.rates.step()
    return [*seen, *trainer.model.parameters()]


@pytest.mark.parametrize("verify_every", [0, 4])
@pytest.mark.parametrize("use", [decoding, evaluation, accumulation, adversarial, method])
def test_it_is_equal_to_eager_and_replayed(use: Callable[[Wrapped], list[Tensor]], verify_every: int) -> None:
    expected = [tensor.detach() for tensor in use(Wrapped("cpu", 0))]
    wrap = Wrapped("ltc", verify_every)
    got = [tensor.detach().cpu() for tensor in use(wrap)]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    recorded, replayed = wrap.counts()
    explained = "\n".join(function.explain() for function in wrap.made)
    assert replayed > recorded or (verify_every and replayed >= 4), explained
    assert all(not calls.refused for function in wrap.made for calls in function._calls.values()), explained


class Warming(torch.optim.SGD):
    """Does something else after five steps."""

    def step(self, closure: Any = None) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.sub_(parameter.grad * (0.1 if self.taken < 6 else 0.01))


OPTIMIZERS = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Warming"])
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "one by one"])
def test_optimizers_do_what_they_do_at_each_number_of_steps(name: str, foreach: bool) -> None:
    def train(device: str, wrap: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        rows, wanted = torch.linspace(-1, 1, 8).view(2, 4).to(device), torch.ones(2, 3).to(device)
        made = Warming if name == "Warming" else getattr(torch.optim, name)
        optimizer = made(model.parameters(), 0.05, foreach=foreach)

        @wrap
        def step() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(rows), wanted)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return [step().item() for _ in range(12)]

    assert train("ltc", torch_ltc.jit) == train("cpu", lambda function: function)
