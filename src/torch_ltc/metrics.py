"""Counters and timers, fed by events, with the names and the report of the original lazy tensor core.

Owns every figure that is counted over the life of the process. It listens to `events` from its import on; what no event
carries is counted through `count`, `count_ops` and `sample`. All functions may be called from any thread.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from torch_ltc import events
from torch_ltc.events import (
    CompileEvent,
    Event,
    ExecuteEvent,
    FallbackEvent,
    LoadEvent,
    MismatchEvent,
    PruneEvent,
    ReadEvent,
    SyncEvent,
    SyncReason,
)

__all__ = [
    "COUNTERS",
    "METRICS",
    "count",
    "count_ops",
    "counter_names",
    "counter_value",
    "metric_names",
    "metrics_report",
    "reset",
    "sample",
    "snapshot",
]

Unit: TypeAlias = Literal["ns", "bytes", ""]

COUNTERS: Mapping[str, str] = {
    "MarkStep": "Syncs that a step asked for: explicit ones and those after an optimizer.",
    "CachedCompile": "Syncs whose program was in the cache.",
    "UncachedCompile": "Syncs whose program was new.",
    "SyncedTensorsWithIR": "Buffers that syncs computed, summed over all syncs.",
    "TrimIrGraph": "Syncs that happened because the pending program reached its bound.",
    "TrieForked": "Instructions that were recorded where another one had come before, so that the prefix tree forked.",
    "TreePruned": "Times that the prefix tree reached its bound and was pruned.",
    "Compile": "Programs that a backend compiled.",
    "CompileLoaded": "Programs whose compiled form was loaded from disk, where an earlier process had put it.",
    "ExecuteFailed": "Programs of which an operation failed when they ran.",
    "MetaMismatch": "Results whose layout was not the one that the meta kernel had promised.",
    "aten::<op>": "Times that the operation ran eagerly instead of being recorded; with overload: aten::index.Tensor.",
    "lazy::<op>": "Times that the operation was part of a synced program.",
}
METRICS: Mapping[str, tuple[Unit, str]] = {
    "TensorsGraphSize": ("", "Instructions of a synced program."),
    "RecordTime": ("ns", "Wall time from the first operation of a program to its sync."),
    "CompileTime": ("ns", "Time that a backend took to compile a program."),
    "LoadTime": ("ns", "Time that it took to load the compiled form of a program from disk."),
    "ExecuteTime": ("ns", "Time that a program took to run."),
    "ReadTime": ("ns", "Time that a read took, waiting included."),
}

_PERCENTILES = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)
_SAMPLES_KEPT = 1024
_NS_PER_S = 1_000_000_000
_TIME_PARTS = (
    ("d", 86400 * _NS_PER_S),
    ("h", 3600 * _NS_PER_S),
    ("m", 60 * _NS_PER_S),
    ("s", _NS_PER_S),
    ("ms", 10**6),
)


class _Metric:
    """Samples of one quantity: all of them counted and summed, the latest kept for rates and percentiles."""

    __slots__ = ("accumulator", "samples", "total", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit: Unit = unit
        self.total = 0
        self.accumulator = 0.0
        self.samples: deque[tuple[int, float]] = deque(maxlen=_SAMPLES_KEPT)

    def add(self, value: float) -> None:
        self.total += 1
        self.accumulator += value
        self.samples.append((time.monotonic_ns(), value))

    def span_s(self) -> float:
        return (self.samples[-1][0] - self.samples[0][0]) / _NS_PER_S

    def percentiles(self) -> dict[str, float]:
        """The kept samples at each percentile: real samples, none interpolated."""
        ordered = sorted(value for _, value in self.samples)
        last = len(ordered) - 1
        return {f"{share * 100:g}%": ordered[min(last, int(share * len(ordered)))] for share in _PERCENTILES}

    def report(self) -> Iterable[str]:
        yield f"  TotalSamples: {self.total}"
        yield f"  Accumulator: {_format(self.accumulator, self.unit)}"
        span_s = self.span_s()
        if span_s > 0:
            kept = sum(value for _, value in self.samples)
            yield f"  ValueRate: {_format(kept / span_s, self.unit)} / second"
            yield f"  Rate: {len(self.samples) / span_s:g} / second"
        shares = (f"{share}={_format(value, self.unit)}" for share, value in self.percentiles().items())
        yield f"  Percentiles: {'; '.join(shares)}"

    def snapshot(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "total_samples": self.total,
            "accumulator": self.accumulator,
            "percentiles": self.percentiles(),
        }


_lock = threading.Lock()
_counters: dict[str, int] = {}
_metrics: dict[str, _Metric] = {}


def count(name: str, n: int = 1) -> None:
    """Add `n` to the counter `name`."""
    with _lock:
        _counters[name] = _counters.get(name, 0) + n


def count_ops(ops: Mapping[str, int]) -> None:
    """Add what one program held of each operation, named as "add" or "aten::add", to the counters "lazy::add"."""
    with _lock:
        for op, n in ops.items():
            name = "lazy::" + op.removeprefix("aten::")
            _counters[name] = _counters.get(name, 0) + n


def sample(name: str, value: float, unit: Unit = "") -> None:
    """Add one sample of the metric `name`; its first sample decides the unit: "ns", "bytes", or "" for a number."""
    with _lock:
        _sample(name, value, unit)


def counter_names() -> list[str]:
    """The names of all counters that are not 0, sorted."""
    with _lock:
        return sorted(name for name, value in _counters.items() if value)


def counter_value(name: str) -> int | None:
    """The value of the counter `name`; None when it was never counted, or is 0."""
    with _lock:
        return _counters.get(name) or None


def metric_names() -> list[str]:
    """The names of all metrics that have samples, sorted."""
    with _lock:
        return sorted(_metrics)


def reset() -> None:
    """Forget all counts and samples."""
    with _lock:
        _counters.clear()
        _metrics.clear()


def metrics_report() -> str:
    """All metrics, then all counters, each sorted by name, as text in the form of the original's report."""
    with _lock:
        lines: list[str] = []
        for name in sorted(_metrics):
            lines.append(f"Metric: {name}")
            lines.extend(_metrics[name].report())
        for name, value in sorted(_counters.items()):
            if value:
                lines += [f"Counter: {name}", f"  Value: {value}"]
    return "".join(line + "\n" for line in lines)


