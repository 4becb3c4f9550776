"""The timeline of a recording as trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Lanes become threads, spans complete events, the memory of the buffers a counter, and arrows lead from each sync to the
run of the program that it cut.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_ltc.debug.history import history
from torch_ltc.debug.recording import ProgramRow, Recording, Span

_PROCESS = 1
_LANES = {"user": 100, "worker": 200, "compiler": 300}
_TITLES = {"user": "your program", "worker": "worker: programs run", "compiler": "compiler: programs are made"}

# Ends may miss each other by what reading the clock costs.
_TOLERANCE_S = 1e-6

_Event = dict[str, Any]


def chrome_trace(recording: Recording) -> str:
    """The recording's timeline as JSON in the trace event format; times are in microseconds since its start."""
    placed = _placed(recording.spans)
    rows = {row.identity: row for row in recording.programs}
    timed = [_complete(one, rows.get(one.span.program)) for one in placed]
    timed += _arrows(placed)
    timed += _steps(recording.spans)
    counter: _Event = {"name": "bytes in buffers", "ph": "C", "pid": _PROCESS}
    timed += [
        {**counter, "ts": _microseconds(at_s), "args": {"bytes": size}} for at_s, size in recording.memory.samples
    ]
    # Stable, so that of two that begin together the longer one, which holds the other, comes first.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {
            "command": " ".join(recording.command),
            "started": recording.started,
            "steps": str(recording.steps),
            "dropped_spans": str(recording.dropped_spans),
            **recording.versions,
        },
        "traceEvents": [*_titles(recording, placed), *timed],
    }
    return json.dumps(trace, separators=(",", ":"))


def write_trace(path: str | os.PathLike[str], recording: Recording) -> None:
    """Write the recording's timeline to a file that Perfetto opens."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(chrome_trace(recording))


def export_trace(path: str | os.PathLike[str]) -> None:
    """Write the timeline of this process so far to a file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
    write_trace(path, history.recording(texts=False))


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class _Placed(NamedTuple):
    """A span on a thread of the trace; `end_s` is not later than that of the span that it lies in."""

    span: Span
    thread: int
    end_s: float


def _placed(spans: Iterable[Span]) -> list[_Placed]:
    """The spans in order of time, each on a thread where it lies beside or inside of the others: viewers cannot draw
    spans that overlap otherwise, as those of two threads of the user's do."""
    lanes = dict(_LANES)
    # For each thread of a lane, the ends of the spans that are open there, the innermost last.
    open_ends: dict[str, list[list[float]]] = defaultdict(list)
    found: list[_Placed] = []
    for span in sorted(spans, key=lambda item: (item.begin_s, -item.duration_s)):
        base = lanes.setdefault(span.lane, (len(lanes) + 1) * 100)
        end_s = span.begin_s + max(span.duration_s, 0.0)
        number = _free_thread(open_ends[span.lane], span.begin_s, end_s)
        ends = open_ends[span.lane][number]
        ends.append(min(end_s, ends[-1]) if ends else end_s)
        found.append(_Placed(span, base + number, ends[-1]))
    return found


def _free_thread(threads: list[list[float]], begin_s: float, end_s: float) -> int:
    """The first thread on which nothing is open at that time, or only what ends later; a new one if there is none."""
    for number, ends in enumerate(threads):
        while ends and ends[-1] <= begin_s + _TOLERANCE_S:
            ends.pop()
        if not ends or end_s <= ends[-1] + _TOLERANCE_S:
            return number
    threads.append([])
    return len(threads) - 1


def _titles(recording: Recording, placed: Iterable[_Placed]) -> list[_Event]:
    name = ": ".join(["torch_ltc", *map(os.path.basename, recording.command[:1])])
    events: list[_Event] = [{"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": name}}]
    for thread, lane in sorted({one.thread: one.span.lane for one in placed}.items()):
        where: _Event = {"ph": "M", "pid": _PROCESS, "tid": thread}
        title = _TITLES.get(lane, lane)
        title = f"{title} ({thread % 100 + 1})" if thread % 100 else title
        events.append({"name": "thread_name", **where, "args": {"name": title}})
        events.append({"name": "thread_sort_index", **where, "args": {"sort_index": thread}})
    return events


def _complete(placed: _Placed, row: ProgramRow | None) -> _Event:
    span = placed.span
    known = {"program": span.program, "label": span.label, "bytes": span.size_bytes}
    details: _Event = {"step": span.step, **{name: value for name, value in known.items() if value}}
    if row is not None:
        details |= {"calls": row.calls, "synced at": row.site.describe() if row.site.file else ""}
    return {
        "name": f"{span.kind} program {span.program}" if span.program else f"{span.kind} {span.label}".strip(),
        "cat": span.kind,
        "ph": "X",
        "ts": _microseconds(span.begin_s),
        "dur": round(_microseconds(placed.end_s) - _microseconds(span.begin_s), 3),
        "pid": _PROCESS,
        "tid": placed.thread,
        "args": details,
    }


def _arrows(placed: Iterable[_Placed]) -> list[_Event]:
    """Arrows from each sync to the first run of its program that begins later: the worker takes programs in order."""
    waiting: dict[int, list[_Placed]] = defaultdict(list)
    events: list[_Event] = []
    for one in placed:
        span = one.span
        if span.kind == "sync" and span.program:
            waiting[span.program].append(one)
        elif span.kind == "run" and waiting[span.program]:
            sync = waiting[span.program].pop(0)
            arrow: _Event = {"name": "queued", "cat": "queue", "id": len(events) // 2 + 1, "pid": _PROCESS}
            # Inside both spans: an arrow is tied to the span in which its end lies.
            begin_s = sync.span.begin_s + sync.span.duration_s / 2
            events.append({**arrow, "ph": "s", "ts": _microseconds(begin_s), "tid": sync.thread})
            end_s = max(span.begin_s, begin_s)
            events.append({**arrow, "ph": "f", "bp": "e", "ts": _microseconds(end_s), "tid": one.thread})
    return events


def _steps(spans: Iterable[Span]) -> list[_Event]:
    """A mark over all lanes where each step begins."""
    first: dict[int, float] = {}
    for span in spans:
        if span.lane == "user":
            first[span.step] = min(first.get(span.step, span.begin_s), span.begin_s)
    where: _Event = {"cat": "step", "ph": "i", "s": "p", "pid": _PROCESS, "tid": _LANES["user"]}
    return [{"name": f"step {step}", **where, "ts": _microseconds(begin)} for step, begin in first.items()]
