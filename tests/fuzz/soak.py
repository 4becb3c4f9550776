"""`python -m tests.fuzz.soak`: thousands of steps of each workload, while memory and every bounded thing is watched.

What must hold: memory of the process and live objects are flat after the first third; the prefix tree, the executables,
the queue and the graphs stay within their bounds; results are those of eager. Exit status 1 if something does not.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.support.graphs import graphs_on_the_cpu
from torch_ltc.compile.program_cache import executables
from torch_ltc.config import settings
from torch_ltc.execute.executor import executor
from torch_ltc.execute.graph_cache import graph_cache
from torch_ltc.record.recorder import recorder

LOOKS = 30
# What the allocator of the C library keeps for itself moves this much.
SLACK_BYTES = 24 << 20
# Where a counter of values of too few bits would end.
ENDS = (2**31, 2**32, 2**53)


def memory_bytes() -> int:
    """What the process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass
class Figures:
    """What was seen while a workload ran."""

    # By how much live buffers may grow.
    buffer_slack: int = 0
    memory: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Note the figures of this moment, and what is beyond its bound."""
        torch_ltc.sync(wait=True)
        torch_ltc.wait_for_compiles()
        gc.collect()
        self.memory.append(memory_bytes())
        self.objects.append(len(gc.get_objects()))
        self.buffers.append(torch.get_device_module("ltc").memory_allocated())
        for what, now, bound in (
            ("tree nodes", recorder.tree.size, settings.tree_bound + settings.pending_bound),
            ("executables", len(executables._users), settings.executables_bound),
            ("queued programs", executor._waiting, settings.queue_bound),
        ):
            if now > bound:
                self.wrong.append(f"{now} {what}, more than {bound}")
        graphs = graph_cache.figures()
        # One program stays captured, however large.
        if graphs["graphs.count"] > 1 and graphs["graphs.bytes"] > (settings.graph_bytes or graphs["graphs.bytes"]):
            self.wrong.append(f"graphs hold {graphs['graphs.bytes']} bytes, more than {settings.graph_bytes}")

    def judge(self) -> list[str]:
        """All that is wrong, what grows included."""
        third = max(len(self.memory) // 3, 1)
        for what, figures, slack in (
            ("bytes of memory", self.memory, SLACK_BYTES),
            ("objects", self.objects, 2_000),
            ("bytes of live buffers", self.buffers, self.buffer_slack),
        ):
            before, after = max(figures[third : 2 * third] or figures), max(figures[2 * third :])
            if after > before * 1.02 + slack:
                self.wrong.append(f"{what} grow from {before:,} to {after:,}")
        return self.wrong


class Convnet(nn.Sequential):
    """The network of the example with the digits."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Dropout(0.25), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip


def digits(steps: int, look: Callable[[int], None], jit: bool = False) -> list[str]:
    """Train the convnet on random images; a loss is read every 50 steps."""
    torch.manual_seed(0)
    model = Convnet().to("ltc")
    optimizer = torch.optim.Adadelta(model.parameters())
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = torch_ltc.jit(step) if jit else step
    for number in range(steps):
        loss = run((images * (1 + number % 3)).to("ltc"), labels.to("ltc"))
        if number % 50 == 0 and not loss.isfinite().item():
            return [f"the loss of step {number} is {loss.item()}"]
        look(number)
    return []


def replayed(steps: int, look: Callable[[int], None]) -> list[str]:
    """The same training under jit."""
    return digits(steps, look, jit=True)


