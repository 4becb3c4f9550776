"""Replays of a training step: their cost on the host by part, and whether thousands of them stay right and small.

    python -m benchmarks.graphs --host              on any machine: the graphs launch nothing
    python -m benchmarks.graphs --replays 10000     on a GPU, or without one in the interpreter

`host` trains a transformer of 12 layers with `jit`. What runs on the user's thread and what runs on the worker is timed
in processor time, a part at a time; parts that contain others are indented less.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_ltc
from benchmarks.gpu_workloads import VOCABULARY, Decoder
from torch_ltc.config import settings
from torch_ltc.execute import capture, replay, sync
from torch_ltc.replay import function, plan

LAYERS, WIDTH, HEADS, BATCH, LENGTH = 12, 16, 2, 2, 8
WARM, ROUNDS = 15, 200
_READ_EVERY = 40
_BATCHES = 64
_SAY_EVERY_S = 5.0
# What must not grow: on a GPU all that its allocator counts, else the live buffers.
_LIVE = "physical.allocated_bytes.all.current" if torch.cuda.is_available() else "allocated_bytes.all.current"


class _NoLaunch:
    """A graph that launches nothing: what is left is the host."""

    def replay(self) -> None:
        """Do nothing."""


class NoLaunches:
    """Captures graphs that launch nothing when they are replayed."""

    lost_states = 0

    def pool(self) -> None:
        """Memory is the allocator's."""

    def size_bytes(self, pool: Any) -> int:
        """Nothing is held."""
        del pool
        return 0

    def total_bytes(self) -> int:
        """There is room."""
        return 1 << 40

    def capture(self, launch: Callable[[], None], generator: Any, pool: Any) -> _NoLaunch:
        """Run what would be captured."""
        del generator, pool
        launch()
        return _NoLaunch()


class Parts:
    """Processor time of functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Time all calls of a function from now on."""
        original = getattr(owner, attribute)
        spent = self.seconds.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                spent.append(time.thread_time() - began)

        setattr(owner, attribute, timed)

    def table(self) -> str:
        """Medians and least values as a table. Other work of the machine makes the difference."""
        rows = [
            f"| {name} | {statistics.median(spent) * 1e6:.0f} | {min(spent) * 1e6:.0f} |"
            for name, spent in self.seconds.items()
            if spent
        ]
        return "\n".join(["| part | us, median | us, least |", "|---|---|---|", *rows])


def host(optimizer: str) -> str:
    """The table of what a replay costs on the host."""
    capture._by_device["cpu"] = NoLaunches()
    settings.backend = "interpreter"
    torch.manual_seed(0)
    model = Decoder(WIDTH, LAYERS, HEADS, LENGTH).to("ltc")
    batches = [torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1)).to("ltc") for _ in range(4)]
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    }
    stepper = made[optimizer](model.parameters())

    @torch_ltc.jit
    def step(tokens: Tensor) -> Tensor:
        stepper.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        stepper.step()
        return loss

    for number in range(WARM):
        step(batches[number % len(batches)])
        torch_ltc.sync(wait=True)
    parts = Parts()
    parts.watch(function.JitFunction, "__call__", "user's thread: a call")
    parts.watch(plan.Plan, "change", "- guards")
    parts.watch(plan.Plan, "run", "- replay")
    parts.watch(plan._BoundGradients, "outputs", "- - gradients that stay")
    parts.watch(replay.Replayed, "run", "- - queue")
    parts.watch(replay, "_run", "worker: a program")
    parts.watch(sync, "_arguments", "- inputs")
    parts.watch(capture.Capture, "run", "- graphs")
    for number in range(ROUNDS):
        step(batches[number % len(batches)])
        torch_ltc.wait_device_ops()
    return f"{step.explain()}\n\n{parts.table()}"


# ---- thousands of replays -------------------------------------------------------------------------------------------


def train(
    replays: int, captured: bool, dropout: float = 0.1, note: Callable[[int], None] = lambda number: None
) -> tuple[list[float], list[int]]:
    """The losses of that many steps with changing batches, rates and dropout, and memory figures on the way; `note`
    is told the number of steps so far whenever losses were read."""
    with settings.scope(cuda_graphs="auto" if captured else "off"):
        return _train(replays, captured, dropout, note)


def _train(replays: int, captured: bool, dropout: float, note: Callable[[int], None]) -> tuple[list[float], list[int]]:
    torch.manual_seed(0)
    torch.ltc.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(64), nn.Linear(64, 8)]
    model = nn.Sequential(*layers).to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    # On the device already: what is tried is replays, and uploads would take most of the time.
    inputs = [torch.randn(16, 32).to("ltc") for _ in range(_BATCHES)]
    targets = [torch.randint(0, 8, (16,)).to("ltc") for _ in range(_BATCHES)]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    function = torch_ltc.jit(step) if captured else step
    losses: list[float] = []
    kept: list[Tensor] = []
    sizes: list[int] = []
    for number in range(replays):
        kept.append(function(inputs[number % _BATCHES], targets[number % _BATCHES]).detach())
        schedule.step()
        if len(kept) == _READ_EVERY or number == replays - 1:
            losses += torch.stack(kept).tolist()
            kept.clear()
            torch_ltc.sync(wait=True)
            sizes.append(torch.ltc.memory_stats()[_LIVE])
            note(number + 1)
    return losses, sizes


class _Progress:
    """Prints how far a training is, every few seconds, and what it took."""

    def __init__(self, what: str, steps: int) -> None:
        self._what, self._steps = what, steps
        self._began = self._said = time.perf_counter()

    def __call__(self, number: int) -> None:
        now = time.perf_counter()
        if number == self._steps or now - self._said > _SAY_EVERY_S:
            self._said = now
            took = now - self._began
            print(f"{self._what}: {number} of {self._steps} steps, {took:.1f} s, {took / number * 1e3:.2f} ms a step")
            sys.stdout.flush()


def many(replays: int) -> str:
    """Say whether that many replays give the losses of as many recorded steps, in memory that does not grow."""
    settings.backend = "interpreter"
    torch.use_deterministic_algorithms(True)
    expected, _ = train(replays, captured=False, note=_Progress("recorded", replays))
    got, sizes = train(replays, captured=True, note=_Progress("jit", replays))
    different = sum(a != b for a, b in zip(expected, got, strict=True))
    counters = {name: torch_ltc.metrics.counter_value(name) for name in ("GraphCapture", "GraphReplay", "GraphRefused")}
    # The first ones include what is captured on the way.
    settled = sizes[len(sizes) // 2 :]
    return (
        f"{replays} steps: {different} losses differ, the last one is {got[-1]:.6f}; {counters}; "
        f"live bytes in the second half: {min(settled)} to {max(settled)}"
    )
