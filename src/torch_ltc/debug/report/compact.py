"""A recording as the plain values that the page reads: the same facts in less room.

A long run holds the same lines of code and of programs many thousand times. Both are written once, in tables, and named
by their positions; spans become one list per field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch_ltc.debug.recording import Finding, Line, Recording, Span
from torch_ltc.source import Source

__all__ = ["compact"]


class _Table:
    """Values by position, each kept once."""

    def __init__(self) -> None:
        self.positions: dict[Any, int] = {}
        self.rows: list[Any] = []

    def position(self, key: Any, row: Any) -> int:
        """Where `row` is; it is added when its `key` is new."""
        found = self.positions.get(key)
        if found is None:
            found = self.positions[key] = len(self.rows)
            self.rows.append(row)
        return found


class _Writer:
    def __init__(self) -> None:
        self.sources = _Table()
        self.texts = _Table()

    def source(self, source: Source) -> int:
        known = self.sources.positions.get(source)
        if known is not None:
            return known
        forward = -1 if source.forward is None else self.source(source.forward)
        row = [source.file, source.line, source.function, source.backward, source.module, forward]
        return self.sources.position(source, row)

    def lines(self, lines: Sequence[Line]) -> dict[str, list[int]]:
        texts = [self.texts.position(line.text, line.text) for line in lines]
        return {"texts": texts, "sources": [self.source(line.source) for line in lines]}

    def plain(self, value: Any) -> Any:
        """`value` as what JSON takes; a source becomes its position."""
        if isinstance(value, Source):
            return self.source(value)
        if isinstance(value, tuple) and value and isinstance(value[0], Line):
            return self.lines(value)
        if is_dataclass(value) and not isinstance(value, type):
            return {item.name: self.plain(getattr(value, item.name)) for item in fields(value)}
        if isinstance(value, Mapping):
            return {str(key): self.plain(part) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            return [self.plain(item) for item in value]
        # JSON has no word for these two, and a browser refuses Python's.
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return str(value)


def _spans(spans: Sequence[Span]) -> dict[str, list[Any]]:
    """One list per field; names are positions in tables; times are microseconds."""
    names = _Table()
    columns: dict[str, list[Any]] = {
        "kind": [names.position(span.kind, span.kind) for span in spans],
        "lane": [names.position(span.lane, span.lane) for span in spans],
        "label": [names.position(span.label, span.label) for span in spans],
        "begin": [round(span.begin_s * 1e6, 1) for span in spans],
        "duration": [round(span.duration_s * 1e6, 1) for span in spans],
        "step": [span.step for span in spans],
        "program": [span.program for span in spans],
        "size": [span.size_bytes for span in spans],
    }
    return {**columns, "names": names.rows}


def compact(recording: Recording, findings: Sequence[Finding]) -> dict[str, Any]:
    """What the page shows, as values that JSON takes."""
    writer = _Writer()
    made = {item.name: getattr(recording, item.name) for item in fields(recording) if item.name != "spans"}
    page: dict[str, Any] = {name: writer.plain(value) for name, value in made.items()}
    page["spans"] = _spans(recording.spans)
    page["findings"] = [writer.plain(finding) for finding in findings]
    return {**page, "sources": writer.sources.rows, "texts": writer.texts.rows}
