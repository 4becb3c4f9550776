"""Gaps of the device in steady steps: each system in a process of its own, on a GPU with the kernels that PyTorch's
profiler saw, on the CPU (`--small`) with the runs of programs.

    python -m benchmarks.timeline [--systems eager,ltc,ltc-jit] [--workload large-sgd] [--steps 30] [--small]
    python -m benchmarks.timeline --asynchronous     the loss is logged with `async_item`: nobody waits for it

A line says how long a step takes, which part of the time the device is busy, how many gaps longer than 200 us a step
has, and the longest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.children import CUDA_VARIABLE
from benchmarks.gpu_workloads import GPU_WORKLOADS, SMALL_WORKLOADS
from benchmarks.systems import SYSTEMS, System, open_system
from benchmarks.table import columns
from benchmarks.worker import Worker

# Where a device of PyTorch's users is registered, the profiler gives what runs on a GPU its type.
GPU_TYPES = (torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.PrivateUse1)
READ_EVERY = 10
WARM_LIMIT_S = 200.0
TIMEOUT_S = 400.0


def kernel_intervals(profile: Any) -> list[tuple[float, float]]:
    """Begin and end in seconds of all that ran on the GPU: kernels and copies."""
    found = [event.time_range for event in profile.events() if event.device_type in GPU_TYPES]
    return [(each.start / 1e6, each.end / 1e6) for each in found]


def program_intervals() -> list[tuple[float, float]]:
    """The same of programs on the CPU, from the history of the process."""
    from torch_ltc.debug.history import history  # noqa: PLC0415  eager runs in processes without it

    spans = history.recording(texts=False).spans
    return [(span.begin_s, span.begin_s + span.duration_s) for span in spans if span.kind == "run"]


def log_later(system: System) -> None:
    """From here on a read is asked for and not waited for; eager keeps the tensor, which is what it has."""
    logged: list[object] = []
    if system.device != "ltc":
        system.read = lambda tensor: logged.append(tensor.detach()) or 0.0  # type: ignore[method-assign, func-returns-value]
        return
    from torch_ltc import async_item  # noqa: PLC0415  eager runs in processes without it

    system.read = lambda tensor: logged.append(async_item(tensor)) or 0.0  # type: ignore[method-assign, func-returns-value]


def measure(system: str, workload: str, steps: int, physical: str, asynchronous: bool) -> dict[str, Any]:
    """The intervals of some steady steps of one system, and how long a step took."""
    table = SMALL_WORKLOADS if physical == "cpu" else GPU_WORKLOADS
    worker = Worker(open_system(system, physical), table[workload], physical)
    worker.build()
    worker.first(READ_EVERY, WARM_LIMIT_S)
    worker.settle(WARM_LIMIT_S)
    if asynchronous:
        log_later(worker.system)
        worker.run(READ_EVERY, READ_EVERY)
    if physical == "cuda":
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step_s = worker.run(steps, READ_EVERY)["step_s"]
            torch.cuda.synchronize()
        return {"step_s": step_s, "intervals": kernel_intervals(profile)}
    if system.startswith("ltc"):
        import torch_ltc  # noqa: PLC0415

        torch_ltc.debug.history.history.clear()
    began = time.perf_counter()
    step_s = worker.run(steps, READ_EVERY)["step_s"]
    intervals = program_intervals() if system.startswith("ltc") else [(began, time.perf_counter())]
    return {"step_s": step_s, "intervals": intervals}


def row(system: str, steps: int, figures: dict[str, Any]) -> list[str]:
    """The line of a system."""
    from torch_ltc.debug.gaps import busy_s, gaps  # noqa: PLC0415  not in the processes that measure eager

    intervals = [(begin, end) for begin, end in figures["intervals"]]
    if not intervals:
        return [system, f"{figures['step_s'] * 1e3:.2f}", "-", "-", "-", "-"]
    whole_s = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
    found = gaps(intervals)
    longest_s = max((gap.duration_s for gap in found), default=0.0)
    return [
        system,
        f"{figures['step_s'] * 1e3:.2f}",
        f"{100 * busy_s(intervals) / whole_s:.0f} %",
        f"{len(found) / steps:.2f}",
        f"{sum(gap.duration_s for gap in found) / steps * 1e6:.0f}",
        f"{longest_s * 1e6:.0f}",
    ]


def run(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one system, from a process of its own; a process that fails gives its last words."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.timeline", "--child", system]
    command += ["--workload", options.workload, "--steps", str(options.steps), *(["--small"] if options.small else [])]
    command += ["--asynchronous"] if options.asynchronous else []
    environment = {name: value for name, value in os.environ.items() if name != CUDA_VARIABLE}
    environment |= {"OMP_NUM_THREADS": "1", **({} if options.small else {CUDA_VARIABLE: "1"})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {TIMEOUT_S:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure the systems one after the other, and print a line of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description="Gaps of the device.")
    parser.add_argument("--systems", default="eager,ltc,ltc-interpreter,ltc-jit")
    parser.add_argument("--workload", default="")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="toy sizes on CPU, to try the command")
    parser.add_argument(
        "--asynchronous", action="store_true", help="log the loss with async_item instead of reading it"
    )
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.workload = options.workload or ("small-sgd" if options.small else "large-sgd")
    if options.child:
        physical = "cpu" if options.small else "cuda"
        print(json.dumps(measure(options.child, options.workload, options.steps, physical, options.asynchronous)))
        return
    rows = [["system", "ms a step", "busy", "gaps > 200 us a step", "us in them a step", "longest us"]]
    for system in options.systems.split(","):
        figures = run(system, options)
        if "failed" in figures:
            print(f"{system}: {figures['failed']}", file=sys.stderr)
        else:
            rows.append(row(system, options.steps, figures))
    print(columns(rows))


if __name__ == "__main__":
    main()
