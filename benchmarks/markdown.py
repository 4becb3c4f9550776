"""Writes the measured tables into pages of the documentation, between two marks.

python -m benchmarks.markdown [benchmarks/results/cpu.json] [docs/performance.md]
python -m benchmarks.markdown --gpu [benchmarks/results/gpu.json]
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
GPU_BEGIN, GPU_END = "<!-- measured on a GPU: begin -->", "<!-- measured on a GPU: end -->"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
GPU_PAGES = (Path(__file__).parents[1] / "README.md", PAGE)
# What a reader knows a system of the GPU's table by.
GPU_SYSTEMS = {
    "eager": "eager",
    "eager-graph": "eager, step captured by hand as a CUDA graph",
    "compile": "`torch.compile`",
    "compile-reduce-overhead": '`torch.compile(mode="reduce-overhead")`',
    "compile-max-autotune": '`torch.compile(mode="max-autotune-no-cudagraphs")`',
    "ltc": "recorded, the default (`auto`)",
    "ltc-recorded": "recorded, not captured",
    "ltc-interpreter": "recorded and captured, interpreter",
    "ltc-torchscript": "recorded and captured, TorchScript",
    "ltc-inductor": "recorded and captured, Inductor",
    "ltc-jit": "`torch_ltc.jit`, eager's kernels",
    "ltc-jit-inductor": "`torch_ltc.jit`, Inductor",
}
DECODING = "decoding"


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


def gpu_table(results: Mapping[str, Any]) -> str:
    """Systems down, workloads across: milliseconds a step or tokens a second, the time as a ratio to eager's, and the
    memory that the process held, as a ratio too."""
    workloads: Mapping[str, Any] = results["workloads"]
    heads = [
        f"{results['titles'][key]}: {'tokens/s' if _decodes(results, key) else 'ms'}, / eager, memory"
        for key in workloads
    ]
    rows = [["", *heads]]
    for system in results["systems"]:
        cells = [_gpu_cell(workloads[key], system, _decodes(results, key)) for key in workloads]
        rows.append([GPU_SYSTEMS.get(system, system), *cells])
    return table(rows)


def _decodes(results: Mapping[str, Any], key: str) -> bool:
    return DECODING in results["titles"][key]


def _gpu_cell(workload: Mapping[str, Any], system: str, decodes: bool) -> str:
    figures = workload.get(system, {})
    if not figures.get("step_s") or not figures.get("ratio"):
        return "failed" if figures.get("status") == "failed" else "-"
    step_s = figures["step_s"]["median"]
    value = f"{1 / step_s:.0f}" if decodes else f"{step_s * 1e3:.3g}"
    held, base = (figures.get("device_reserved_bytes"), workload.get("eager", {}).get("device_reserved_bytes"))
    memory = f"{held / base:.2f}" if held and base else "-"
    return f"{value}, {figures['ratio']['median']:.2f}, {memory}"


def gpu_block(results: Mapping[str, Any]) -> str:
    """Everything that stands between the marks for a GPU."""
    where = results["machine"]
    head = (
        f"{where['device']}, torch {where['torch']}, bfloat16, the loss read every "
        f"{results['options']['read_every']} steps; medians of {results['options']['rounds']} rounds."
    )
    return f"{gpu_table(results)}\n\n{head}"


def write(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with the text between its marks; raises ValueError when it has none."""
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page lacks the lines '{begin}' and '{end}'")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.markdown", description="Tables for the documentation.")
    parser.add_argument("--gpu", action="store_true", help="the table of a GPU, into README.md and docs/performance.md")
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("page", nargs="?", type=Path)
    arguments = parser.parse_args()
    path = arguments.results or RESULTS / ("gpu.json" if arguments.gpu else "cpu.json")
    results, beside_it = load(path), path.with_name(f"{path.stem}-threads.json")
    threaded = load(beside_it) if beside_it.exists() else None
    pages = [arguments.page] if arguments.page else GPU_PAGES if arguments.gpu else [PAGE]
    for page in pages:
        if arguments.gpu:
            page.write_text(write(page.read_text(), gpu_block(results), GPU_BEGIN, GPU_END))
        else:
            page.write_text(write(page.read_text(), block(results, threaded)))
        print(f"written: {page}")


if __name__ == "__main__":
    main()
