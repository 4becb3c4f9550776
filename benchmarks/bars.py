"""The bars that speed is held to, each with what was measured and whether it passes.

Owns the bars. A bar that cannot be judged, because a figure is missing, says so and does not pass.

    python -m benchmarks.bars [--from FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import geometric_mean, load, ratio, ratios
from benchmarks.run import ADDS, RESULTS, add_arguments, end_on_signals, measure, options_from, selection
from benchmarks.table import MEAN_OVER, columns

FASTEST_COMPILE = ("compile", "compile-optimizer")
MEMORY_OVER = tuple("bcdefgh")
SLOW_STEP_MEDIANS = 3.0
BACKENDS = ("torchscript", "inductor")

Workloads = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured for a bar; None when nothing was. The detail says over what, or what is missing."""

    value: float | None
    detail: str = ""
    # Whether all that the bar speaks of was measured. What the system we are compared with cannot run does not count.
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and the most that it may be."""

    title: str
    most: float
    measure: Callable[[Mapping[str, Any]], Figure]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar with its figure."""

    bar: Bar
    figure: Figure

    @property
    def passed(self) -> bool:
        """Whether the figure is there, whole, and small enough."""
        return self.figure.value is not None and self.figure.complete and self.figure.value <= self.bar.most

    @property
    def word(self) -> str:
        """The verdict in a word: "part" is for a figure that is small enough, of a part of what it should cover."""
        if self.figure.value is None:
            return "none"
        if self.figure.value > self.bar.most:
            return "FAIL"
        return "pass" if self.figure.complete else "part"


def _adds(results: Mapping[str, Any]) -> Figure:
    found = results.get(ADDS)
    if not found:
        return Figure(None, "not measured: --only adds")
    return Figure(found["ratio"], f"{found['torch_ltc_us']:.2f} / {found['original_us']:.2f} us")


def _tiny(base: str, base_key: str) -> Callable[[Mapping[str, Any]], Figure]:
    def figure(results: Mapping[str, Any]) -> Figure:
        tiny = results["workloads"].get("tiny", {})
        ltc = tiny.get("ltc-torchscript", {})
        found = ratios(ltc, tiny.get(base, {}), "record_s", base_key)
        if not found:
            return Figure(None, "not measured: --only tiny")
        operations = ltc.get("operations")
        return Figure(statistics.median(found), f"{ltc['record_s']['median'] * 1e3:.2f} ms for {operations} records")

    return figure


def _mean(system: str, *bases: str, keys: tuple[str, ...] = MEAN_OVER) -> Callable[[Mapping[str, Any]], Figure]:
    """The geometric mean of `system` against the fastest of `bases`, workload by workload."""

    def figure(results: Mapping[str, Any]) -> Figure:
        found: dict[str, float] = {}
        for key in keys:
            systems = results["workloads"].get(key, {})
            against = [value for base in bases if (value := ratio(systems, system, base)) is not None]
            if against:
                found[key] = max(against)
        missing = [key for key in keys if key not in found]
        excused = [key for key in missing if _cannot_run(results["workloads"].get(key, {}), bases)]
        return Figure(geometric_mean(found.values()), _detail(found, missing), len(excused) == len(missing))

    return figure


def _cannot_run(systems: Mapping[str, Mapping[str, Any]], bases: tuple[str, ...]) -> bool:
    """Whether the systems that we are compared with were tried and failed."""
    return all(systems.get(base, {}).get("status") == "failed" for base in bases)


def _detail(found: Mapping[str, float], missing: list[str]) -> str:
    if not found:
        return "not measured"
    detail = " ".join(f"{key} {value:.3g}" for key, value in found.items())
    return f"{detail}; without {', '.join(missing)}" if missing else detail


def _worst(
    workloads: Workloads, of: Callable[[Mapping[str, Mapping[str, Any]]], float | None], keys: tuple[str, ...]
) -> Figure:
    """The worst over some workloads."""
    found = {key: value for key in keys if (value := of(workloads.get(key, {}))) is not None}
    if not found:
        return Figure(None, "not measured")
    missing = [key for key in keys if key not in found]
    return Figure(max(found.values()), _detail(found, missing), not missing)


