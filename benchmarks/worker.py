"""The process that holds one workload on one system and measures when asked.

Owns all timing. It speaks JSON lines: a request on standard input, an answer on the pipe that was standard output.
Whatever libraries print goes to standard error. Without standard input, or without its parent, it ends.

    python -m benchmarks.worker --system eager --workload c
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import re
import resource
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.gpu_workloads import GPU_WORKLOADS, SMALL_WORKLOADS
from benchmarks.systems import STEADY_STEPS, SYSTEMS, System, UnavailableError, open_system
from benchmarks.workloads import WORKLOADS, Step, Workload, prelude

ALL_WORKLOADS = {**WORKLOADS, **GPU_WORKLOADS, **SMALL_WORKLOADS}
PRELUDE_STEPS = 8
CAPTURED_STEPS = 8
# Losses of first steps that are handed over, to be compared with eager's.
COMPARED_STEPS = 50
_PARENT_DEATH_SIGNAL = 1


class Worker:
    """One workload on one system."""

    def __init__(self, system: System, workload: Workload, physical: str) -> None:
        self.system = system
        self.physical = physical
        self.workload = workload
        self.step: Step | None = None
        self.values: list[float] = []

    def build(self) -> dict[str, Any]:
        """Make model and data, the same for every system."""
        torch.manual_seed(0)
        began = time.perf_counter()
        self.step = self.workload.build(self.system)
        return {"build_s": time.perf_counter() - began}

    def first(self, steps: int, limit_s: float) -> dict[str, Any]:
        """The first steps, each read and timed by itself; stops early when they take too long."""
        spans: list[tuple[float, float]] = []
        under_way = [False]
        deadline = time.perf_counter() + limit_s
        while len(spans) < steps and (not spans or time.perf_counter() < deadline):
            began = time.perf_counter()
            self._one_step()
            spans.append((began, time.perf_counter()))
            under_way.append(self.system.is_compiling())
        # A compile that has not ended yet is in no interval.
        beside = [before or after for before, after in itertools.pairwise(under_way)]
        compiling = self.system.compile_intervals()
        return {
            "step_s": [end - begin for begin, end in spans],
            "compiling": [
                other or any(a < end and b > begin for a, b in compiling)
                for other, (begin, end) in zip(beside, spans, strict=True)
            ],
            "values": self.values[:COMPARED_STEPS],
            "compiles": self.system.compiles(),
        }

    def settle(self, limit_s: float) -> dict[str, Any]:
        """Step until nothing is compiled any more, or until the time is over."""
        deadline = time.perf_counter() + limit_s
        steady = steps = 0
        durations: list[float] = []
        # Programs on a GPU are captured some steps after they are compiled.
        wanted = max(STEADY_STEPS if self.physical == "cpu" else CAPTURED_STEPS, self.workload.period)
        while steady < wanted and (time.perf_counter() < deadline or not steps):
            compiles = self.system.compiles()
            began = time.perf_counter()
            self._one_step()
            durations.append(time.perf_counter() - began)
            steps += 1
            steady = steady + 1 if self.system.compiles() == compiles and self.system.steady() else 0
        if self.physical == "cuda":
            # What was needed once, to compile and to capture, is not counted.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {"settled": steady >= wanted, "step_s": statistics.fmean(durations[-wanted:])}

    def run(self, steps: int, read_every: int) -> dict[str, Any]:
        """Time some steps: seconds per step on the wall clock, of CPU, and of recording."""
        assert self.step is not None
        record_s = record_cpu_s = 0.0
        tells_cpu = True
        self.system.timing_begins()
        cpu_began = time.process_time()
        began = time.perf_counter()
        for index in range(steps):
            self.system.step_began()
            waited_s = self.system.waited_s
            step_cpu_began = time.process_time()
            step_began = time.perf_counter()
            probe, held = self.step()
            record_s += time.perf_counter() - step_began - (self.system.waited_s - waited_s)
            record_cpu_s += time.process_time() - step_cpu_began
            # A program that ran inside the step took CPU time too, which cannot be told apart.
            tells_cpu = tells_cpu and self.system.waited_s == waited_s
            self.system.sync()
            if (index + 1) % read_every == 0 or index + 1 == steps:
                self.system.read(probe)
            del probe, held
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        self.system.timing_ends()
        return {
            "step_s": took_s / steps,
            "cpu_s": cpu_s / steps,
            "record_s": record_s / steps if self._tells_record() else None,
            "record_cpu_s": record_cpu_s / steps if self._tells_record() and tells_cpu else None,
        }

    def report(self) -> dict[str, Any]:
        """What is counted, not timed; runs one step more."""
        return {
            "operations": self.system.count_operations(self._one_step),
            "compiles": self.system.compiles(),
            "refused": len(self.system.refusals()),
            "refusals": self.system.refusals()[:3],
            "value": self.values[-1],
            "remarks": self.system.remarks()[:6],
            "device_peak_bytes": torch.cuda.max_memory_allocated() if self.physical == "cuda" else None,
            "device_reserved_bytes": torch.cuda.max_memory_reserved() if self.physical == "cuda" else None,
        }

    def load(self, limit_s: float) -> dict[str, Any]:
        """Import and compile what the system needs for anything, with a tiny training; memory counts from here."""
        torch.manual_seed(0)
        own, self.step = self.step, prelude(self.system)
        for _ in range(PRELUDE_STEPS):
            self._one_step()
        self.settle(limit_s)
        self.step = own
        gc.collect()
        return {"resident_bytes": _memory("VmRSS")}

    def memory(self, steps: int) -> dict[str, Any]:
        """The most memory so far, and the most while some steady steps run."""
        gc.collect()
        peak_bytes = _memory("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        for _ in range(steps):
            self._one_step()
        return {"peak_bytes": max(peak_bytes, _memory("VmHWM")), "steady_peak_bytes": _memory("VmHWM")}

    def _one_step(self) -> None:
        assert self.step is not None
        self.system.step_began()
        probe, held = self.step()
        self.system.sync()
        self.values.append(self.system.read(probe))
        del held

    def _tells_record(self) -> bool:
        if not self.system.records:
            return False
        return not self.workload.hides_reads or self.system.device == "ltc"


def _memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def _answers() -> TextIO:
    """The pipe to the parent; from here on everything printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _end_with_parent() -> None:
    """Have Linux end this process when its parent dies, also in the middle of a long step."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def serve(system_name: str, workload_name: str, physical: str, threads: int) -> None:
    """Answer requests until there are no more."""
    _end_with_parent()
    answers = _answers()

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    if threads:
        torch.set_num_threads(threads)
    began = time.perf_counter()
    try:
        worker = Worker(open_system(system_name, physical), ALL_WORKLOADS[workload_name], physical)
    except UnavailableError as error:
        answer(unavailable=str(error))
        return
    answer(open_s=time.perf_counter() - began)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            what = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            text = str(error).strip() or "no message"
            answer(error=f"{type(error).__name__}: {text.splitlines()[0]}")
            raise
        answer(**what)
    # Interpreters with compile threads and lazy devices may take long to end, or crash; everything is said.
    os._exit(0)


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description="Measure when asked.")
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--workload", choices=ALL_WORKLOADS, required=True)
    parser.add_argument("--physical", choices=("cpu", "cuda"), default="cpu", help="what computes in the end")
    parser.add_argument("--memory-limit", type=int, default=0, metavar="BYTES", help="0 for none")
    parser.add_argument("--threads", type=int, default=1, help="threads of a kernel; 0 for PyTorch's own choice")
    arguments = parser.parse_args()
    if arguments.memory_limit:
        resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_limit, arguments.memory_limit))
    serve(arguments.system, arguments.workload, arguments.physical, arguments.threads)


if __name__ == "__main__":
    main()
