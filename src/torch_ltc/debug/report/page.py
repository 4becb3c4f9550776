"""The page itself: assets, libraries and a recording's data put into one file that needs nothing else.

All data is JSON in an element that no browser runs, and reaches the page as text nodes only. The page's own policy
allows just the scripts below, by their hashes, and no request at all: a file name or an operator with markup in it
cannot do harm.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from torch_ltc.debug.recording import Finding, Recording
from torch_ltc.debug.report.compact import compact
from torch_ltc.private_files import write_private_file

# In this order, as one script: the later ones use the earlier ones' names.
_SCRIPTS = (
    "values.js",
    "elements.js",
    "tables.js",
    "charts.js",
    "spans.js",
    "steps.js",
    "timeline.js",
    "listing.js",
    "programs.js",
    "difference.js",
    "ledgers.js",
    "memory.js",
    "main.js",
)
_LIBRARIES = ("charts.min.js", "jsdiff.min.js")
_FRAME_HEIGHT_PX = 720


def report_html(recording: Recording, findings: Sequence[Finding]) -> str:
    """The whole page as text."""
    data = json.dumps(compact(recording, findings), separators=(",", ":"), allow_nan=False)
    scripts = {"theme": _asset("theme.js"), "libraries": _libraries(), "program": _program()}
    parts = {
        **scripts,
        "policy": _policy(tuple(scripts.values())),
        "title": html.escape(f"torch_ltc report: {' '.join(recording.command) or 'interactive'}"),
        "style": _asset("style.css"),
        # The only character by which text can end the element that it stands in, or begin a comment.
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def write_report(path: str | os.PathLike[str], recording: Recording, findings: Sequence[Finding]) -> None:
    """Write the page to `path`, or the recording itself when the name ends in ".json".

    What was there is replaced in one go: a reader never sees half of it. Raises OSError, which names the path.
    """
    target = Path(path).expanduser()
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"the report {str(path)!r} cannot be written: there is no folder {str(target.parent)!r}\n"
            "  try: make the folder first, or name another one"
        )
    if target.is_dir():
        raise IsADirectoryError(
            f"the report {str(path)!r} cannot be written: that is a folder\n"
            f"  try: a file in it, as {str(target / 'report.html')!r}"
        )
    text = recording.to_json() if target.suffix == ".json" else report_html(recording, findings)
    # File names, functions and programs are nobody else's business.
    write_private_file(target, text.encode())


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A recording with the doctor's findings: shown as a page by notebooks, and saved by `save`."""

    recording: Recording
    findings: tuple[Finding, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to `path`, or the recording when the name ends in ".json"; see `write_report`."""
        write_report(path, self.recording, self.findings)

    def html(self) -> str:
        """The whole page as text."""
        return report_html(self.recording, self.findings)

    def _repr_html_(self) -> str:
        # A frame of its own: neither the notebook's styles nor the page's reach the other. Without "allow-same-origin"
        # its scripts cannot reach the notebook either.
        page = html.escape(self.html(), quote=True)
        style = f"width:100%;height:{_FRAME_HEIGHT_PX}px;border:1px solid #8884;border-radius:8px"
        return f'<iframe title="torch_ltc report" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'

    def __repr__(self) -> str:
        recording = self.recording
        return (
            f"<Report of {recording.steps} steps, {len(recording.programs)} programs, "
            f"{len(self.findings)} findings; save(path) writes the page>"
        )


def page_policy() -> str:
    """The content policy of every page."""
    return _policy((_asset("theme.js"), _libraries(), _program()))


def _policy(scripts: tuple[str, ...]) -> str:
    """The page's content policy: its own scripts by hash, styles, and nothing from anywhere else."""
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    # Charts set styles on their elements; no style of ours comes from data.
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str, folder: str = "assets") -> str:
    return resources.files(__package__).joinpath(folder).joinpath(name).read_text(encoding="utf-8")


@cache
def _libraries() -> str:
    return "\n".join(_asset(name, "vendor") for name in _LIBRARIES)


@cache
def _program() -> str:
    """The page's own code, in a scope of its own."""
    return '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();"