def captured(steps: int, look: Callable[[int], None]) -> list[str]:
    """Training with batches of six sizes, each a program that is captured; graphs of a few fit into their bound."""
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ours = copy.deepcopy(theirs).to("ltc")
    pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)) for model in (ours, theirs)]
    batches = [torch.randn(2 + size, 16) for size in range(6)]
    wrong = []
    with settings.scope(backend="interpreter", cuda_graphs="always", graph_bytes=3_500), graphs_on_the_cpu() as graphs:
        for number in range(steps):
            # Often the same sizes for a while, so that they are captured before their graphs are dropped again.
            batch = batches[random.Random(number // 40).choice(range(6)) - number % 2]
            for model, optimizer in pairs:
                optimizer.zero_grad()
                model(batch.to(next(model.parameters()).device)).square().mean().backward()
                optimizer.step()
            look(number)
            if graphs.alive() * graphs.graph_bytes > settings.graph_bytes + graphs.graph_bytes:
                wrong.append(f"{graphs.alive()} graphs are alive at step {number}")
        if not all(torch.equal(a.cpu(), b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)):
            wrong.append("parameters differ from eager's")
        if steps > 200 and graphs.captures < 7:
            wrong.append(f"{graphs.captures} programs were captured")
    return wrong


def recompiling(steps: int, look: Callable[[int], None]) -> list[str]:
    """A program of other calls and sizes at each step, with small bounds, compared with eager."""
    wrong = []
    calls = (
        torch.sin,
        torch.tanh,
        lambda x: x * 2,
        lambda x: x.t() + 1,
        lambda x: x.sum(0, keepdim=True) + x,
        torch.relu,
    )
    with settings.scope(tree_bound=2_000, executables_bound=50, pending_bound=200):
        for number in range(steps):
            choose = random.Random(number % 3_000)
            x = torch.linspace(-1, 1, choose.randint(1, 40) * 3).view(3, -1)
            ours, theirs = x.to("ltc"), x
            for _ in range(choose.randint(1, 12)):
                call = choose.choice(calls)
                ours, theirs = call(ours), call(theirs)
            if number % 7 == 0 and not torch.equal(ours.cpu(), theirs):
                wrong.append(f"step {number} differs from eager")
            torch_ltc.sync()
            look(number)
    return wrong


def shortest(steps: int, look: Callable[[int], None]) -> list[str]:
    """A program of one call, a hundred times a step: as many programs as days of a real training have."""
    x = torch.zeros(2, dtype=torch.int64).to("ltc")
    for number in range(steps):
        for _ in range(100):
            x.add_(1)
            torch_ltc.sync()
        look(number)
    return [] if x.tolist() == [100 * steps] * 2 else [f"{100 * steps} additions of one give {x.tolist()}"]


def counters(steps: int, look: Callable[[int], None]) -> list[str]:
    """Steps while the counter of values passes the ends of narrower integers."""
    wrong = []
    for end in ENDS:
        torch_ltc.sync(wait=True)
        with recorder.lock:
            recorder.count = end - 5 * max(steps // 20, 3)
            recorder.reset()
        x, expected = torch.ones(4).to("ltc"), torch.ones(4)
        for number in range(max(steps // 10, 6)):
            x, expected = (x * 1.01).sin() + x[:1], (expected * 1.01).sin() + expected[:1]
            x[1:].add_(1)
            expected[1:].add_(1)
            if number % 3 == 0:
                torch_ltc.sync()
            look(number)
        if not torch.equal(x.cpu(), expected):
            wrong.append(f"values differ from eager's where the counter passes {end}")
    return wrong


WORKLOADS: dict[str, Callable[[int, Callable[[int], None]], list[str]]] = {
    "digits": digits,
    "recompiling": recompiling,
    "jit": replayed,
    "captured": captured,
    "shortest": shortest,
    "counters": counters,
}


def soak(name: str, steps: int) -> list[str]:
    """Run a workload; what is wrong with it."""
    # Tensors of random sizes are alive there.
    figures = Figures(512 if name == "recompiling" else 0)
    every = max(steps // LOOKS, 1)
    began = time.monotonic()
    wrong = WORKLOADS[name](steps, lambda number: figures.look() if number % every == 0 else None)
    figures.look()
    wrong = [*wrong, *(figures.judge() if name != "counters" else figures.wrong)]
    memory = [
        round(size / 2**20)
        for size in (figures.memory[0], figures.memory[len(figures.memory) // 3], figures.memory[-1])
    ]
    print(
        f"{name}: {steps} steps in {time.monotonic() - began:.0f} s; MiB at the begin, after a third, at the end: "
        f"{memory}; objects {figures.objects[len(figures.objects) // 3]:,} to {figures.objects[-1]:,}; "
        f"{recorder.tree.size:,} tree nodes; " + ("; ".join(wrong[:5]) or "nothing wrong"),
        flush=True,
    )
    return wrong


def main() -> int:
    """Soak what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of " + ", ".join(WORKLOADS))
    given = parser.parse_args()
    with settings.scope(cache_dir="off", recompiles="allow"):
        found = [soak(name, given.steps) for name in given.workloads.split(",")]
    return int(any(found))


if __name__ == "__main__":
    raise SystemExit(main())
