"""Results as text: one line per workload and system, and one table of ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.results import geometric_mean

MEAN_OVER = tuple("abcdefgh")
MEAN = "geometric mean a to h"
# Workloads that serve one figure each: they are not in the table of ratios.
SINGLE_FIGURES = ("tiny", "rate")
HEADINGS = (
    "step ms",
    "/eager (q1-q3)",
    "cpu/eager",
    "record ms",
    "ops",
    "us/op",
    "first ms",
    "worst ms",
    "compiles",
    "peak MB",
    "",
)


def milliseconds(seconds: float | None) -> str:
    """Three digits, or a dash for nothing."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(figures: Mapping[str, Any], key: str, spread: bool) -> str:
    found = figures.get(key)
    if not found:
        return "-"
    text = f"{found['median']:.2f}"
    return f"{text} ({found['q1']:.2f}-{found['q3']:.2f})" if spread else text


def _median(figures: Mapping[str, Any], key: str) -> float | None:
    found = figures.get(key)
    return found["median"] if found else None


def _remark(figures: Mapping[str, Any]) -> str:
    remarks = []
    if figures.get("agrees") is False:
        remarks.append("WRONG VALUES")
    if figures.get("settled") is False:
        remarks.append("still compiling")
    if figures.get("refused"):
        remarks.append(f"{figures['refused']} refused")
    return ", ".join(remarks)


def row(name: str, figures: Mapping[str, Any]) -> list[str]:
    """The cells of one system, its name first."""
    record_s, operations = _median(figures, "record_s"), figures.get("operations")
    peak = figures.get("steady_peak_bytes", figures.get("device_reserved_bytes"))
    per_operation = f"{record_s / operations * 1e6:.1f}" if record_s is not None and operations else "-"
    return [
        name,
        milliseconds(_median(figures, "step_s")),
        _ratio(figures, "ratio", spread=True),
        _ratio(figures, "cpu_ratio", spread=False),
        milliseconds(record_s),
        str(operations) if operations is not None else "-",
        per_operation,
        milliseconds(figures.get("first_step_s")),
        milliseconds(figures.get("worst_later_step_s")),
        str(figures.get("compiles", "-")),
        f"{peak / 2**20:.0f}" if peak is not None else "-",
        _remark(figures),
    ]


def columns(rows: list[list[str]]) -> str:
    """Rows of cells in columns: the first to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def render_workload(title: str, systems: Mapping[str, Mapping[str, Any]]) -> str:
    """All figures of one workload."""
    rows = [["system", *HEADINGS]]
    rows += [row(name, figures) for name, figures in systems.items() if figures["status"] == "ok"]
    lines = [title, columns(rows)]
    lines += [
        f"{name}: {figures['status']}: {figures['reason']}"
        for name, figures in systems.items()
        if figures["status"] != "ok"
    ]
    for name, figures in systems.items():
        lines += [f"{name}: {note}" for note in _notes(figures)]
    return "\n".join(lines)


def _notes(figures: Mapping[str, Any]) -> list[str]:
    return [note for key in ("notes", "refusals", "remarks") for note in figures.get(key, ())]


def ratio_grid(results: Mapping[str, Any]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Systems, titles, and the ratio of step times to eager for each pair; the mean of a to h last, if they are there.

    The mean of a system is None unless it has all of them: means over different workloads cannot be compared.
    """
    workloads: Mapping[str, Any] = results["workloads"]
    keys = [key for key in workloads if key not in SINGLE_FIGURES]
    systems = [name for name in results["systems"] if name != "eager"]

    def cell(key: str, name: str) -> float | None:
        return _median(workloads.get(key, {}).get(name, {}), "ratio")

    titles = [f"{key}: {results['titles'][key]}" for key in keys]
    grid = [[cell(key, name) for name in systems] for key in keys]
    if set(MEAN_OVER) <= set(keys):
        found = {name: [cell(key, name) for key in MEAN_OVER] for name in systems}
        known = {name: [value for value in values if value is not None] for name, values in found.items()}
        titles.append(MEAN)
        grid.append([geometric_mean(known[name]) if len(known[name]) == len(MEAN_OVER) else None for name in systems])
    return systems, titles, grid


def render_ratios(results: Mapping[str, Any]) -> str:
    """Step times as ratios to eager: workloads down, systems across."""
    systems, titles, grid = ratio_grid(results)
    rows = [["step time / eager", *systems]]
    rows += [
        [title, *("-" if value is None else f"{value:.2f}" for value in values)] for title, values in zip(titles, grid)
    ]
    return columns(rows)
