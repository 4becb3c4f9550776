"""The order in which workers measure one workload: first steps, then interleaved rounds, then counts and memory.

Each system has its own process. Processes of a workload stay alive together and measure in turn, in an order that
rotates every round, so that whatever else the machine does falls on all of them. A system that fails or takes too long
is marked with the reason and left out; the others go on.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.children import EXACT_ALLOCATOR, STEADY_ALLOCATOR, Child, WorkerError
from benchmarks.workloads import WORKLOADS

# What a single request may take beyond its own limit: a step cannot be interrupted, and a compile may be in it.
GRACE_S = 400.0
# The same when the time for everything is over.
LAST_GRACE_S = 15.0
# A first step that takes longer than this is not measured again: it is a compile, and its noise does not matter.
LONG_START_S = 10.0
SHORTEST_SAMPLES = 3
MEMORY_STEPS = 3
SECOND_STEPS = 10

# The workloads of the short form for systems that take minutes on others: compiling, or running, d with the original.
SHORT_FORM = {"compile": "abc", "compile-optimizer": "abc", "ltc-inductor": "abc", "original": "abcefghj"}

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured."""

    rounds: int = 15
    first_steps: int = 50
    # Processes whose first step is timed.
    starts: int = 3
    read_every: int = 1
    # Threads of a kernel; 0 for PyTorch's own choice.
    threads: int = 1
    # The least that a system runs in a round, and the most that it runs in its first steps, and in all rounds.
    sample_s: float = 0.3
    first_limit_s: float = 60.0
    rounds_limit_s: float = 60.0
    # The most that warming up may take: compiles, some of them in the background.
    settle_limit_s: float = 240.0
    # Slow systems on few workloads only.
    short: bool = False
    memory: bool = True
    second: bool = True
    # What a process may take: the original needs far more than others where it cannot record an optimizer.
    memory_limit_gb: float = 9.0
    # A folder that keeps what compilers made; None for a fresh one each time, which makes first steps comparable.
    cache: Path | None = None
    # Other interpreters for systems that need another PyTorch.
    pythons: dict[str, str] = field(default_factory=dict)
    # On the clock time.monotonic: what has not begun by then is left out.
    deadline: float = float("inf")

    def left(self, limit_s: float) -> float:
        """`limit_s`, or what is left of the time for everything."""
        return max(0.0, min(limit_s, self.deadline - time.monotonic()))

    def timeout(self, limit_s: float = 0.0) -> float:
        """The most that a request may take which should take `limit_s`."""
        return min(limit_s + GRACE_S, self.left(float("inf")) + LAST_GRACE_S)

    def over(self) -> bool:
        """Whether the time for everything is over."""
        return time.monotonic() >= self.deadline


