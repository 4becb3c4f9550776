"""Figures of recordings that more than one rule uses, and their text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch_ltc.debug.recording import ProgramRow, Recording
from torch_ltc.source import Source

Item = TypeVar("Item")

# Fewer steps than this show no habit: the first ones compile, allocate and fill caches.
FEWEST_STEPS = 5


def percent(part: float, whole: float) -> str:
    """`part` of `whole` as "31 %"."""
    return f"{100 * share(part, whole):.0f} %"


def share(part: float, whole: float) -> float:
    """`part` of `whole`, 0 when there is no whole."""
    return part / whole if whole > 0 else 0.0


def listed(parts: Sequence[str], most: int = 3) -> str:
    """The first few parts, and how many there are beside them."""
    rest = len(parts) - most
    return "; ".join(parts[:most]) + (f"; and {rest} more" if rest > 0 else "")


def middle(values: Iterable[float]) -> float:
    """The value in the middle; of two, the larger. (`statistics` would take longer to import than all rules.)"""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def line_of(source: Source) -> tuple[str, int]:
    """The key of a line, whatever module ran there."""
    return source.file, source.line


def grouped(items: Iterable[Item], key: Callable[[Item], object]) -> list[list[Item]]:
    """The items in groups of the same key, in the order in which keys first come."""
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def program_rows(recording: Recording) -> dict[int, ProgramRow]:
    """The programs by identity."""
    return {row.identity: row for row in recording.programs}


def setting(recording: Recording, name: str) -> str:
    """The value of a setting as plain text; empty when it was not recorded."""
    return next((row.value.strip("'\"") for row in recording.settings if row.name == name), "")


def active_s(recording: Recording) -> float:
    """Seconds from the first thing that happened to the last: importing, loading data and idle prompts do not count."""
    if not recording.spans or recording.dropped_spans:
        return recording.duration_s
    return max(span.begin_s + span.duration_s for span in recording.spans) - min(
        span.begin_s for span in recording.spans
    )


def record_s(recording: Recording) -> float:
    """Wall time that recording took, from the first call of each program to its sync."""
    return sum(row.record_s for row in recording.programs)


def first_record_s(recording: Recording) -> float:
    """Wall time that recording the first step took, where that is known: importing and warming up are in it."""
    if not recording.dropped_spans:
        return sum(span.duration_s for span in recording.spans if span.kind == "record" and span.step == 0)
    first = min(recording.programs, key=lambda row: row.identity, default=None)
    return first.record_s if first is not None and first.syncs == 1 else 0.0


def run_s(recording: Recording) -> float:
    """Time that the worker ran programs."""
    return sum(row.run_s for row in recording.programs)
