"""The benchmark on a GPU: training and decoding in bfloat16, each system in its own process, as ratios to eager.

One workload after the other: its processes warm up side by side, because compiling takes most of the time; when all are
warm they measure in turn, one at a time, in rotating order. What is not warm in time, or fails, is reported and left
out. The file is written after every workload. Nothing has to be installed: it runs from the root of the repository with
a Python that has PyTorch, and transformers for decoding.

    python -m benchmarks.gpu [--quick] [--only llama] [--systems eager,ltc-jit] [--merge] [--rounds N] [--limit S]
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
from benchmarks.markdown import gpu_table
from benchmarks.results import BASE, FORMAT, load, machine, save, summarise
from benchmarks.run import RESULTS, chosen, end_on_signals
from benchmarks.schedule import Figures, rotated, steps_of_sample
from benchmarks.table import render_workload

# Those that compile longest come first, so that the warm-up ends as early as it can.
SYSTEMS = (
    "compile-max-autotune",
    "ltc-jit-inductor",
    "ltc-inductor",
    "compile-reduce-overhead",
    "compile",
    "ltc",
    "ltc-torchscript",
    "ltc-interpreter",
    "ltc-recorded",
    "ltc-jit",
    "eager-graph",
    "eager",
)
SHOWN = (
    "eager",
    "eager-graph",
    "compile",
    "compile-reduce-overhead",
    "compile-max-autotune",
    "ltc",
    "ltc-recorded",
    "ltc-interpreter",
    "ltc-torchscript",
    "ltc-inductor",
    "ltc-jit",
    "ltc-jit-inductor",
)
# It autotunes for minutes.
LEFT_OUT_QUICKLY = frozenset({"compile-max-autotune"})
# In the order of measuring: what takes longest to compile comes last, and gets the time that the others leave.
WORKLOADS = ("middle-sgd", "llama", "large-sgd", "resnet")
LIMIT_S, QUICK_LIMIT_S = 560.0, 300.0
ROUNDS, QUICK_ROUNDS = 7, 3
# The share of a workload's time after which what is not warm is given up.
WARM_SHARE = 0.75
REPORT_S = 10.0
SAMPLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured of a workload, and until when, on the clock time.monotonic."""

    rounds: int
    parallel: int
    physical: str
    began: float
    limit_s: float
    sample_s: float = 0.5
    # Reading every step would measure the way to the host and back, not the training.
    read_every: int = 10
    first_steps: int = 50

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
        self.end()

    def end(self) -> None:
        """End its process, if there is one."""
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


def measure(workload: str, systems: tuple[str, ...], plan: Plan) -> dict[str, Figures]:
    """All figures of a workload by system; every process is gone afterwards."""
    pairs = [Pair(workload, system) for system in SYSTEMS if system in systems]
    folder = Path(tempfile.mkdtemp(prefix="torch_ltc_bench_"))
    # The pool stays open until the end: Linux ends a worker when the thread that started it ends.
    with ThreadPoolExecutor(plan.parallel) as pool:
        try:
            futures: list[Future[None]] = [pool.submit(warm, pair, plan, folder) for pair in pairs]
            for future, pair in zip(futures, pairs, strict=True):
                future.result()
                _say(f"{pair.workload} {pair.system}: {pair.figures.get('reason', 'warm')}")
            measure_rounds(pairs, plan)
            for pair in pairs:
                report(pair)
        finally:
            # Together: a process may take seconds to end.
            list(pool.map(Pair.end, pairs))
            shutil.rmtree(folder, ignore_errors=True)
    found = {pair.system: pair.figures for pair in pairs}
    return {system: found[system] for system in SHOWN if system in found}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Step times on a GPU.")
    parser.add_argument("--only", metavar="llama,...", help="these workloads; also large-adamw and middle-adamw")
    parser.add_argument("--systems", metavar="eager,...", help="these systems; eager always runs")
    parser.add_argument("--quick", action="store_true", help="without autotuning, with few rounds, in 5 minutes")
    parser.add_argument("--merge", action="store_true", help="keep the other workloads and systems of the file")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {ROUNDS}")
    parser.add_argument("--parallel", type=int, default=12, metavar="N", help="processes that warm up side by side")
    parser.add_argument("--limit", type=float, metavar="S", help=f"seconds for everything; default: {LIMIT_S:.0f}")
    parser.add_argument("--small", action="store_true", help="toy sizes on CPU, to try the command")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json", metavar="FILE", help="default: %(default)s")
    return parser.parse_args()


def results_so_far(path: Path, device: str, merge: bool) -> dict[str, Any]:
    """Results without a workload, or those of the file if they are of the same machine."""
    here = machine(device)
    if merge and path.exists():
        kept = load(path)
        if all(kept["machine"][key] == here[key] for key in ("device", "torch")):
            return kept
        _say(f"{path} is of another device or torch: nothing is kept of it")
    return {
        "format": FORMAT,
        "machine": here,
        "options": {},
        "systems": [],
        "skipped": {},
        "titles": {},
        "workloads": {},
    }


def merge_figures(results: dict[str, Any], workload: str, title: str, figures: dict[str, Figures]) -> None:
    """Put the figures of a workload into the results; ratios are those of the run that they were measured in."""
    merged = {**results["workloads"].get(workload, {}), **figures}
    results["workloads"][workload] = {system: merged[system] for system in SHOWN if system in merged}
    results["titles"][workload] = title
    found = {system for by_system in results["workloads"].values() for system in by_system}
    results["systems"] = [system for system in SHOWN if system in found]


def main() -> None:
    """Parse the command line, measure, print and save."""
    arguments = _arguments()
    table = SMALL_WORKLOADS if arguments.small else GPU_WORKLOADS
    if not arguments.small and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu: no CUDA device is available\n  try: --small, which runs toy sizes on CPU")
    workloads = chosen(arguments.only, tuple(table), tuple(table) if arguments.small else WORKLOADS, "workload")
    default = tuple(name for name in SYSTEMS if not (arguments.quick and name in LEFT_OUT_QUICKLY))
    systems = (BASE, *(name for name in chosen(arguments.systems, SYSTEMS, default, "system") if name != BASE))
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    end = time.monotonic() + (arguments.limit or (QUICK_LIMIT_S if arguments.quick else LIMIT_S))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    end_on_signals()
    device = "CPU" if arguments.small else torch.cuda.get_device_name()
    results = results_so_far(arguments.json, device, arguments.merge)
    for number, key in enumerate(workloads):
        now = time.monotonic()
        limit_s = max(1.0, (end - now) / (len(workloads) - number))
        plan = Plan(rounds, arguments.parallel, "cpu" if arguments.small else "cuda", now, limit_s)
        figures = measure(key, systems, plan)
        summarise(figures)
        results["options"] = {"rounds": rounds, "read_every": plan.read_every, "first_steps": plan.first_steps}
        merge_figures(results, key, table[key].title, figures)
        save(arguments.json, results)
        print(render_workload(f"{key}: {table[key].title}", figures), flush=True)
        print(f"{key} took {time.monotonic() - now:.0f} s\n", flush=True)
    print(gpu_table(results))
    print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
