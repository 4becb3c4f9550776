"""Writes the measured tables into a page of the documentation, between two marks.

python -m benchmarks.markdown [benchmarks/results/cpu.json] [docs/performance.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bars import judge
from benchmarks.results import beside, load
from benchmarks.run import RESULTS
from benchmarks.table import HEADINGS, ratio_grid, row

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def table(rows: list[list[str]]) -> str:
    """Rows of cells as a table, the first row as its head."""
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def ratios(results: Mapping[str, Any]) -> str:
    """Step times as ratios to eager."""
    systems, titles, grid = ratio_grid(results)
    rows = [["step time / eager", *systems]]
    rows += [
        [title, *("-" if value is None else f"{value:.2f}" for value in values)] for title, values in zip(titles, grid)
    ]
    return table(rows)


def details(results: Mapping[str, Any]) -> str:
    """All figures of every workload."""
    parts = []
    for key, systems in results["workloads"].items():
        rows = [["system", *HEADINGS]]
        rows += [row(name, figures) for name, figures in systems.items() if figures["status"] == "ok"]
        failed = [
            f"- {name}: {figures['status']}: {figures['reason']}"
            for name, figures in systems.items()
            if figures["status"] != "ok"
        ]
        parts.append("\n\n".join([f"### {key}: {results['titles'][key]}", table(rows), *failed]))
    return "\n\n".join(parts)


def bars(results: Mapping[str, Any]) -> str:
    """Bars with what was measured."""
    rows = [["figure", "bar", "measured", "", "by workload"]]
    for verdict in judge(results):
        value = verdict.figure.value
        measured = "-" if value is None else f"{value:.3g}"
        rows.append([verdict.bar.title, f"{verdict.bar.most:g}", measured, verdict.word, verdict.figure.detail])
    return table(rows)


def block(results: Mapping[str, Any], threaded: Mapping[str, Any] | None = None) -> str:
    """Everything that stands between the marks; ratios of `threaded`, a run with another number of threads, beside
    the others."""
    compared = ratios(results if threaded is None else beside(results, threaded))
    where = results["machine"]
    head = (
        f"torch {where['torch']}, Python {where['python']}, {where['processor']}, {where['cores']} cores, "
        f"{where['device']}; {results['options']['rounds']} rounds, "
        f"the loss read every {results['options']['read_every']} steps."
    )
    if any(key in results["workloads"] for key in "abcdefghij"):
        return "\n\n".join([head, "## Ratios", compared, "## Bars", bars(results), "## Details", details(results)])
    return "\n\n".join([head, "## Ratios", compared, "## Details", details(results)])


def write(page: str, text: str) -> str:
    """The page with the text between its marks; raises ValueError when it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines '{BEGIN}' and '{END}'")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.markdown", description="Tables for the documentation.")
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS / "cpu.json")
    parser.add_argument("page", nargs="?", type=Path, default=PAGE)
    arguments = parser.parse_args()
    beside_it = arguments.results.with_name(f"{arguments.results.stem}-threads.json")
    threaded = load(beside_it) if beside_it.exists() else None
    arguments.page.write_text(write(arguments.page.read_text(), block(load(arguments.results), threaded)))
    print(f"written: {arguments.page}")


if __name__ == "__main__":
    main()
