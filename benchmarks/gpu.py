"""The benchmark on a GPU: training and decoding in bfloat16, each system in its own process, as ratios to eager.

Processes warm up side by side, because compiling takes most of the time; when all are warm they measure in turn, one at
a time, in rotating order. What is not warm in time is left out. Nothing has to be installed: it runs from the root of
the repository with a Python that has PyTorch, and transformers for decoding.

    python -m benchmarks.gpu [--only llama] [--systems eager,ltc-inductor] [--rounds N] [--limit S] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Child, WorkerError
from benchmarks.gpu_workloads import GPU_WORKLOADS, SMALL_WORKLOADS
from benchmarks.results import BASE, FORMAT, machine, save, summarise
from benchmarks.run import RESULTS, chosen, end_on_signals
from benchmarks.schedule import Figures, rotated, steps_of_sample
from benchmarks.table import render_ratios, render_workload

# Those that compile longest come first, so that the warm-up ends as early as it can.
SYSTEMS = ("ltc-inductor", "compile", "ltc-torchscript", "eager")
SHOWN = ("eager", "compile", "ltc-torchscript", "ltc-inductor")
LIMIT_S = 450.0
# The share of the time after which what is not warm is given up.
WARM_SHARE = 0.7
REPORT_S = 30.0
SAMPLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, and until when, on the clock time.monotonic."""

    rounds: int
    parallel: int
    physical: str
    began: float
    limit_s: float
    sample_s: float = 0.5
    # Reading every step would measure the way to the host and back, not the training.
    read_every: int = 10
    first_steps: int = 10

    def left_to_warm(self) -> float:
        """Seconds left for warming up; at least one, so that asking is possible."""
        return max(1.0, self.began + self.limit_s * WARM_SHARE - time.monotonic())

    def over(self) -> bool:
        """Whether measuring should end."""
        return time.monotonic() > self.began + self.limit_s - REPORT_S


@dataclass(slots=True)
class Pair:
    """One workload on one system."""

    workload: str
    system: str
    child: Child | None = None
    figures: Figures = field(default_factory=lambda: {"status": "ok"})

    def drop(self, error: WorkerError) -> None:
        """Give it up."""
        self.figures.update(status="failed", reason=str(error))
        if self.child is not None:
            self.child.close()
            self.child = None


def warm(pair: Pair, plan: Plan, folder: Path) -> None:
    """Start a process and step until nothing is compiled any more."""
    try:
        cache = folder / pair.workload / pair.system
        left_s = plan.left_to_warm()
        pair.child = Child(
            pair.system, pair.workload, cache, allocator={}, physical=plan.physical, open_timeout_s=left_s
        )
        pair.figures["build_s"] = pair.child.ask("build", timeout_s=plan.left_to_warm())["build_s"]
        left_s = plan.left_to_warm()
        first = pair.child.ask("first", timeout_s=left_s, steps=plan.first_steps, limit_s=left_s)
        left_s = plan.left_to_warm()
        settled = pair.child.ask("settle", timeout_s=left_s + 10, limit_s=left_s)
    except WorkerError as error:
        pair.drop(error)
        return
    pair.figures.update(
        starts_s=first["step_s"][:1],
        first_steps_s=first["step_s"],
        compiling=first["compiling"],
        values=first["values"],
        settled=settled["settled"],
        warm_step_s=settled["step_s"],
        rounds=[],
    )


def measure_rounds(pairs: list[Pair], plan: Plan) -> None:
    """Interleaved rounds of the systems of one workload."""
    for turn in range(plan.rounds):
        if plan.over():
            return
        for place in rotated([str(number) for number in range(len(pairs))], turn):
            pair = pairs[int(place)]
            if pair.child is None:
                continue
            steps = steps_of_sample(pair.figures["warm_step_s"], plan.sample_s, plan.read_every)
            try:
                answer = pair.child.ask("run", timeout_s=SAMPLE_TIMEOUT_S, steps=steps, read_every=plan.read_every)
            except WorkerError as error:
                pair.drop(error)
                continue
            pair.figures["rounds"].append({"round": turn, "steps": steps, **answer})


def report(pair: Pair) -> None:
    """Counts and memory, after the rounds."""
    if pair.child is None:
        return
    try:
        pair.figures.update(pair.child.ask("report", timeout_s=SAMPLE_TIMEOUT_S))
    except WorkerError as error:
        pair.drop(error)
        return
    pair.child.close()
    pair.child = None


def measure(workloads: tuple[str, ...], systems: tuple[str, ...], plan: Plan) -> dict[str, dict[str, Figures]]:
    """All figures by workload and system; every process is gone afterwards."""
    ordered = [name for name in SYSTEMS if name in systems]
    pairs = [Pair(workload, system) for workload in workloads for system in ordered]
    folder = Path(tempfile.mkdtemp(prefix="torch_ltc_bench_"))
    # The pool stays open until the end: Linux ends a worker when the thread that started it ends.
    with ThreadPoolExecutor(plan.parallel) as pool:
        try:
            futures: list[Future[None]] = [pool.submit(warm, pair, plan, folder) for pair in pairs]
            for future, pair in zip(futures, pairs):
                future.result()
                _say(f"{pair.workload} {pair.system}: {pair.figures.get('reason', 'warm')}")
            for workload in workloads:
                mine = [pair for pair in pairs if pair.workload == workload]
                measure_rounds(mine, plan)
                for pair in mine:
                    report(pair)
        finally:
            for pair in pairs:
                if pair.child is not None:
                    pair.child.close()
            shutil.rmtree(folder, ignore_errors=True)
    found = {(pair.workload, pair.system): pair.figures for pair in pairs}
    return {
        workload: {system: found[workload, system] for system in SHOWN if (workload, system) in found}
        for workload in workloads
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Step times on a GPU.")
    parser.add_argument("--only", metavar="llama,...", help="these workloads")
    parser.add_argument("--systems", metavar="eager,...", help="these systems; eager always runs")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default: %(default)s")
    parser.add_argument("--parallel", type=int, default=8, metavar="N", help="processes that warm up side by side")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for everything")
    parser.add_argument("--small", action="store_true", help="toy sizes on CPU, to try the command")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json", metavar="FILE", help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    """Parse the command line, measure, print and save."""
    arguments = _arguments()
    table = SMALL_WORKLOADS if arguments.small else GPU_WORKLOADS
    if not arguments.small and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu: no CUDA device is available\n  try: --small, which runs toy sizes on CPU")
    workloads = chosen(arguments.only, tuple(table), tuple(table), "workload")
    systems = {BASE, *chosen(arguments.systems, SYSTEMS, SYSTEMS, "system")}
    physical = "cpu" if arguments.small else "cuda"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    end_on_signals()
    began = time.monotonic()
    plan = Plan(arguments.rounds, arguments.parallel, physical, began, arguments.limit)
    figures = measure(workloads, tuple(systems), plan)
    for by_system in figures.values():
        summarise(by_system)
    results: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine("CPU" if arguments.small else torch.cuda.get_device_name()),
        "options": {"rounds": plan.rounds, "read_every": plan.read_every, "first_steps": plan.first_steps},
        "systems": [name for name in SHOWN if name in systems],
        "skipped": {},
        "titles": {key: table[key].title for key in workloads},
        "workloads": figures,
    }
    save(arguments.json, results)
    for key in workloads:
        print(render_workload(f"{key}: {table[key].title}", figures[key]) + "\n")
    print(render_ratios(results))
    print(f"written: {arguments.json} after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
