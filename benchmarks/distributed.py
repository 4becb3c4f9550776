"""DDP on the device against DDP on eager CPU tensors, in one interleaved run, and a cost model of its step.

    python -m benchmarks.distributed --sizes 1 2 4

Each rank trains two equal networks by turns, one on the device and one on CPU tensors with gloo. From the parts that
are measured on one rank (the host's time to record a step, the worker's time to compute it) and the time of an
all-reduce of the gradients between the ranks, the model predicts the step on several ranks:

    step(n) = max(record, compute * max(1, n / cores) + all_reduce(n)) on n ranks of a machine with so many cores
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
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torch_ltc
from torch_ltc import events

WIDTH, LAYERS, BATCH = 256, 6, 64
WARM, ROUNDS, STEPS = 8, 8, 5


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
    if device == "ltc":
        torch_ltc.wait_device_ops()
    return (time.perf_counter() - began) / STEPS


def _all_reduce_s() -> float:
    """Seconds for an all-reduce of as many numbers as the network has parameters."""
    size = LAYERS * (WIDTH * WIDTH + WIDTH) + 10 * (WIDTH + 1)
    data = torch.ones(size)
    took = []
    for _ in range(10):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def run_rank(store: str, rank: int, size: int) -> dict[str, float]:
    """Measure on one rank."""
    dist.init_process_group(
        "cpu:gloo,ltc:ltc",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    steps = {device: _make_step(device) for device in ("cpu", "ltc")}
    for device, step in steps.items():
        for _ in range(WARM):
            step()
        if device == "ltc":
            torch_ltc.wait_for_compiles()
            step()
    recorded: list[float] = []
    computed: list[float] = []
    stop = (
        events.subscribe(lambda event: recorded.append(event.record_s + event.duration_s), events.SyncEvent),
        events.subscribe(lambda event: computed.append(event.duration_s), events.ExecuteEvent),
    )
    took: dict[str, list[float]] = {"cpu": [], "ltc": []}
    for _ in range(ROUNDS):
        for device, step in steps.items():
            took[device].append(_timed(step, device))
    for one in stop:
        one()
    all_reduce_s = _all_reduce_s()
    dist.destroy_process_group()
    figures = {f"{device}_ms": 1e3 * statistics.median(values) for device, values in took.items()}
    figures["least_cpu_ms"], figures["least_ltc_ms"] = 1e3 * min(took["cpu"]), 1e3 * min(took["ltc"])
    figures["record_ms"] = 1e3 * statistics.median(recorded)
    figures["compute_ms"] = 1e3 * statistics.median(computed)
    figures["all_reduce_ms"] = 1e3 * all_reduce_s
    return figures


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


def main() -> None:
    """Measure for each number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store:
        print(json.dumps(run_rank(options.store, options.rank, options.size)))
        return
    cores = len(os.sched_getaffinity(0))
    one: dict[str, float] = {}
    print("| ranks | eager ms | device ms | device / eager | record ms | compute ms | all-reduce ms | predicted ms |")
    print("|---|---|---|---|---|---|---|---|")
    for size in options.sizes:
        found = _measure(size)
        one = one or found
        # On one rank the program has an all-reduce, too, of nothing to do.
        shared = one["compute_ms"] * max(1, size / cores) + (found["all_reduce_ms"] if size > 1 else 0)
        predicted = max(found["record_ms"], shared)
        cells = (found[name] for name in ("cpu_ms", "ltc_ms"))
        ratio = found["ltc_ms"] / found["cpu_ms"]
        rest = (found[name] for name in ("record_ms", "compute_ms", "all_reduce_ms"))
        row = [*(f"{value:.2f}" for value in cells), f"{ratio:.2f}", *(f"{value:.2f}" for value in rest)]
        print(f"| {size} | {' | '.join(row)} | {predicted:.2f} |", flush=True)


if __name__ == "__main__":
    main()
