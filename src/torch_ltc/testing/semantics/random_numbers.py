"""Random numbers: they follow from the seed, are drawn once, and equal eager's where its conformance spec says so."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.testing.semantics.table import Stage, case

MANY = 20_000


def _draw(on: Stage) -> list[torch.Tensor]:
    """Numbers of several distributions, in one program."""
    x = torch.rand(3, 4, device=on.device)
    return [
        x,
        torch.randn(5, device=on.device),
        torch.randint(0, 100, (6,), device=on.device),
        torch.bernoulli(x),
        torch.empty(4, device=on.device).uniform_(-1, 1),
        torch.nn.functional.dropout(torch.ones(8, device=on.device), 0.5),
        torch.randperm(7, device=on.device),
    ]


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(left, right, strict=True))


@case()
def random_as_eager(on: Stage) -> Any:
    """Random numbers equal eager's, program after program, where the backend claims so."""
    if not on.backend.eager_random:
        return None
    torch.manual_seed(11)
    results = []
    for _ in range(3):
        results.append(_draw(on))
        on.sync()
    return [*results, torch.rand(2, device=on.device)]


@case()
def random_follows_seed(on: Stage) -> Any:
    """The same seed gives the same random numbers, another seed gives others."""
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(_draw(on))
        on.sync()
    on.claim(_equal(drawn[0], drawn[1]), "the same seed gave other random numbers")
    on.claim(not torch.equal(drawn[0][0].cpu(), drawn[2][0].cpu()), "another seed gave the same random numbers")
    return [[tensor.shape for tensor in draw] for draw in drawn]


@case()
def random_advances(on: Stage) -> Any:
    """A program that runs again draws new numbers, and two draws in one program differ."""
    torch.manual_seed(5)
    drawn = []
    for _ in range(4):
        drawn += [torch.rand(6, device=on.device), torch.rand(6, device=on.device)]
        on.sync()
    different = {tuple(tensor.tolist()) for tensor in drawn}
    on.claim(len(different) == len(drawn), "random numbers were drawn again that had been drawn before")
    return len(different)


@case()
def random_drawn_once(on: Stage) -> Any:
    """A random tensor has one value, however often and by whom it is read."""
    torch.manual_seed(6)
    x = torch.rand(6, device=on.device)
    sums, doubled = x + x, x * 2
    view = x[2:]
    first = x.cpu()
    on.claim(torch.equal(sums.cpu(), doubled.cpu()), "a random tensor had two values in one program")
    on.claim(torch.equal(view.cpu(), first[2:]), "a view of a random tensor has other values")
    on.claim(torch.equal(x.cpu(), first), "a random tensor was drawn again when it was read again")
    return (doubled - sums).abs().sum()


@case()
def dropout_gradient(on: Stage) -> Any:
    """Dropout drops the same elements forward and backward."""
    torch.manual_seed(7)
    x = torch.ones(64, device=on.device, requires_grad=True)
    y = torch.nn.functional.dropout(x * 3, 0.5)
    y.sum().backward()
    assert x.grad is not None
    kept = y.detach().cpu() != 0
    on.claim(torch.equal(x.grad.cpu() != 0, kept), "dropout's gradient belongs to another mask")
    on.claim(0 < int(kept.sum()) < 64, "dropout with probability 0.5 kept all of 64 elements, or none")
    return (y.detach() - x.grad).abs().sum()


@case()
def random_distribution(on: Stage) -> Any:
    """Uniform and normal numbers have their distributions."""
    torch.manual_seed(8)
    uniform, normal = torch.rand(MANY, device=on.device), torch.randn(MANY, device=on.device)
    lowest, highest = float(uniform.min()), float(uniform.max())
    on.claim(0 <= lowest < 0.01 and 0.99 < highest < 1, f"uniform numbers lie between {lowest} and {highest}")
    on.claim(abs(float(uniform.mean()) - 0.5) < 0.02, "uniform numbers have another mean than 0.5")
    on.claim(abs(float(normal.mean())) < 0.05, "normal numbers have another mean than 0")
    on.claim(abs(float(normal.std()) - 1) < 0.05, "normal numbers have another deviation than 1")
    return [uniform.shape, normal.shape]
