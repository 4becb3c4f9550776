"""Host time of the phases of a recorded training step beside eager's: what recording costs, and where.

    python -m benchmarks.phases [--layers 4] [--width 256] [--length 128] [--rounds 3] [--steps 100] [--physical cuda]

Each system is a process of its own; the two take turns. The loss is read every ten steps, as in `benchmarks.gpu`. A
figure is the time that the calling thread spends in a phase, the median and the least of all steps, in milliseconds. On
the CPU the device runs on the `null` backend, which computes nothing: eager's time has the computation in it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.children import CUDA_VARIABLE
from benchmarks.gpu_workloads import VOCABULARY, Decoder, token_loss
from benchmarks.table import columns

PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer", "read")
READ_EVERY = 10
WARM_STEPS = 120
Times = list[list[float]]


class Training:
    """A training step of a transformer, timed phase by phase."""

    def __init__(self, device: str, layers: int, width: int, length: int) -> None:
        torch.manual_seed(0)
        self._model = Decoder(width, layers, max(1, width // 64), length).to(torch.bfloat16).to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        tokens = torch.randint(0, VOCABULARY, (8, length + 1))
        self._given = tokens[:, :-1].contiguous().to(device)
        self._wanted = tokens[:, 1:].contiguous().to(device)

    def _step(self, reads: bool) -> list[float]:
        marks = [time.perf_counter()]
        self._optimizer.zero_grad()
        marks.append(time.perf_counter())
        logits = self._model(self._given)
        marks.append(time.perf_counter())
        loss = token_loss(logits, self._wanted)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self._optimizer.step()
        marks.append(time.perf_counter())
        if reads:
            loss.item()
        marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]

    def run(self, steps: int) -> Times:
        """The times of the phases of so many steps."""
        return [self._step(number % READ_EVERY == READ_EVERY - 1) for number in range(steps)]


def serve(options: argparse.Namespace) -> None:
    """The child: for each line with a number, so many steps and a line with their times."""
    device = options.physical
    torch.set_num_threads(1)
    lazy: Any = None
    if options.child == "ltc":
        lazy = importlib.import_module("torch_ltc")
        device = "ltc"
        if options.physical == "cpu":
            lazy.use_backend("null")
    training = Training(device, options.layers, options.width, options.length)
    training.run(WARM_STEPS)
    if lazy is not None:
        lazy.wait_for_compiles()
        training.run(WARM_STEPS)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(training.run(int(line))), flush=True)


def start(system: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A child for this system."""
    given = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "length", "physical")]
    env = {**os.environ, CUDA_VARIABLE: "1" if options.physical == "cuda" else "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.phases", f"--child={system}", *given],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip


def ask(child: subprocess.Popen[str], steps: int) -> Times:
    """The times of so many steps of a child."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{steps}\n")
    child.stdin.flush()
    times: Times = json.loads(child.stdout.readline())
    return times


def table(found: dict[str, Times]) -> str:
    """Phases down, systems across."""
    rows = [["phase", *[f"{system}: {what}" for system in found for what in ("median", "least")], "median / eager"]]
    for place, phase in enumerate((*PHASES, "all")):
        figures: dict[str, tuple[float, float]] = {}
        for system, times in found.items():
            values = [sum(each) if phase == "all" else each[place] for each in times]
            figures[system] = statistics.median(values) * 1e3, min(values) * 1e3
        medians = [median for median, _ in figures.values()]
        numbers = [f"{value:.3f}" for pair in figures.values() for value in pair]
        rows.append([phase, *numbers, f"{medians[-1] / medians[0]:.2f}" if phase != "read" else "-"])
    means = {system: statistics.mean(sum(each) for each in times) * 1e3 for system, times in found.items()}
    text = ", ".join(f"{system} {mean:.3f} ms" for system, mean in means.items())
    first, *_, last = means.values()
    return f"{columns(rows)}\na step in the mean: {text}: {last / first:.2f}"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 4), ("width", 256), ("length", 128), ("rounds", 3), ("steps", 100)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--physical", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--child", choices=("eager", "ltc"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
        return
    children = {system: start(system, options) for system in ("eager", "ltc")}
    try:
        for child in children.values():
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                sys.exit("a system failed; what it said is above")
        found: dict[str, Times] = {system: [] for system in children}
        for _ in range(options.rounds):
            for system, child in children.items():
                found[system] += ask(child, options.steps)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    print(table(found))


if __name__ == "__main__":
    main()
