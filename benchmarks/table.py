"""Results as text: one line per workload and system, and one table of ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.results import geometric_mean
from benchmarks.workloads import WORKLOADS

MEAN_OVER = tuple("abcdefgh")
_COLUMNS = (
    "system",
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
    return ", ".join(remarks)


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    record_s, operations = _median(figures, "record_s"), figures.get("operations")
    peak = figures.get("steady_peak_bytes")
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
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def render_workload(key: str, systems: Mapping[str, Mapping[str, Any]]) -> str:
    """All figures of one workload."""
    rows = [list(_COLUMNS)]
    rows += [_row(name, figures) for name, figures in systems.items() if figures["status"] == "ok"]
    lines = [f"{key}: {WORKLOADS[key].title}", columns(rows)]
    lines += [
        f"{name}: {figures['status']}: {figures['reason']}"
        for name, figures in systems.items()
        if figures["status"] != "ok"
    ]
    lines += [f"{name}: {note}" for name, figures in systems.items() for note in figures.get("notes", ())]
    return "\n".join(lines)


def ratio_grid(results: Mapping[str, Any]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Systems, workloads, and the ratio of step times to eager for each pair; the last row is the geometric mean."""
    workloads: Mapping[str, Any] = results["workloads"]
    keys = [key for key in workloads if len(key) == 1]
    systems = [name for name in results["systems"] if name != "eager"]

    def cell(key: str, name: str) -> float | None:
        return _median(workloads[key].get(name, {}), "ratio")

    grid = [[cell(key, name) for name in systems] for key in keys]
    means: list[float | None] = []
    for name in systems:
        found = [cell(key, name) for key in MEAN_OVER if key in workloads]
        known = [value for value in found if value is not None]
        # A mean over fewer workloads would compare what is not comparable.
        means.append(geometric_mean(known) if len(known) == len(MEAN_OVER) else None)
    return systems, [*keys, "mean a-h"], [*grid, means]


def render_ratios(results: Mapping[str, Any]) -> str:
    """Step times as ratios to eager: workloads down, systems across."""
    systems, keys, grid = ratio_grid(results)
    rows = [["step time / eager", *systems]]
    for key, values in zip(keys, grid):
        title = f"{key}: {WORKLOADS[key].title}" if key in WORKLOADS else "geometric mean a to h"
        rows.append([title, *("-" if value is None else f"{value:.2f}" for value in values)])
    return columns(rows)