class Session:
    """One workload on several systems: a process each, and the figures of each."""

    def __init__(self, workload: str, systems: Sequence[str], options: Options, say: Callable[[str], None]) -> None:
        self.workload = WORKLOADS[workload]
        self.options = options
        self.figures: dict[str, Figures] = {name: {"status": "ok"} for name in systems}
        self._children: dict[str, Child] = {}
        self._say = say
        self._folder = Path(tempfile.mkdtemp(prefix="torch_ltc_bench_"))

    def measure(self) -> dict[str, Figures]:
        """All figures by system; every process is gone afterwards."""
        try:
            self._leave_out()
            self._first()
            self._settle()
            self._rounds()
            self._report()
            self._end_all()
            if self.options.second:
                self._second()
            if self.options.memory:
                self._memory()
        finally:
            self._end_all()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self.figures

    def _leave_out(self) -> None:
        for name, figures in self.figures.items():
            if name == "compile-optimizer" and not self.workload.has_optimizer:
                figures.update(status="left out", reason="there is no optimizer: the same as compile")
            elif self.options.short and self.workload.key not in SHORT_FORM.get(name, self.workload.key):
                figures.update(status="left out", reason="takes too long for the short form")

    def _names(self) -> list[str]:
        return [name for name, figures in self.figures.items() if figures["status"] == "ok"]

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        """Do something with one system. What goes wrong ends that system alone."""
        if self.options.over():
            self._drop(name, "left out", "the time was over")
            return
        try:
            action()
        except WorkerError as error:
            self._drop(name, "failed", str(error))

    def _attempt_extra(self, name: str, what: str, action: Callable[[], None]) -> None:
        """As `_attempt`, for a figure without which the others of the system stand."""
        if self.options.over():
            return
        try:
            action()
        except WorkerError as error:
            self.figures[name].setdefault("notes", []).append(f"{what}: {error}")
            self._say(f"{self.workload.key} {name}: {what}: {error}")

    def _drop(self, name: str, status: str, reason: str) -> None:
        self.figures[name].update(status=status, reason=reason)
        self._say(f"{self.workload.key} {name}: {status}: {reason}")
        child = self._children.pop(name, None)
        if child is not None:
            child.close()

    def _cache(self, name: str, start: int = 0) -> Path:
        if self.options.cache is not None:
            return self.options.cache / name
        return self._folder / name / str(start)

    def _open(self, name: str, start: int = 0, allocator: Mapping[str, str] = STEADY_ALLOCATOR) -> Child:
        python = self.options.pythons.get(name, sys.executable)
        return Child(
            name,
            self.workload.key,
            self._cache(name, start),
            python=python,
            allocator=allocator,
            memory_limit_bytes=int(self.options.memory_limit_gb * 2**30),
            threads=self.options.threads,
        )

    def _first(self) -> None:
        """First steps of fresh processes; the process of the first start stays."""
        for start in range(self.options.starts):
            for name in self._names():
                figures = self.figures[name]
                if start and figures["starts_s"][0] > LONG_START_S:
                    continue
                self._attempt(name, partial(self._start, name, start))

    def _start(self, name: str, start: int) -> None:
        figures = self.figures[name]
        child = self._open(name, start)
        if start == 0:
            self._children[name] = child
        try:
            built = child.ask("build", timeout_s=self.options.timeout())
            steps = 1 if start else self.options.first_steps
            limit_s = self.options.left(self.options.first_limit_s)
            first = child.ask("first", timeout_s=self.options.timeout(limit_s), steps=steps, limit_s=limit_s)
        finally:
            if start:
                child.close()
        figures.setdefault("starts_s", []).append(first["step_s"][0])
        if start == 0:
            figures.update(
                open_s=child.opened["open_s"],
                build_s=built["build_s"],
                first_steps_s=first["step_s"],
                compiling=first["compiling"],
                values=first["values"],
                first_compiles=first["compiles"],
            )
            self._say(f"{self.workload.key} {name}: first step {first['step_s'][0]:.3f} s")

    def _settle(self) -> None:
        for name in self._names():
            self._attempt(name, partial(self._settle_one, name))

    def _settle_one(self, name: str) -> None:
        limit_s = self.options.left(self.options.settle_limit_s)
        settled = self._children[name].ask("settle", timeout_s=self.options.timeout(limit_s), limit_s=limit_s)
        self.figures[name].update(settled=settled["settled"], warm_step_s=settled["step_s"])

    def _rounds(self) -> None:
        names = self._names()
        for name in names:
            self.figures[name]["rounds"] = []
        used = dict.fromkeys(names, 0.0)
        for turn in range(self.options.rounds):
            for name in rotated(names, turn):
                samples = len(self.figures[name]["rounds"])
                enough = samples >= SHORTEST_SAMPLES and used[name] > self.options.rounds_limit_s
                if self.figures[name]["status"] != "ok" or enough or (samples and self.options.over()):
                    continue
                began = time.perf_counter()
                self._attempt(name, partial(self._sample, name, turn))
                used[name] += time.perf_counter() - began

    def _sample(self, name: str, turn: int) -> None:
        figures = self.figures[name]
        steps = steps_of_sample(figures["warm_step_s"], self.options.sample_s, self.workload.period)
        answer = self._children[name].ask(
            "run", timeout_s=self.options.timeout(), steps=steps, read_every=self.options.read_every
        )
        figures["rounds"].append({"round": turn, "steps": steps, **answer})

    def _report(self) -> None:
        for name in self._names():
            self._attempt_extra(name, "counts", partial(self._report_one, name))

    def _report_one(self, name: str) -> None:
        self.figures[name].update(self._children[name].ask("report", timeout_s=self.options.timeout()))

    def _second(self) -> None:
        for name in self._names():
            if name.startswith("ltc-"):
                self._attempt_extra(name, "second process", partial(self._second_one, name))

    def _second_one(self, name: str) -> None:
        """How much a second process with the same caches compiles."""
        with self._open(name) as child:
            child.ask("build", timeout_s=self.options.timeout())
            limit_s = self.options.left(self.options.first_limit_s)
            steps = min(self.options.first_steps, SECOND_STEPS)
            child.ask("first", timeout_s=self.options.timeout(limit_s), steps=steps, limit_s=limit_s)
            limit_s = self.options.left(self.options.settle_limit_s)
            child.ask("settle", timeout_s=self.options.timeout(limit_s), limit_s=limit_s)
            self.figures[name]["second_compiles"] = child.ask("report", timeout_s=self.options.timeout())["compiles"]

    def _memory(self) -> None:
        for name in self._names():
            self._attempt_extra(name, "memory", partial(self._memory_one, name))

    def _memory_one(self, name: str) -> None:
        """Peak memory of a fresh process, which finds what was compiled before."""
        with self._open(name, allocator=EXACT_ALLOCATOR) as child:
            limit_s = self.options.left(self.options.settle_limit_s)
            base = child.ask("load", timeout_s=self.options.timeout(limit_s), limit_s=limit_s)["resident_bytes"]
            child.ask("build", timeout_s=self.options.timeout())
            child.ask("settle", timeout_s=self.options.timeout(limit_s), limit_s=limit_s)
            memory = child.ask("memory", timeout_s=self.options.timeout(), steps=MEMORY_STEPS)
            self.figures[name]["base_bytes"] = base
            self.figures[name].update({key: value - base for key, value in memory.items()})

    def _end_all(self) -> None:
        while self._children:
            self._children.popitem()[1].close()


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """`names`, beginning with another one each turn."""
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def steps_of_sample(step_s: float, sample_s: float, period: int) -> int:
    """How many steps fill `sample_s`: whole periods of the data, at least one."""
    periods = max(1, round(sample_s / max(step_s, 1e-6) / period))
    return min(periods, max(1, 1000 // period)) * period