def _table_keys(results: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(key for key in results["workloads"] if len(key) == 1)


def _first_step(backend: str) -> Callable[[Mapping[str, Any]], Figure]:
    def against_eager(systems: Mapping[str, Mapping[str, Any]]) -> float | None:
        ours = systems.get(f"ltc-{backend}", {}).get("first_step_s")
        eager = systems.get("eager", {}).get("first_step_s")
        return ours / eager if ours and eager else None

    return lambda results: _worst(results["workloads"], against_eager, _table_keys(results))


def slow_steps(figures: Mapping[str, Any]) -> float | None:
    """Among the first steps, without the very first, those that were slow while something was compiled."""
    steps = figures.get("first_steps_s")
    if not steps or len(steps) < 3:
        return None
    bound = SLOW_STEP_MEDIANS * statistics.median(steps)
    return float(sum(step > bound and busy for step, busy in zip(steps[1:], figures["compiling"][1:])))


def _later_steps(backend: str) -> Callable[[Mapping[str, Any]], Figure]:
    def slow(systems: Mapping[str, Mapping[str, Any]]) -> float | None:
        return slow_steps(systems.get(f"ltc-{backend}", {}))

    return lambda results: _worst(results["workloads"], slow, _table_keys(results))


def _compiles(backend: str, key: str) -> Callable[[Mapping[str, Any]], Figure]:
    def figure(results: Mapping[str, Any]) -> Figure:
        figures = results["workloads"].get(key, {}).get(f"ltc-{backend}", {})
        if figures.get("compiles") is None:
            return Figure(None, figures.get("reason", f"not measured: --only {key}"))
        return Figure(float(figures["compiles"]), "" if figures.get("settled") else "still compiling at the end")

    return figure


def _memory(backend: str) -> Callable[[Mapping[str, Any]], Figure]:
    def against_eager(systems: Mapping[str, Mapping[str, Any]]) -> float | None:
        ours = systems.get(f"ltc-{backend}", {}).get("steady_peak_bytes")
        eager = systems.get("eager", {}).get("steady_peak_bytes")
        return ours / eager if ours and eager else None

    return lambda results: _worst(results["workloads"], against_eager, MEMORY_OVER)


def _second(backend: str) -> Callable[[Mapping[str, Any]], Figure]:
    def compiles(systems: Mapping[str, Mapping[str, Any]]) -> float | None:
        return systems.get(f"ltc-{backend}", {}).get("second_compiles")

    return lambda results: _worst(results["workloads"], compiles, tuple(results["workloads"]))


def _per_backend(
    title: str, most: float, figure: Callable[[str], Callable[[Mapping[str, Any]], Figure]]
) -> tuple[Bar, ...]:
    return tuple(Bar(f"{title} [{backend}]", most, figure(backend)) for backend in BACKENDS)


BARS: tuple[Bar, ...] = (
    Bar("record one op, 200 adds / original", 0.60, _adds),
    Bar("record the tiny transformer step / original's trace", 0.35, _tiny("original", "record_s")),
    Bar("record the tiny transformer step / eager's whole step", 1.2, _tiny("eager", "step_s")),
    Bar("steady step on inductor / eager, mean a to h", 0.70, _mean("ltc-inductor", "eager")),
    Bar("steady step on inductor / original, mean a to h", 0.30, _mean("ltc-inductor", "original")),
    Bar("steady step on inductor / torch.compile, mean a to h", 1.0, _mean("ltc-inductor", *FASTEST_COMPILE)),
    Bar("steady step on torchscript / original, mean a to h", 0.60, _mean("ltc-torchscript", "original")),
    Bar("jit on inductor / torch.compile, a", 1.0, _mean("ltc-jit-inductor", *FASTEST_COMPILE, keys=("a",))),
    Bar("jit on inductor / torch.compile, f", 1.0, _mean("ltc-jit-inductor", *FASTEST_COMPILE, keys=("f",))),
    Bar("jit on inductor / torch.compile, mean a to h", 0.95, _mean("ltc-jit-inductor", *FASTEST_COMPILE)),
    *_per_backend("first step / eager's first, worst workload", 2.0, _first_step),
    *_per_backend("later steps over 3 medians in a compile", 0, _later_steps),
    *_per_backend("compiles, j: 50 random sizes", 3, lambda backend: _compiles(backend, "j")),
    *_per_backend("compiles, i: generation of 64 tokens", 4, lambda backend: _compiles(backend, "i")),
    *_per_backend("compiles, Adam with a changing rate", 2, lambda backend: _compiles(backend, "rate")),
    *_per_backend("peak memory / eager, worst of b to h", 1.15, _memory),
    *_per_backend("compiles of a second process, worst workload", 0, _second),
)


def judge(results: Mapping[str, Any]) -> list[Verdict]:
    """Every bar with its figure."""
    return [Verdict(bar, bar.measure(results)) for bar in BARS]


def render(verdicts: list[Verdict]) -> str:
    """The table."""
    rows = [["figure", "bar", "measured", "", ""]]
    for verdict in verdicts:
        value = verdict.figure.value
        measured = "-" if value is None else f"{value:.3g}"
        rows.append([verdict.bar.title, f"{verdict.bar.most:g}", measured, verdict.word, ""])
    lines = columns(rows).splitlines()
    details = ["", *(verdict.figure.detail for verdict in verdicts)]
    passed = sum(verdict.passed for verdict in verdicts)
    text = "\n".join(f"{line}  {detail}".rstrip() for line, detail in zip(lines, details))
    return f"{text}\n{passed} of {len(verdicts)} bars pass"


def main() -> None:
    """Judge a file of results, or measure first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bars", description="Bars, figures, pass or fail.")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="judge these results, measure nothing")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.source is not None:
        results = load(arguments.source)
    else:
        workloads, systems = selection(arguments)
        end_on_signals()
        results = measure(workloads, systems, options_from(arguments), arguments.json or RESULTS / "cpu.json")
    print(render(judge(results)))


if __name__ == "__main__":
    main()
