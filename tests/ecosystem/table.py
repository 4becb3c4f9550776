"""`python -m tests.ecosystem.table FIGURES PAGE`: writes the table of a run of `make test-ecosystem` into the page."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| library | work | programs | compiles | fallbacks | time / eager |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = float(str(row["device_s"])) / max(float(str(row["cpu_s"])), 1e-9)
        cells = (row["library"], row["work"], row["programs"], row["compiles"], row["fallbacks"], f"{ratio:.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def versions() -> str:
    names = ("torch", "transformers", "accelerate", "lightning", "peft", "safetensors", "torchao", "onnx")
    return ", ".join(f"{name} {metadata.version(name).split('+')[0]}" for name in names)


def main() -> None:
    figures, page = map(Path, sys.argv[1:])
    rows = json.loads(figures.read_text())
    text = f"{BEGIN}\n\n{table(rows)}\n\nWith {versions()}, on the CPU.\n\n{END}"
    found = page.read_text()
    assert BEGIN in found
    page.write_text(re.sub(f"{BEGIN}.*{END}", lambda match: text, found, flags=re.DOTALL))


if __name__ == "__main__":
    main()
