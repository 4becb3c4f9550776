"""A recording as the plain values that the page reads: the same facts in less room.

A long run holds the same lines of code and of programs many thousand times. Both are written once, in tables, and named
by their positions; spans become one list per field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_ltc.debug.gaps import gaps_text, worker_gaps
from torch_ltc.debug.recording import Finding, Line, PlainValues, Recording, Span
from torch_ltc.source import Source


class _Table:
    """Texts by position, each once."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}

    def position(self, text: str) -> int:
        """The position of `text`, which is added when it is new."""
        return self.positions.setdefault(text, len(self.positions))


class _PageValues(PlainValues):
    def __init__(self) -> None:
        super().__init__()
        self.texts = _Table()

    def source_row(self, source: Source) -> Any:
        forward = -1 if source.forward is None else self.plain(source.forward)
        return [source.file, source.line, source.function, source.backward, source.module, forward]

    def plain(self, value: Any) -> Any:
        if isinstance(value, tuple) and value and isinstance(value[0], Line):
            texts = [self.texts.position(line.text) for line in value]
            return {"texts": texts, "sources": [self.plain(line.source) for line in value]}
        # JSON has no word for NaN and infinity, and a browser refuses Python's.
        return str(value) if isinstance(value, float) and not math.isfinite(value) else super().plain(value)


def _spans(spans: Sequence[Span]) -> dict[str, list[Any]]:
    """One list per field; names are positions in tables; times are microseconds."""
    names = _Table()
    columns: dict[str, list[Any]] = {
        "kind": [names.position(span.kind) for span in spans],
        "lane": [names.position(span.lane) for span in spans],
        "label": [names.position(span.label) for span in spans],
        "begin": [round(span.begin_s * 1e6, 1) for span in spans],
        "duration": [round(span.duration_s * 1e6, 1) for span in spans],
        "step": [span.step for span in spans],
        "program": [span.program for span in spans],
        "size": [span.size_bytes for span in spans],
    }
    return {**columns, "names": list(names.positions)}


def compact(recording: Recording, findings: Sequence[Finding]) -> dict[str, Any]:
    """The data of the page, as values that JSON takes."""
    values = _PageValues()
    page: dict[str, Any] = values.plain(replace(recording, spans=()))
    page |= {"spans": _spans(recording.spans), "findings": values.plain(list(findings))}
    page["gaps"] = gaps_text(worker_gaps(recording))
    return {**page, "sources": values.sources, "texts": list(values.texts.positions)}
