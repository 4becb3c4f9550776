"""One page of the recordings of several ranks: a table that compares them, and the page of each below it."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ltc.debug.recording import Finding, Recording
from torch_ltc.debug.report.page import page_policy, report_html
from torch_ltc.formatting import duration_text, size_text
from torch_ltc.private_files import write_private_file
from torch_ltc.program.collectives import NAMESPACE

__all__ = ["RankReport", "merged_html", "write_merged"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color-scheme: light dark; }
table { border-collapse: collapse; }
th, td { padding: 0.3rem 0.8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; } td.differs { font-weight: bold; }
iframe { width: 100%; height: 85vh; border: 1px solid #8884; border-radius: 8px; } summary { padding: 0.5rem 0; }
"""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did, and what the doctor found."""

    name: str
    recording: Recording
    findings: Sequence[Finding]


def _row(report: RankReport) -> dict[str, str]:
    recording = report.recording
    talking = f"{NAMESPACE}::"
    collectives = sum(
        program.runs * sum(talking in line.text for line in program.lines) for program in recording.programs
    )
    return {
        "steps": f"{recording.steps:,}",
        "programs": f"{len(recording.programs):,}",
        "compiled": f"{sum(not row.loaded for row in recording.compiles):,}",
        "syncs and reads": f"{sum(row.count for row in recording.syncs):,}",
        "waited": duration_text(sum(row.wait_s for row in recording.syncs)),
        "ran": duration_text(sum(program.run_s for program in recording.programs)),
        "collectives": f"{collectives:,}",
        "fallbacks": f"{sum(row.count for row in recording.fallbacks):,}",
        "peak memory": size_text(recording.memory.peak_bytes),
        "findings": f"{len(report.findings):,}",
    }


# What ranks that do the same have in common.
_COMMON = ("steps", "programs", "compiled", "syncs and reads", "collectives", "fallbacks", "findings")


def merged_html(reports: Sequence[RankReport]) -> str:
    """The whole page as text; a figure that the first rank does not have, and should, is bold."""
    rows = [_row(report) for report in reports]
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("rank", *rows[0]))
    lines = []
    for report, row in zip(reports, rows, strict=True):
        cells = "".join(
            f"<td{' class=differs' if name in _COMMON and value != rows[0][name] else ''}>{html.escape(value)}</td>"
            for name, value in row.items()
        )
        lines.append(f"<tr><td>{html.escape(report.name)}</td>{cells}</tr>")
    frames = "".join(
        f"<details><summary>{html.escape(report.name)}</summary>"
        f'<iframe title="{html.escape(report.name)}" sandbox="allow-scripts" loading="lazy" '
        f'srcdoc="{html.escape(report_html(report.recording, report.findings), quote=True)}"></iframe></details>'
        for report in reports
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        # Frames have the policy of the page that they are in, too.
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(page_policy(), quote=True)}">'
        f"<title>torch_ltc report of {len(reports)} ranks</title><style>{_STYLE}</style></head>"
        f"<body><h1>{len(reports)} ranks</h1><table><tr>{heads}</tr>{''.join(lines)}</table>{frames}</body></html>\n"
    )


def write_merged(path: str | os.PathLike[str], reports: Sequence[RankReport]) -> None:
    """Write the page to `path`."""
    write_private_file(path, merged_html(reports).encode())