def snapshot() -> dict[str, dict[str, Any]]:
    """All counters and metrics as plain values that `json.dumps` takes; times are in nanoseconds."""
    with _lock:
        return {
            "counters": {name: value for name, value in sorted(_counters.items()) if value},
            "metrics": {name: _metrics[name].snapshot() for name in sorted(_metrics)},
        }


def _sample(name: str, value: float, unit: Unit) -> None:
    metric = _metrics.get(name)
    if metric is None:
        metric = _metrics[name] = _Metric(unit)
    metric.add(value)


def _format(value: float, unit: Unit) -> str:
    if unit == "ns":
        return _format_time(value)
    return _format_bytes(value) if unit == "bytes" else f"{value:.2f}"


def _format_time(value_ns: float) -> str:
    """A duration as "01m02s003ms004.500us", leading zero parts left out."""
    text = ""
    # Rounded first, so that no part can round up to a whole one of the next ("01s1000ms").
    left = round(value_ns)
    for suffix, scale in _TIME_PARTS:
        whole, rest = divmod(left, scale)
        if whole or text:
            text += f"{whole:0{3 if suffix == 'ms' else 2}d}{suffix}"
            left = rest
    return f"{text}{left / 1000:07.3f}us"


def _format_bytes(value: float) -> str:
    suffixes = ("B", "KB", "MB", "GB", "TB", "PB")
    power = min(len(suffixes) - 1, int(math.log(value, 1024))) if value >= 1 else 0
    return f"{value / 1024**power:.2f}{suffixes[power]}"


def _on_event(event: Event) -> None:
    match event:
        case SyncEvent():
            _on_sync(event)
        case CompileEvent(duration_s=duration_s):
            count("Compile")
            sample("CompileTime", duration_s * _NS_PER_S, "ns")
        case LoadEvent(duration_s=duration_s):
            count("CompileLoaded")
            sample("LoadTime", duration_s * _NS_PER_S, "ns")
        case ExecuteEvent(duration_s=duration_s, failed=failed):
            count("ExecuteFailed", int(failed))
            sample("ExecuteTime", duration_s * _NS_PER_S, "ns")
        case FallbackEvent(op=op):
            count(op)
        case ReadEvent(duration_s=duration_s):
            sample("ReadTime", duration_s * _NS_PER_S, "ns")
        case MismatchEvent():
            count("MetaMismatch")
        case PruneEvent():
            count("TreePruned")


def _on_sync(event: SyncEvent) -> None:
    # One lock for all of a sync's figures: a reader sees a sync counted in full, or not at all.
    with _lock:
        names = ["CachedCompile" if event.known else "UncachedCompile"]
        if event.reason in (SyncReason.EXPLICIT, SyncReason.OPTIMIZER):
            names.append("MarkStep")
        elif event.reason is SyncReason.BOUND:
            names.append("TrimIrGraph")
        for name in names:
            _counters[name] = _counters.get(name, 0) + 1
        _counters["SyncedTensorsWithIR"] = _counters.get("SyncedTensorsWithIR", 0) + event.outputs
        _sample("TensorsGraphSize", event.instructions, "")
        _sample("RecordTime", event.record_s * _NS_PER_S, "ns")


events.subscribe(_on_event)
