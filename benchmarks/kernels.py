"""Device time of a training step by kind of kernel, one system after the other: what a graph's replay is made of.

    python -m benchmarks.kernels [--systems "reduce-overhead,jit inductor"] [--size "12 layers"] [--top 25]

The steps are those of `benchmarks.graphs`. A figure is milliseconds, or launches, per step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from typing import Any

import torch

from benchmarks.graphs import SIZES, SYSTEMS, TIMEOUT_S, WARM, build, prepare
from benchmarks.timeline import GPU_TYPES

PROFILED = 10
# Kinds of kernels by parts of their names, the first that fits.
KINDS = (
    ("copy", ("memcpy", "Memcpy")),
    ("fill", ("memset", "Memset", "FillFunctor")),
    ("attention", ("flash", "fmha", "attention", "sdpa", "cudnn_generated")),
    ("matrix product", ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitK")),
    ("triton foreach", ("triton_for_",)),
    ("triton reduction", ("triton_red_", "triton_per_", "triton_tem_")),
    ("triton pointwise", ("triton_",)),
    ("foreach", ("multi_tensor_apply",)),
)


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other")


def profile(system: str, size: str, top: int) -> None:
    """Run one system, and print its kernels."""
    prepare(system)
    step, batches = build(system, SIZES[size])
    for number in range(WARM):
        step(batches[number % len(batches)])
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(PROFILED):
            step(batches[number % len(batches)]).detach().cpu()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type in GPU_TYPES:
            kernels[event.name].append(float(event.device_time) / 1e3)
    print(table(system, kernels, top), flush=True)


def table(system: str, kernels: dict[str, list[float]], top: int) -> str:
    """Time and launches per step, by kind and by kernel."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, times in kernels.items():
        kinds[kind_of(name)] += times
    lines = [f"## {system}", "", "| kind | ms a step | launches |", "|---|---|---|"]
    lines += _rows(kinds, len(kinds))
    lines.append(f"| all | {sum(map(sum, kinds.values())) / PROFILED:.3f} | |")
    lines += ["", "| kernel | ms a step | launches |", "|---|---|---|"]
    return "\n".join([*lines, *_rows({name[:90]: times for name, times in kernels.items()}, top), ""])


def _rows(found: dict[str, list[float]], most: int) -> list[str]:
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))[:most]
    return [f"| {name} | {sum(times) / PROFILED:.3f} | {len(times) / PROFILED:g} |" for name, times in ordered]


def main() -> None:
    """Profile each system in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Device time by kind of kernel.")
    parser.add_argument("--systems", default="reduce-overhead,jit inductor")
    parser.add_argument("--size", choices=SIZES, default="12 layers")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.child:
        profile(options.child, options.size, options.top)
        return
    for system in options.systems.split(","):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernels", "--child", system]
        command += ["--size", options.size, "--top", str(options.top)]
        subprocess.run(command, timeout=TIMEOUT_S, check=True)


if __name__ == "__main__":
    main()
