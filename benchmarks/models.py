"""The models that the workloads train: plain PyTorch, written so that every system can run them.

Attention is written out with separate projections, the LSTM cell with slices and the squared error by hand, because
PyTorch's own lazy device has no `chunk`, no fused attention and no `mse_loss`. All systems run the same code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """Linear layers of one width with ReLU between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """One value per feature."""
        for layer in list(self.layers)[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


class Attention(nn.Module):
    """Self-attention with several heads, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of every position to every position."""
        batch, length, width = x.shape
        size = width // self.heads

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, length, self.heads, size).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        weights = ((query @ key.transpose(-2, -1)) * (1 / math.sqrt(size))).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer layer, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_feed = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm_feed(x))))


class Transformer(nn.Module):
    """An encoder of `layers` blocks from features to features."""

    def __init__(self, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.convolution_1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.convolution_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The residual of `x`, narrower by the stride."""
        y = self.norm_1(self.convolution_1(x)).relu()
        return (self.norm_2(self.convolution_2(y)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """A residual network for small images: a stem, three stages of two blocks, a classifier."""

    def __init__(self, classes: int = 10, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]))
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            blocks += [ResidualBlock(channels, width, 2 if stage else 1), ResidualBlock(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """One logit per class."""
        return self.head(self.blocks(self.stem(x).relu()).mean((2, 3)))


class Lstm(nn.Module):
    """An LSTM whose loop over time is Python's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_input = nn.Linear(width, 4 * width)
        self.from_hidden = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """The last hidden state; time is the first dimension of `x`."""
        width = self.width
        hidden = torch.zeros_like(x[0])
        cell = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            gates = self.from_input(x[t]) + self.from_hidden(hidden)
            enter = gates[:, :width].sigmoid()
            forget = gates[:, width : 2 * width].sigmoid()
            new = gates[:, 2 * width : 3 * width].tanh()
            leave = gates[:, 3 * width :].sigmoid()
            cell = forget * cell + enter * new
            hidden = leave * cell.tanh()
        return hidden


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    """The mean squared error, written out."""
    difference = out - target
    return (difference * difference).mean()
