"""Random programs against eager: gradients, failures on both backends, cuts at every place."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import assert_same, lazy
from tests.semantics.view_programs import run_on_device
from tests.support.random_programs import grow
from torch_ltc.config import settings
from torch_ltc.errors import LtcError, PoisonedTensorError

pytestmark = pytest.mark.usefixtures("no_fallback")


def with_gradients(seed: int, device: str, read: bool) -> Any:
    """Every tensor of the program and the gradients of its leaves, or the words in which autograd refuses."""
    leaves, pool = grow(seed, device, read)
    terms = [value.sum() * (place + 1) for place, value in enumerate(pool)]
    try:
        torch.stack(terms).sum().backward()
    except RuntimeError as error:
        return [value.detach() for value in pool], str(error)[:60]
    return [value.detach() for value in pool], [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("read", [False, True])
def test_gradients_of_random_programs_equal_eager(read: bool) -> None:
    refused = 0
    for seed in range(80):
        expected = with_gradients(seed, "cpu", read)
        refused += isinstance(expected[1], str)
        for _ in range(2):
            assert_same(with_gradients(seed, "ltc", read), expected, exact=False)
    assert refused < 60, "most programs must have gradients to compare"


def failing_program(seed: int, flags: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    """In-place updates, draws and look-ups of which some fail, as the flags say."""
    choose = random.Random(seed)
    made: list[Tensor] = []
    for _ in range(10):
        kind, x, y = choose.random(), choose.choice(state + made), choose.choice(state + made)
        if kind < 0.2:
            x.add_(1)
        elif kind < 0.35:
            x[1:].mul_(2)
        elif kind < 0.5:
            made.append(x * 2 + y)
        elif kind < 0.7:
            made.append(F.embedding(choose.choice(flags), torch.arange(12.0, device="ltc").view(3, 4)).view(4))
        elif kind < 0.8:
            x.copy_(y)
        elif kind < 0.9:
            made.append(torch.rand(4, device="ltc") + x)
        else:
            x.sub_(torch.ones(4, dtype=torch.int64, device="ltc") // (flags[0] - 7))
    return made


def read_or_lost(tensor: Tensor) -> object:
    try:
        return tensor.tolist()
    except PoisonedTensorError:
        return "lost"


def outcomes(seed: int, backend: str) -> list[object]:
    """What five steps of a failing program leave behind: errors, state, results."""
    with settings.scope(backend=backend):
        torch_ltc.ir_cache.reset()
        torch.manual_seed(seed)
        choose = random.Random(seed + 1)
        state = [lazy(torch.full((4,), float(place))) for place in range(3)]
        log: list[object] = []
        for step in range(5):
            fails = step == 3 or choose.random() < 0.15
            flags = [lazy(torch.tensor([7 if fails and choose.random() < 0.6 else 1])) for _ in range(2)]
            torch_ltc.sync(wait=True)
            made = failing_program(seed, flags, state)
            try:
                torch_ltc.sync(wait=True)
            except LtcError as error:
                log.append(str(error).splitlines()[0])
            log += [read_or_lost(tensor) for tensor in state + made]
        return log


def test_random_failing_programs_leave_the_same_on_both_backends() -> None:
    failed = 0
    for seed in range(60):
        interpreted = outcomes(seed, "interpreter")
        failed += "lost" in interpreted
        assert outcomes(seed, "torchscript") == interpreted, f"program {seed}"
    assert failed > 20


@pytest.mark.parametrize("bound", [1, 3, 8])
@pytest.mark.parametrize("tree_bound", [40, 1_000_000])
def test_random_programs_cut_at_any_place_equal_eager(bound: int, tree_bound: int) -> None:
    with settings.scope(pending_bound=bound, tree_bound=tree_bound):
        for seed in range(25):
            for _ in range(2):
                run_on_device(seed, "in the middle")
