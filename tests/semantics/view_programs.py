"""Random programs of views and in-place calls: made on CPU, replayed on the device and compared."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

import torch_ltc

LENGTH = 14

# A step takes the tensors so far on one device, and adds one or writes to one. What it does is fixed before it is run.
Step = Callable[[list[Tensor]], None]


def _view(place: int, make: Callable[[Tensor], Tensor]) -> Step:
    return lambda pool: pool.append(make(pool[place]))


def _write(place: int, write: Callable[[Tensor], object]) -> Step:
    def step(pool: list[Tensor]) -> None:
        write(pool[place])

    return step


def random_view(shape: torch.Size, choose: random.Random) -> Callable[[Tensor], Tensor]:
    """A view that a tensor of this shape allows, whatever its strides."""
    rank = len(shape)
    dim = choose.randrange(rank) if rank else 0
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.unsqueeze(dim),
        lambda x: x.detach(),
        lambda x: x.view_as(x),
        lambda x: x.expand(2, *x.size()),
        lambda x: x.conj(),
        lambda x: x.imag if x.is_complex() else x.real,
        lambda x: (
            torch.view_as_real(x.resolve_conj()) if x.is_complex() else torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        ),
        lambda x: x.as_strided((2, 2), (1, 2), x.storage_offset()),
    ]
    if rank:
        length = shape[dim]
        start = choose.randrange(length) if length else 0
        step = choose.choice([1, 1, 2])
        kinds += [
            lambda x: x.narrow(dim, start, length - start),
            lambda x: x.select(dim, start) if length else x,
            lambda x: x[(slice(None),) * dim + (slice(start, None, step),)],
            lambda x: x.unbind(dim)[start] if length else x,
            lambda x: x.split(max(1, length // 2), dim)[-1],
            lambda x: x.squeeze(),
            lambda x: x.flatten(),
            lambda x: x.reshape(-1)[: max(1, x.numel() // 2)],
        ]
    if rank >= 2:
        other = choose.randrange(rank)
        order = list(range(rank))
        choose.shuffle(order)
        kinds += [
            lambda x: x.transpose(dim, other),
            lambda x: x.permute(order),
            lambda x: x.diagonal(0, 0, 1),
            lambda x: x.movedim(dim, other),
        ]
    return choose.choice(kinds)


def random_write(shape: torch.Size, choose: random.Random) -> Callable[[Tensor], object]:
    """An in-place call on a tensor of this shape."""
    number = choose.choice([-2, 3, 0.5, 1.25])
    kinds: list[Callable[[Tensor], object]] = [
        lambda x: x.add_(number),
        lambda x: x.mul_(number),
        lambda x: x.fill_(number),
        lambda x: x.neg_(),
        lambda x: x.clamp_(-50, 50),
        lambda x: x.copy_(x.flip(0) if x.dim() else x + 1),
        lambda x: x.add_(x),
        lambda x: x.zero_() if number == 3 else x.abs_(),
        lambda x: x.copy_(torch.full(tuple(x.size()), 7.5)),
        lambda x: x.copy_(x.masked_fill(x > 2, number)),
        lambda x: x.sub_(x.sum()),
    ]
    if len(shape) and shape[0]:
        kinds += [
            lambda x: x[-1].add_(1),
            lambda x: x.__setitem__(0, number),
            lambda x: x.index_add_(0, torch.zeros(1, dtype=torch.int64, device=x.device), x[:1].clone()),
        ]
    return choose.choice(kinds)


def random_step(pool: list[Tensor], choose: random.Random) -> Step:
    """A step that fits the tensors of the pool."""
    place = choose.randrange(len(pool))
    shape = pool[place].size()
    kind = choose.random()
    if kind < 0.45:
        return _view(place, random_view(shape, choose))
    if kind < 0.8:
        return _write(place, random_write(shape, choose))
    if kind < 0.9:
        same = [i for i, tensor in enumerate(pool) if tensor.size() == shape]
        partner = choose.choice(same)
        return lambda pool: pool.append(pool[place] * 0.5 - pool[partner])
    return _view(place, choose.choice([lambda x: x.clone(), lambda x: x.contiguous(), lambda x: x + 1]))


def start(device: str) -> list[Tensor]:
    """The tensors that a program begins with: one moved to the device, one pending on it, one complex."""
    pending = torch.arange(6.0, device=device).view(3, 2) - 3
    complex_numbers = torch.complex(torch.arange(4.0), -torch.arange(4.0)).to(device)
    return [torch.arange(24.0).to(device).view(2, 3, 4), pending, complex_numbers]


def grow(seed: int) -> tuple[list[Step], list[Tensor], dict[int, list[Tensor]]]:
    """A random program, its tensors on CPU at its end, and at the steps after which it will be read."""
    choose = random.Random(seed)
    pool = start("cpu")
    steps: list[Step] = []
    middles: dict[int, list[Tensor]] = {}
    while len(steps) < LENGTH:
        step = random_step(pool, choose)
        before = [tensor.clone() for tensor in pool]
        try:
            step(pool)
        except RuntimeError:
            # Overlapping memory or a dtype that the call does not take: eager wrote nothing, the step is left out.
            assert all(torch.equal(left, right) for left, right in zip(before, pool, strict=False))
            del pool[len(before) :]
            continue
        steps.append(step)
        if choose.random() < 0.1:
            middles[len(steps)] = [tensor.clone() for tensor in pool]
    return steps, pool, middles


def compare(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    """Every tensor of the pool, values and shapes."""
    assert len(ours) == len(theirs)
    read = [tensor.cpu() for tensor in ours]
    torch.testing.assert_close(read, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def run_on_device(seed: int, read: str) -> None:
    """Replay the program of this seed on the device, reading as said, and compare."""
    steps, expected, middles = grow(seed)
    pool = start("ltc")
    for number, step in enumerate(steps, 1):
        step(pool)
        if read == "every step":
            torch_ltc.sync()
        elif read == "in the middle" and number in middles:
            compare(pool, middles[number], f"program {seed} after step {number}")
    compare(pool, expected, f"program {seed} at its end")
    for left, right in zip(pool, expected, strict=True):
        assert (left.size(), left.stride(), left.storage_offset()) == (
            right.size(),
            right.stride(),
            right.storage_offset(),
        )
