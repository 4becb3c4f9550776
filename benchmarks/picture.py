"""The table of ratios as a picture for the README: green is faster than eager, red is slower.

python -m benchmarks.picture [benchmarks/results/cpu.json] [OUT.svg]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.results import load
from benchmarks.run import RESULTS
from benchmarks.table import ratio_grid

matplotlib.use("svg")
# Text stays text: the file is small, and readers can search it.
matplotlib.rcParams["svg.fonttype"] = "none"
matplotlib.rcParams["svg.hashsalt"] = "torch_ltc"

from matplotlib import pyplot  # noqa: E402, the settings above come first

CELL_WIDTH, CELL_HEIGHT, TITLE_WIDTH = 0.95, 0.3, 3.45
# Ratios this far from eager, in either direction, have the full colour.
FULL_COLOUR = 4.0


def colour(value: float | None) -> tuple[float, float, float]:
    """Pale green below 1, pale red above, grey for nothing."""
    if value is None:
        return (0.95, 0.95, 0.95)
    strength = min(1.0, abs(math.log(value)) / math.log(FULL_COLOUR))
    pale, full = (1.0, 1.0, 1.0), ((0.62, 0.85, 0.65) if value < 1 else (0.96, 0.68, 0.63))
    red, green, blue = (p + (f - p) * strength for p, f in zip(pale, full))
    return (red, green, blue)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture; its ending decides the format."""
    systems, titles, grid = ratio_grid(results)
    width, height = TITLE_WIDTH + CELL_WIDTH * len(systems), CELL_HEIGHT * (len(titles) + 2.4)
    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    heading = (
        f"Step time / eager, {results['machine']['device']}, torch {results['machine']['torch']} (below 1 is faster)"
    )
    axes.text(0.08, CELL_HEIGHT * 0.5, heading, fontsize=8, va="center")
    for column, name in enumerate(systems):
        x = TITLE_WIDTH + CELL_WIDTH * (column + 0.5)
        axes.text(x, CELL_HEIGHT * 1.6, name.replace("-", "\n", 1), fontsize=7, ha="center", va="center")
    for row, (title, values) in enumerate(zip(titles, grid)):
        y = CELL_HEIGHT * (row + 2.2)
        axes.text(0.08, y + CELL_HEIGHT / 2, title, fontsize=8, va="center")
        for column, value in enumerate(values):
            x = TITLE_WIDTH + CELL_WIDTH * column
            cell = pyplot.Rectangle((x, y), CELL_WIDTH, CELL_HEIGHT, facecolor=colour(value), edgecolor="white")
            axes.add_patch(cell)
            text = "-" if value is None else f"{value:.2f}"
            axes.text(x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2, text, fontsize=8, ha="center", va="center")
    # No date and no version of the drawing library: the same results give the same file.
    figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description="Draw the table of ratios.")
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS / "cpu.json")
    parser.add_argument("picture", nargs="?", type=Path, default=RESULTS / "cpu.svg")
    arguments = parser.parse_args()
    draw(load(arguments.results), arguments.picture)
    print(f"written: {arguments.picture}")


if __name__ == "__main__":
    main()
