"""`python -m benchmarks.loops`: loops that read a value every few operations, on the device and in eager, in turns.

CPU time of the process, of both in one process after a warm-up; the median of the ratios, with the least and the most.
What the loops compute must be equal, to the bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ltc.config import settings
from torch_ltc.execute.eager_region import eager_regions

Loop = Callable[[str], Any]


def reinforce(device: str) -> Any:
    """REINFORCE on a toy environment: an action is drawn and read each step, 40 steps and an update."""
    torch.manual_seed(0)
    chance, losses = random.Random(0), []
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    weights = torch.linspace(1, -1, 40).to(device)
    for _ in range(4):
        state, logs = [0.1] * 4, []
        for _ in range(40):
            policy = torch.softmax(net(torch.tensor([state]).to(device)), 1)
            action = 0 if chance.random() < policy[0, 0].item() else 1
            logs.append(torch.log(policy[0, action]))
            state = [value * 0.9 + (0.1 if action else -0.1) for value in state]
        loss = -(torch.stack(logs) * weights).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def regression(device: str) -> Any:
    """Linear regression, batch 32: the loss is read each step, the update is written by hand."""
    torch.manual_seed(0)
    layer, losses = nn.Linear(4, 1).to(device), []
    for _ in range(80):
        x = torch.randn(32, 4)
        y = x.sum(1, keepdim=True)
        layer.zero_grad()
        loss = F.smooth_l1_loss(layer(x.to(device)), y.to(device))
        losses.append(loss.item())
        loss.backward()
        for parameter in layer.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]
    return losses


def lbfgs(device: str) -> Any:
    """LBFGS, an MLP of 8-16-1: `alpha` of each addition of its two loops is read."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    x, y = torch.randn(32, 8).to(device), torch.randn(32, 1).to(device)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(4)]  # type: ignore[arg-type, attr-defined]


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def generation(device: str) -> Any:
    """Generation of 16 tokens, 2 layers of 32: each token is read, and the next program has another size."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 32), Layer(32), Layer(32), nn.Linear(32, 50)).to(device)
    with torch.no_grad():
        for _ in range(3):
            tokens = [1]
            for _ in range(16):
                tokens.append(int(net(torch.tensor([tokens]).to(device))[0, -1].argmax().item()))
    return tokens


def three(device: str) -> Any:
    """3 operations on 16 floats, and a read."""
    x, total = torch.ones(16).to(device), 0.0
    for _ in range(400):
        total += (x * 2 + 1).sum().item()
    return total


def elements(device: str) -> Any:
    """`float(x[i])` of a computed tensor."""
    x = torch.arange(100.0).to(device)
    return [[float(x[i]) for i in range(100)] for _ in range(4)]


LOOPS: tuple[Loop, ...] = (reinforce, regression, generation, lbfgs, three, elements)


def measure(loop: Loop, rounds: int) -> list[float]:
    """The ratio to eager of each round."""

    def run(device: str) -> tuple[float, Any]:
        began = time.process_time()
        result = loop(device)
        return time.process_time() - began, result

    for _ in range(3):
        run("cpu")
        run("ltc")
    ratios = []
    for _ in range(rounds):
        eager_s, expected = run("cpu")
        took_s, found = run("ltc")
        if found != expected:
            raise AssertionError(f"{loop.__name__} gives {found}, eager gives {expected}")
        ratios.append(took_s / eager_s)
    return sorted(ratios)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="names, separated by commas")
    given = parser.parse_args()
    chosen = [loop for loop in LOOPS if not given.only or loop.__name__ in given.only.split(",")]
    print("| loop | time / eager | least, most | without eager regions |\n|---|---|---|---|")
    for loop in chosen:
        with settings.scope(eager_regions="off"):
            before = statistics.median(measure(loop, max(1, given.rounds // 3)))
        ratios = measure(loop, given.rounds)
        spread = f"{ratios[0]:.2f}, {ratios[-1]:.2f}"
        text = (loop.__doc__ or "").rstrip(".")
        print(f"| {text} | {statistics.median(ratios):.2f} | {spread} | {before:.1f} |", flush=True)
    print(f"\n{eager_regions.figures()}")


if __name__ == "__main__":
    main()
