"""Random programs that can be differentiated, the same on every device for one seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc

PURE: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.tanh,
    lambda x: x * 2,
    lambda x: x.exp().clamp(max=3),
    lambda x: x.t() if x.dim() == 2 else x.clone(),
    lambda x: x.flatten(),
    lambda x: x[..., 1:] if x.dim() and x.size(-1) > 1 else x.clone(),
    lambda x: x.reshape(-1)[:4],
    lambda x: x.unsqueeze(0),
    lambda x: x.sum(-1, keepdim=True) if x.dim() else x.clone(),
    lambda x: x.softmax(-1) if x.dim() else x.clone(),
    lambda x: F.dropout(x, 0.3),
    lambda x: x.std(-1) if x.dim() and x.size(-1) > 1 else x.clone(),
    lambda x: torch.cat([x.flatten(), x.flatten()]),
]
IN_PLACE: list[Callable[[Tensor], object]] = [
    lambda x: x.mul_(0.5),
    lambda x: x.add_(1),
    lambda x: x.tanh_(),
    lambda x: x.select(0, 0).mul_(2) if x.dim() and x.size(0) else x.mul_(2),
    lambda x: x.add_(torch.randn((), device=x.device)),
]


def grow(seed: int, device: str, read: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves and all tensors of a random program of the seed."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    leaves = [
        torch.linspace(-1, 1, 12).view(3, 4).to(device).requires_grad_(),
        torch.linspace(0, 2, 6).view(2, 3).to(device).requires_grad_(),
    ]
    pool = list(leaves)
    for _ in range(14):
        kind, x = choose.random(), choose.choice(pool)
        if kind < 0.55:
            pool.append(choose.choice(PURE)(x))
        elif kind < 0.75:
            x = x * 1 if x.is_leaf or x._is_view() else x
            pool.append(x)
            choose.choice(IN_PLACE)(x)
        elif kind < 0.9:
            pool.append(x.flatten()[:2] * choose.choice(pool).flatten()[:1])
        elif read and kind < 0.95:
            x.sum().item()
        elif read:
            torch_ltc.sync()
    return leaves, pool
