"""What it costs to record one operation: eager CPU, PyTorch's own lazy device and torch_ltc, side by side.

Owns the measurement of recording alone. Each system lives in a child process of its own, because the lazy devices
change global state of PyTorch; the children stay alive and measure in turn, in an order that rotates every round, so
that a busy machine slows all of them alike. For the lazy devices the sync stands outside the timing; for eager the
computation of 16 floats is part of it. A timing is the median over repetitions in a child, then over rounds;
a ratio is taken round by round before the median.

    python -m benchmarks.trace [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHAIN_LENGTH = 200
REPETITIONS = 60
WARM_UP_REPETITIONS = 5
# The original needs tens of microseconds for a view or an in-place op: fewer repetitions then, never fewer than five.
MEASURE_LIMIT_S = 2.0
SYSTEMS = ("eager", "original", "torch_ltc")


@dataclass(frozen=True, slots=True)
class System:
    """One way to execute PyTorch: the device its tensors live on, and what ends a repetition outside the timing."""

    device: str
    finish: Callable[[], None]


def open_system(name: str) -> System:
    """Set up one system in this process; imports happen here because only one of the lazy devices may be loaded."""
    if name == "eager":
        return System("cpu", lambda: None)
    if name == "original":
        importlib.import_module("torch._lazy.ts_backend").init()
        return System("lazy", importlib.import_module("torch._lazy").mark_step)
    torch_ltc = importlib.import_module("torch_ltc")
    return System("ltc", lambda: torch_ltc.sync(wait=True))


def add_chain(x: Tensor) -> Tensor:
    """A chain of additions, each needing the one before."""
    y = x
    for _ in range(CHAIN_LENGTH):
        y = y + x
    return y


def view_chain(x: Tensor) -> Tensor:
    """Views and in-place updates of one buffer through them, a quarter each: view, add_, t, mul_."""
    square = torch.zeros_like(x).view(4, 4)
    for _ in range(CHAIN_LENGTH // 4):
        square.view(16).add_(x)
        square.t().mul_(0.5)
    return square


@dataclass(frozen=True, slots=True)
class Workload:
    """A chain of CHAIN_LENGTH operations on 16 floats."""

    title: str
    chain: Callable[[Tensor], Tensor]
    requires_grad: bool


# The name of the first workload is empty because its keys in the JSON object are the plain ones: eager_us and so on.
WORKLOADS = {
    "": Workload("y = y + x", add_chain, requires_grad=False),
    "grad_": Workload("y = y + x, x requires grad", add_chain, requires_grad=True),
    "views_": Workload("view, add_, t, mul_ on one buffer", view_chain, requires_grad=False),
}


def measure(system: System, workload: Workload) -> float:
    """Median microseconds per operation of one workload, after warm-up."""
    x = torch.ones(16).to(system.device).requires_grad_(workload.requires_grad)
    system.finish()
    durations: list[float] = []
    deadline = time.perf_counter() + MEASURE_LIMIT_S
    while len(durations) < WARM_UP_REPETITIONS + REPETITIONS:
        started = time.perf_counter()
        # Held until after the sync: a result that nobody holds would leave the program nothing to compute.
        result = workload.chain(x)
        durations.append(time.perf_counter() - started)
        system.finish()
        del result
        if time.perf_counter() > deadline and len(durations) >= WARM_UP_REPETITIONS + 5:
            break
    return statistics.median(durations[WARM_UP_REPETITIONS:]) / CHAIN_LENGTH * 1e6


def serve(name: str) -> None:
    """The child's loop: for each workload named on standard input, one number on standard output."""
    torch.set_num_threads(1)
    system = open_system(name)
    for line in sys.stdin:
        print(json.dumps(measure(system, WORKLOADS[line.rstrip("\n")])), flush=True)


class Child:
    """A process that measures one system when asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.trace", "--child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def measure(self, workload: str) -> float:
        """Microseconds per operation, measured now; the child's own error text is on standard error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{workload}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # The child is gone: the empty answer below says so, with its exit status.
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(
                f"benchmarks.trace: the process measuring '{self.name}' ended with status {self._process.wait()}; "
                f"its error is above, and `{sys.executable} -m benchmarks.trace --child {self.name}` repeats it"
            )
        return float(json.loads(answer))

    def close(self) -> None:
        """End the process: without standard input its loop is over."""
        self._process.communicate()


def collect(rounds: int) -> dict[str, float]:
    """All figures: ``<system>_<workload>us`` and ``<workload>ratio`` (torch_ltc / original) for every workload."""
    children = [Child(name) for name in SYSTEMS]
    samples: dict[str, list[float]] = {}
    try:
        for turn in range(rounds):
            first = turn % len(children)
            for workload in WORKLOADS:
                for child in children[first:] + children[:first]:
                    samples.setdefault(f"{child.name}_{workload}us", []).append(child.measure(workload))
    finally:
        for child in children:
            child.close()
    figures = {key: statistics.median(values) for key, values in samples.items()}
    for workload in WORKLOADS:
        pairs = zip(samples[f"torch_ltc_{workload}us"], samples[f"original_{workload}us"])
        figures[f"{workload}ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return figures


def render(figures: dict[str, float], rounds: int) -> str:
    """The figures as a table."""
    lines = [
        f"microseconds per operation, chains of {CHAIN_LENGTH} on 16 floats, median of {rounds} rounds "
        f"(torch {torch.__version__}, recording only for the lazy devices)",
        f"{'':<34} {'eager':>9} {'original':>9} {'torch_ltc':>9} {'torch_ltc/original':>19}",
    ]
    for key, workload in WORKLOADS.items():
        cells = " ".join(f"{figures[f'{system}_{key}us']:>9.2f}" for system in SYSTEMS)
        lines.append(f"{workload.title:<34} {cells} {figures[f'{key}ratio']:>19.2f}")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line; measure and print, or serve as a child."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace", description="The cost of recording one operation."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each system is measured (default: %(default)s)"
    )
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    if arguments.child is not None:
        serve(arguments.child)
        return
    figures = collect(arguments.rounds)
    if arguments.json:
        print(json.dumps({**figures, "rounds": arguments.rounds}))
    else:
        print(render(figures, arguments.rounds))


if __name__ == "__main__":
    main()
