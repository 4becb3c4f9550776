"""DDP on the device against DDP on eager CPU tensors, in one interleaved run, and a cost model of its step.

    python -m benchmarks.distributed --sizes 1 2 4 --repeats 3 --write docs/scaling.md

Each rank trains equal networks by turns: on CPU tensors with gloo, on the device, and on the device without comparing
ranks (`rank_check = 0`). Numbers of ranks are measured by turns, too, and medians are taken of all. From what is
measured on one rank (the CPU time to record a step and to compute it) and on two (latency and bandwidth of gloo), the
model predicts the step on n ranks of a machine with c cores:

    step(n) = max(record, compute + all_reduce(n), (record + compute) * n / c + all_reduce(n))
    all_reduce(n) = (2 (n - 1) latency + 2 (n - 1) / n bytes / bandwidth) * max(1, n / c)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torch_ltc
from torch_ltc import events
from torch_ltc.config import settings

WIDTH, LAYERS, BATCH = 256, 6, 64
WARM, ROUNDS, STEPS = 8, 8, 5
# Parameters of the network.
NUMBERS = LAYERS * (WIDTH * WIDTH + WIDTH) + 10 * (WIDTH + 1)
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


def _make_step(device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch, labels = torch.randn(BATCH, WIDTH).to(device), torch.randint(10, (BATCH,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()

    return step


def _timed(step: Callable[[], None], device: str) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    if device != "cpu":
        torch_ltc.wait_device_ops()
    return (time.perf_counter() - began) / STEPS


def _all_reduce_s(count: int) -> float:
    """Seconds for an all-reduce of so many numbers."""
    data = torch.ones(count)
    took = []
    for _ in range(20):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def run_rank(store: str, rank: int, size: int) -> dict[str, float]:
    """Measure on one rank, in milliseconds."""
    dist.init_process_group(
        "cpu:gloo,ltc:ltc",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    eager, lazy = _make_step("cpu"), _make_step("ltc")
    steps = {"cpu": eager, "ltc": lazy, "unchecked": lazy}
    for step in (eager, lazy):
        for _ in range(WARM):
            step()
    torch_ltc.wait_for_compiles()
    lazy()
    torch_ltc.wait_device_ops()
    recorded: list[float] = []
    computed: list[float] = []
    stop = (
        events.subscribe(lambda event: recorded.append(event.record_s + event.duration_s), events.SyncEvent),
        events.subscribe(lambda event: computed.append(event.duration_s), events.ExecuteEvent),
    )
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            with settings.scope(rank_check=0 if name == "unchecked" else settings.rank_check):
                took[name].append(_timed(step, name))
    for one in stop:
        one()
    figures = {name: statistics.median(values) for name, values in took.items()}
    figures |= {"record": statistics.median(recorded), "compute": statistics.median(computed)}
    figures |= {"small": _all_reduce_s(1), "large": _all_reduce_s(NUMBERS)}
    dist.destroy_process_group()
    return {name: 1e3 * value for name, value in figures.items()}


def _measure(size: int) -> dict[str, float]:
    """Start the ranks, and return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.distributed", "--store", f"{folder}/store", "--size", str(size)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(size)
        ]
        try:
            outputs = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


@dataclass(frozen=True, slots=True)
class Model:
    """The constants of the cost model, in milliseconds."""

    cores: int
    record: float
    compute: float
    latency: float
    transfer: float

    @classmethod
    def of(cls, cores: int, one: dict[str, float], two: dict[str, float]) -> Model:
        """From what was measured on one rank and on two."""
        # Two ranks send their halves, and their sums: two messages of half of the bytes each.
        latency = two["small"] / 2
        return cls(cores, one["record"], one["compute"], latency, max(two["large"] - two["small"], 0.0))

    def all_reduce(self, size: int) -> float:
        """Milliseconds for the gradients, on so many ranks."""
        parts = 2 * (size - 1) * self.latency + 2 * (size - 1) / size * self.transfer
        return parts * max(1, size / self.cores)

    def step(self, size: int) -> float:
        """Milliseconds for a step."""
        reduce = self.all_reduce(size)
        shared = (self.record + self.compute) * size / self.cores
        return max(self.record, self.compute + reduce, shared + reduce)


_HEAD = (
    "ranks | eager ms | device ms | device / eager | step with / without rank_check | all-reduce ms | predicted ms | "
)
_HEAD += "predicted / device"


def table(found: dict[int, dict[str, float]], cores: int) -> list[str]:
    """The figures and the predictions, as lines of Markdown."""
    lines = [f"| {_HEAD} |", "|---" * 8 + "|"]
    model = Model.of(cores, found[1], found[2]) if {1, 2} <= set(found) else None
    for size, figures in found.items():
        ratios = figures["ltc"] / figures["cpu"], figures["ltc"] / figures["unchecked"]
        cells = [figures["cpu"], figures["ltc"], *ratios, figures["large"]]
        if model is not None:
            cells += [model.step(size), model.step(size) / figures["ltc"]]
        lines.append(f"| {size} | {' | '.join(f'{value:.2f}' for value in cells)} |")
    if model is not None:
        lines += [
            "",
            f"Constants: record {model.record:.2f} ms, compute {model.compute:.2f} ms, latency {model.latency:.3f} ms, "
            f"bandwidth {4e-3 * NUMBERS / 1e3 / max(model.transfer, 1e-9):.2f} GB/s, {cores} cores.",
        ]
    return lines


def write(page: Path, lines: list[str]) -> None:
    """Put the table between the marks of a page."""
    before, rest = page.read_text().split(_BEGIN)
    _, after = rest.split(_END)
    page.write_text("\n".join([before + _BEGIN, *lines, _END + after]))


def main() -> None:
    """Measure for each number of ranks, by turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page, between its marks")
    parser.add_argument("--note", default="", help="a sentence below the table, on the state of the machine")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store:
        print(json.dumps(run_rank(options.store, options.rank, options.size)))
        return
    every: dict[int, list[dict[str, float]]] = {size: [] for size in options.sizes}
    for _ in range(options.repeats):
        for size, found in every.items():
            found.append(_measure(size))
    medians = {
        size: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for size, found in every.items()
    }
    lines = table(medians, len(os.sched_getaffinity(0)))
    if options.note:
        lines += ["", options.note]
    print("\n".join(lines))
    if options.write:
        write(options.write, lines)


if __name__ == "__main__":
    main()
