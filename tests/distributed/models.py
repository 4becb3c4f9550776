"""Small networks that the distributed tests train: plain layers, so that tensor parallelism can name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY_SIZE = 32


class Mlp(nn.Module):
    """Two layers, named as the plans of tensor parallelism have it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Classify."""
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


class Skipping(Mlp):
    """A layer of it is used in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 32)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """Classify."""
        self.steps += 1
        hidden = self.up(x) + self.other(x) if self.steps % 2 else self.up(x)
        out: Tensor = self.down(F.relu(hidden))
        return out


def convnet(sync: bool = False) -> nn.Module:
    """A convnet with batch norm."""
    norm = nn.SyncBatchNorm if sync else nn.BatchNorm2d
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 3 * 3, 8))


class Attention(nn.Module):
    """Attention of two heads with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Attend to what came before."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, x.shape[-1] // self.heads) for w in (self.wq, self.wk, self.wv))
        q, k, v = _rotated(q, angles).transpose(1, 2), _rotated(k, angles).transpose(1, 2), v.transpose(1, 2)
        weights = torch.softmax((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5 + _mask(length, x), -1)
        out: Tensor = self.wo((weights @ v).transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    sine, cosine = angles.sin()[:, None], angles.cos()[:, None]
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


def _mask(length: int, x: Tensor) -> Tensor:
    return torch.full((length, length), float("-inf"), device=x.device).triu(1)


class Norm(nn.Module):
    """Division by the root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Attention and a gated network, each added to what it takes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.first_norm, self.second_norm = Norm(width), Norm(width)
        self.w1, self.w3 = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.first_norm(x), angles)
        y = self.second_norm(x)
        out: Tensor = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return out


class Llama(nn.Module):
    """A decoder in the form of Llama."""

    def __init__(self, width: int = 16, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = Norm(width)
        self.output = nn.Linear(width, VOCABULARY_SIZE, bias=False)
        self.half = width // heads // 2

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each place."""
        places = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
        rates = 10000.0 ** (-torch.arange(self.half, dtype=torch.float32, device=tokens.device) / self.half)
        angles = places[:, None] * rates
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        out: Tensor = self.output(self.norm(x))
        return out


class _OneCall(torch.autograd.Function):
    """`linear` with a bias as one node of autograd, which gives its gradients in the order of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """As eager, which calls `addmm`."""
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """To the bit what the derivative of `addmm` gives."""
        x, weight = ctx.saved_tensors
        return grad.mm(weight), grad.t().mm(x), grad.sum(0)


@contextmanager
def linear_as_one_call() -> Iterator[None]:
    """Layers with a bias as the device has them: gradients of weights become ready before those of biases.

    In eager a linear layer is two calls, a transposition and `addmm`, and the bias is ready first.
    """
    linear = F.linear

    def one_call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return linear(x, weight) if bias is None else _OneCall.apply(x, weight, bias)

    with mock.patch.object(F, "linear", one_call):
        yield
