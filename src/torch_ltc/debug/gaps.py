"""Gaps: times in which nothing runs between two runs, and what the user's thread did then.

A recording has the runs of programs as the worker saw them. On a GPU that is the time of launching: what the device did
is known to PyTorch's profiler, whose kernels `gaps` takes as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch_ltc.debug.recording import Recording, Span
from torch_ltc.formatting import count_text, duration_text

__all__ = ["Gap", "LEAST_S", "busy_s", "gaps", "gaps_text", "worker_gaps"]

# Shorter ones are the launch of the next program.
LEAST_S = 200e-6

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without runs. `during` is what the user's thread did for most of it: the kind of a span, or empty for code
    that is not the device's."""

    begin_s: float
    duration_s: float
    during: str = ""


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals in order, those that touch as one."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def gaps(intervals: Iterable[Interval], least_s: float = LEAST_S) -> list[Gap]:
    """The gaps between intervals, given by begin and end in seconds, that are longer than `least_s`."""
    merged = _merged(intervals)
    return [Gap(end, begin - end) for (_, end), (begin, _) in pairwise(merged) if begin - end > least_s]


def busy_s(intervals: Iterable[Interval]) -> float:
    """Time in at least one of the intervals."""
    return sum(end - begin for begin, end in _merged(intervals))


def worker_gaps(recording: Recording, least_s: float = LEAST_S) -> list[Gap]:
    """The gaps between runs of programs on the worker."""
    runs = [(span.begin_s, span.begin_s + span.duration_s) for span in recording.spans if span.kind == "run"]
    return _with_kinds(gaps(runs, least_s), [span for span in recording.spans if span.lane == "user"])


def _with_kinds(found: Sequence[Gap], spans: Iterable[Span]) -> list[Gap]:
    """The gaps with what the user's thread did in them."""
    took: list[dict[str, float]] = [{"": gap.duration_s} for gap in found]
    first = 0
    for span in sorted(spans, key=lambda one: one.begin_s):
        end_s = span.begin_s + span.duration_s
        while first < len(found) and found[first].begin_s + found[first].duration_s <= span.begin_s:
            first += 1
        for number in range(first, len(found)):
            gap = found[number]
            if gap.begin_s >= end_s:
                break
            both_s = min(end_s, gap.begin_s + gap.duration_s) - max(span.begin_s, gap.begin_s)
            took[number][span.kind] = took[number].get(span.kind, 0.0) + both_s
            took[number][""] -= both_s
    return [
        Gap(gap.begin_s, gap.duration_s, max(kinds, key=lambda kind: kinds[kind])) for gap, kinds in zip(found, took)
    ]


def gaps_text(found: Sequence[Gap], least_s: float = LEAST_S) -> str:
    """A sentence on the gaps; empty when there are none."""
    if not found:
        return ""
    total_s = sum(gap.duration_s for gap in found)
    longest = max(found, key=lambda gap: gap.duration_s)
    kinds = Counter(gap.during for gap in found)
    during = ", ".join(f"{number:,} in {kind or 'other code'}" for kind, number in kinds.most_common(3))
    return (
        f"{count_text(len(found), 'gap')} between runs longer than {duration_text(least_s)}, "
        f"{duration_text(total_s)} in all, the longest {duration_text(longest.duration_s)}: {during}"
    )
