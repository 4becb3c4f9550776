"""From samples to figures: medians with quartiles, ratios to eager round by round, and the file that keeps them.

Owns the meaning of every figure that is printed, drawn or judged. Ratios are taken within a round, where both sides met
the same machine, and only then is the median taken.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
BASE = "eager"
# Systems round differently, and training adds up: agreement is to a few digits.
AGREEMENT_RELATIVE = 2e-2
AGREEMENT_ABSOLUTE = 1e-3
AGREEMENT_STEPS = 5

Figures = dict[str, Any]


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean, or None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def by_round(figures: Figures, key: str) -> dict[int, float]:
    """The samples of one quantity by round; rounds without it are left out."""
    return {sample["round"]: sample[key] for sample in figures.get("rounds", ()) if sample.get(key) is not None}


def ratios(figures: Figures, base: Figures, key: str, base_key: str | None = None) -> list[float]:
    """Sample over sample of the same round, for all rounds that both have."""
    above, below = by_round(figures, key), by_round(base, base_key or key)
    return [above[turn] / below[turn] for turn in above if below.get(turn)]


def ratio(workload: Mapping[str, Figures], system: str, base: str, key: str = "step_s") -> float | None:
    """The median ratio of two systems on one workload; None where one has no samples."""
    found = ratios(workload.get(system, {}), workload.get(base, {}), key)
    return statistics.median(found) if found else None


def agree(values: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether two systems read the same in their first steps."""
    return all(
        math.isclose(value, wanted, rel_tol=AGREEMENT_RELATIVE, abs_tol=AGREEMENT_ABSOLUTE)
        for value, wanted in list(zip(values, expected))[:AGREEMENT_STEPS]
    )


def equal_steps(values: Sequence[float], expected: Sequence[float]) -> int:
    """How many of the first steps read the very same."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(values, expected))))


def summarise(workload: Mapping[str, Figures]) -> None:
    """Add to every system of a workload what follows from its samples."""
    base = workload.get(BASE, {})
    for figures in workload.values():
        if figures.get("starts_s"):
            figures["first_step_s"] = statistics.median(figures["starts_s"])
            figures["worst_later_step_s"] = max(figures["first_steps_s"][1:], default=None)
        if figures.get("rounds"):
            for key in ("step_s", "cpu_s", "record_s", "record_cpu_s"):
                samples = list(by_round(figures, key).values())
                figures[key] = quartiles(samples) if samples else None
            for key, name in (("step_s", "ratio"), ("cpu_s", "cpu_ratio")):
                found = ratios(figures, base, key)
                figures[name] = quartiles(found) if found else None
        if figures.get("values") and base.get("values"):
            figures["agrees"] = agree(figures["values"], base["values"])
            figures["equal_steps"] = equal_steps(figures["values"], base["values"])


def threads_text(threads: int) -> str:
    """The number of threads of a kernel in words."""
    return {0: "PyTorch's number of threads", 1: "one thread"}.get(threads, f"{threads} threads")


def beside(results: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Results with the systems of another run of the same workloads added, under names that say its number of threads.
    The ratios of each run are those to its own eager."""
    suffix = threads_text(other["options"].get("threads", 1))
    names = {name: f"{name}, {suffix}" for name in other["systems"] if name != BASE}
    workloads: dict[str, Any] = {key: dict(systems) for key, systems in results["workloads"].items()}
    for key, systems in workloads.items():
        found = other["workloads"].get(key, {})
        systems.update({names[name]: figures for name, figures in found.items() if name in names})
    return {**results, "systems": [*results["systems"], *names.values()], "workloads": workloads}


def machine(device: str = "CPU, one thread") -> dict[str, Any]:
    """Where it was measured."""
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Read a file of results; raises ValueError when it is of another form."""
    results: dict[str, Any] = json.loads(path.read_text())
    if results.get("format") != FORMAT:
        raise ValueError(f"{path} has format {results.get('format')!r}, not {FORMAT}: measure anew")
    return results
