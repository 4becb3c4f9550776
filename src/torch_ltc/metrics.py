"""Counters and timers, fed by events, with the names and the report of the original lazy tensor core.

Owns every figure that is counted over the life of the process. It listens to `events` from its import on; what no event
carries is counted through `count`, `count_ops` and `sample`. All functions may be called from any thread.
"""

import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeAlias

from torch_ltc import events
from torch_ltc.events import (
    CaptureEvent,
    CompileEvent,
    ExecuteEvent,
    FallbackEvent,
    GraphsDroppedEvent,
    LoadEvent,
    MismatchEvent,
    PruneEvent,
    ReadEvent,
    RefusalEvent,
    SyncEvent,
    SyncReason,
    UploadEvent,
)
from torch_ltc.hooks import Hook

__all__ = [
    "COUNTERS",
    "METRICS",
    "Block",
    "count",
    "count_ops",
    "counter_names",
    "counter_value",
    "metric_names",
    "metrics_report",
    "on_reset",
    "recorded",
    "reset",
    "sample",
    "snapshot",
    "to_json",
    "to_prometheus",
]

Unit: TypeAlias = Literal["ns", "bytes", ""]

COUNTERS: Mapping[str, str] = {
    "MarkStep": "Syncs that a step asked for: explicit ones and those after an optimizer.",
    "CachedCompile": "Syncs whose program was in the cache.",
    "UncachedCompile": "Syncs whose program was new.",
    "SyncedTensorsWithIR": "Buffers that syncs computed, summed over all syncs.",
    "TrimIrGraph": "Syncs that happened because the pending program reached its bound.",
    "NativeHits": "Instructions that the hit path in C++ recorded.",
    "TrieForked": "Instructions that were recorded where another one had come before, so that the prefix tree forked.",
    "TreePruned": "Times that the prefix tree reached its bound and was pruned.",
    "Compile": "Programs that a backend compiled.",
    "CompileLoaded": "Programs whose compiled form was loaded from disk, where an earlier process had put it.",
    "CompileNotOnDisk": "Programs that had to be compiled because the disk cache, which was on, did not have them.",
    "CompileRefused": "Programs that a backend could not compile or run, which the interpreter runs instead.",
    "GraphCapture": "Programs that were captured as graphs of the device.",
    "GraphRefused": "Programs that cannot be captured as graphs of the device.",
    "GraphDropped": "Programs whose graphs were dropped, because they held too much memory.",
    "GraphReplay": "Runs of programs that were replays of graphs, the first ones while capturing included.",
    "ExecuteFailed": "Programs of which an operation failed when they ran.",
    "MetaMismatch": "Results whose layout was not the one that the meta kernel had promised.",
    "Execute::<backend>": "Runs of programs, by what ran them.",
    "aten::<op>": "Times that the operation ran eagerly instead of being recorded; with overload: aten::index.Tensor. "
    "As in the original, aten::_local_scalar_dense counts the numbers that were read with item().",
    "lazy::<op>": "Times that the operation was part of a synced program.",
}
METRICS: Mapping[str, tuple[Unit, str]] = {
    "TensorsGraphSize": ("", "Instructions of a synced program."),
    "RecordTime": ("ns", "Wall time from the first operation of a program to its sync."),
    "SyncTime::<reason>": (
        "ns",
        "Time that a sync took of the thread that asked for it, waiting for room in the queue included, by its reason: "
        + ", ".join(reason.name.lower() for reason in SyncReason)
        + ".",
    ),
    "CompileTime": ("ns", "Time that a backend took to compile a program."),
    "LoadTime": ("ns", "Time that it took to load the compiled form of a program from disk."),
    "ExecuteTime": ("ns", "Time that a program took to run."),
    "ReadTime": ("ns", "Time that a read took, waiting included."),
    "WaitTime": ("ns", "Time that a read waited for the program that computes the value."),
    "FallbackTime": ("ns", "Time that an operation took which ran eagerly, waiting for what it needs included."),
    "UploadTime": ("ns", "Time that it took to copy a tensor to the device."),
    "InboundData": ("bytes", "Bytes that a read copied off the device."),
    "OutboundData": ("bytes", "Bytes that were copied to the device at once."),
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
        # With the time of each, in nanoseconds.
        self.samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES_KEPT)

    def add(self, values: Sequence[float], at_ns: Sequence[float]) -> None:
        self.total += len(values)
        self.accumulator += sum(values)
        self.samples.extend(zip(at_ns, values, strict=True))

    def span_s(self) -> float:
        return (self.samples[-1][0] - self.samples[0][0]) / _NS_PER_S

    def percentiles(self) -> dict[str, float]:
        """The kept samples at each percentile: real samples, none interpolated."""
        return {f"{share * 100:g}%": value for share, value in _quantiles(self.samples).items()}

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

    def since(self, total: int, accumulator: float) -> dict[str, Any]:
        """As `snapshot`, of the samples after the first `total`, which summed up to `accumulator`."""
        kept = islice(self.samples, max(0, len(self.samples) - (self.total - total)), None)
        return {
            "unit": self.unit,
            "total_samples": self.total - total,
            "accumulator": self.accumulator - accumulator,
            "percentiles": {f"{share * 100:g}%": value for share, value in _quantiles(kept).items()},
        }


def _quantiles(samples: Iterable[tuple[float, float]]) -> dict[float, float]:
    ordered = sorted(value for _, value in samples)
    last = len(ordered) - 1
    return {share: ordered[min(last, int(share * len(ordered)))] for share in _PERCENTILES} if ordered else {}


@dataclass(slots=True)
class Block:
    """The counts of a `with recorded()` block, filled when the block ends; the values are those of `snapshot`."""

    counters: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)


_lock = threading.Lock()
_counters: dict[str, int] = {}
_metrics: dict[str, _Metric] = {}
_op_names: dict[str, str] = {}
# What programs held that were synced since the counters were read: dozens of operations each, at every step.
_synced: deque[Mapping[str, int]] = deque()
_MOST_SYNCED = 512
_resets = 0
_on_reset = Hook[[], None]("metrics reset", "when the counters are reset")


def count(name: str, n: int = 1) -> None:
    """Add `n` to the counter `name`."""
    with _lock:
        _count(name, n)


def count_ops(ops: Mapping[str, int]) -> None:
    """Add what one program held of each operation, named as "add" or "aten::add", to the counters "lazy::add". The
    mapping must not change."""
    _synced.append(ops)
    if len(_synced) > _MOST_SYNCED:
        with _lock:
            _add_ops()


def _add_ops() -> None:
    """Bring the counters up to date, before they are read. With the lock held."""
    programs: dict[int, tuple[Mapping[str, int], int]] = {}
    while _synced:
        ops = _synced.popleft()
        programs[id(ops)] = (ops, programs.get(id(ops), (ops, 0))[1] + 1)
    for ops, times in programs.values():
        for op, n in ops.items():
            name = _op_names.get(op)
            if name is None:
                name = _op_names[op] = "lazy::" + op.removeprefix("aten::")
            _counters[name] = _counters.get(name, 0) + n * times


def sample(name: str, value: float, unit: Unit = "") -> None:
    """Add one sample of the metric `name`; its first sample decides the unit: "ns", "bytes", or "" for a number."""
    with _lock:
        _sample(name, (value,), unit, (time.monotonic_ns(),))


def counter_names() -> list[str]:
    """The names of all counters that are not 0, sorted."""
    events.catch_up()
    with _lock:
        _add_ops()
        return sorted(name for name, value in _counters.items() if value)


def counter_value(name: str) -> int | None:
    """The value of the counter `name`; None when it was never counted, or is 0."""
    events.catch_up()
    with _lock:
        _add_ops()
        return _counters.get(name) or None


def metric_names() -> list[str]:
    """The names of all metrics that have samples, sorted."""
    events.catch_up()
    with _lock:
        return sorted(_metrics)


def reset() -> None:
    """Forget all counts and samples, and what other modules have counted but not handed over yet (`on_reset`).

    A program that is queued but has not run is counted afterwards: call `torch_ltc.wait_device_ops()` first.
    """
    global _resets
    events.catch_up()
    with _lock:
        _resets += 1
        _synced.clear()
        _counters.clear()
        _metrics.clear()
    _on_reset()


def on_reset(forget: Callable[[], None]) -> None:
    """Have `forget` called by every `reset`: for a module that counts by itself and hands over its counts later."""
    _on_reset.add(forget)


@contextmanager
def recorded() -> Iterator[Block]:
    """`with recorded() as block:` gives what was counted while the block ran, by all threads.

    A program that is queued at the end of the block is not in it: call `torch_ltc.wait_device_ops()` inside. After a
    `reset` in the block, what was counted since then. Percentiles are those of the block's latest 1024 samples.
    """
    block = Block()
    events.catch_up()
    with _lock:
        _add_ops()
        resets = _resets
        counters = dict(_counters)
        totals = {name: (metric.total, metric.accumulator) for name, metric in _metrics.items()}
    try:
        yield block
    finally:
        events.catch_up()
        with _lock:
            _add_ops()
            if resets != _resets:
                counters, totals = {}, {}
            for name, value in sorted(_counters.items()):
                if value != counters.get(name, 0):
                    block.counters[name] = value - counters.get(name, 0)
            for name, metric in sorted(_metrics.items()):
                total, accumulator = totals.get(name, (0, 0.0))
                if metric.total != total:
                    block.metrics[name] = metric.since(total, accumulator)


def metrics_report() -> str:
    """All metrics, then all counters, each sorted by name, as text in the form of the original's report."""
    events.catch_up()
    with _lock:
        _add_ops()
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
    events.catch_up()
    with _lock:
        _add_ops()
        return {
            "counters": {name: value for name, value in sorted(_counters.items()) if value},
            "metrics": {name: _metrics[name].snapshot() for name in sorted(_metrics)},
        }


def _count(name: str, n: int = 1) -> None:
    _counters[name] = _counters.get(name, 0) + n


def _sample(name: str, values: Sequence[float], unit: Unit, at_ns: Sequence[float]) -> None:
    metric = _metrics.get(name)
    if metric is None:
        metric = _metrics[name] = _Metric(unit)
    metric.add(values, at_ns)


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


# ---- for monitoring systems ----------------------------------------------------------------------------------------

# A name with a part after "::" is one label of a family that all such names share. For each pattern of the tables: the
# name of the label, and of the family.
_LABELS: Mapping[str, tuple[str, str]] = {
    "Execute::<backend>": ("backend", "execute"),
    "SyncTime::<reason>": ("reason", "sync_time"),
    "lazy::<op>": ("op", "recorded_ops"),
    "aten::<op>": ("op", "fallback_ops"),
}
_UNIT_SUFFIXES: Mapping[Unit, str] = {"ns": "_seconds", "bytes": "_bytes", "": ""}
_PREFIX = "torch_ltc_"


def to_json(indent: int | None = None) -> str:
    """`snapshot()` as JSON text."""
    return json.dumps(snapshot(), indent=indent)


def to_prometheus() -> str:
    """All counters and metrics in the text format that Prometheus scrapes.

    Counters of a fixed name are there from the start, at 0, so that a rate has a beginning; metrics are summaries, with
    the quantiles of the latest 1024 samples. Times are in seconds. Names that are not in the tables share the families
    `torch_ltc_other*`, with their name as the label.
    """
    events.catch_up()
    with _lock:
        _add_ops()
        families = [*_counter_families(), *_metric_families()]
    return "".join(f"{line}\n" for family in families for line in family)


def _counter_families() -> Iterator[list[str]]:
    grouped: dict[str, dict[str, int]] = {name: {} for name in COUNTERS}
    for name, value in sorted(_counters.items()):
        pattern, label = _pattern(name, COUNTERS)
        if value:
            grouped.setdefault(pattern, {})[label] = value
    for pattern, values in grouped.items():
        name = f"{_PREFIX}{_family(pattern)}_total"
        if pattern not in _LABELS and pattern in COUNTERS:
            values = {"": values.get("", 0)}
        lines = [f"{name}{label} {value}" for label, value in values.items()]
        yield [*_head(name, COUNTERS.get(pattern, "Counters of the program's own."), "counter"), *lines]


def _metric_families() -> Iterator[list[str]]:
    grouped: dict[tuple[str, Unit], dict[str, _Metric]] = {(name, unit): {} for name, (unit, _) in METRICS.items()}
    for name, metric in sorted(_metrics.items()):
        pattern, label = _pattern(name, METRICS)
        grouped.setdefault((pattern, metric.unit), {})[label] = metric
    for (pattern, unit), metrics in grouped.items():
        name = f"{_PREFIX}{_family(pattern)}{_UNIT_SUFFIXES[unit]}"
        help_text = METRICS[pattern][1] if pattern in METRICS else "Samples of the program's own."
        lines = [line for label, metric in metrics.items() for line in _summary(name, label, metric)]
        if not metrics and pattern not in _LABELS:
            lines = [f"{name}_sum 0", f"{name}_count 0"]
        yield [*_head(name, help_text, "summary"), *lines]


def _summary(name: str, label: str, metric: _Metric) -> Iterator[str]:
    scale = 1 / _NS_PER_S if metric.unit == "ns" else 1.0
    for share, value in _quantiles(metric.samples).items():
        quantile = f'quantile="{share:g}"'
        labels = f"{label[:-1]},{quantile}}}" if label else f"{{{quantile}}}"
        yield f"{name}{labels} {_number(value * scale)}"
    yield f"{name}_sum{label} {_number(metric.accumulator * scale)}"
    yield f"{name}_count{label} {metric.total}"


def _pattern(name: str, table: Mapping[str, Any]) -> tuple[str, str]:
    """The name in the table that documents this one ("" when none does), and the label that tells it from others."""
    if name in table:
        return name, ""
    prefix, separator, rest = name.partition("::")
    for pattern, (label, _) in _LABELS.items():
        if pattern in table and separator and pattern.startswith(f"{prefix}::"):
            # Other namespaces than "aten" have fallbacks, too: there the label is the whole name.
            return pattern, _label(label, name if prefix == "aten" else rest)
    if separator and "aten::<op>" in table:
        return "aten::<op>", _label("op", name)
    return "", _label("name", name)


def _label(label: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{label}="{escaped}"}}'


def _family(pattern: str) -> str:
    if pattern in _LABELS:
        return _LABELS[pattern][1]
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", pattern).lower() if pattern else "other"


def _head(name: str, help_text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]


def _number(value: float) -> str:
    return f"{value:.12g}" if math.isfinite(value) else ("NaN" if math.isnan(value) else f"{value:+}".replace("i", "I"))


# ---- what events say -----------------------------------------------------------------------------------------------

_SYNC_TIMES = {reason: f"SyncTime::{reason.name.lower()}" for reason in SyncReason}


def _keep(batch: Sequence[events.Noted]) -> None:
    """Count what came at every step, column by column."""
    kinds: dict[type, tuple[list[float], list[tuple[Any, ...]]]] = {kind: ([], []) for kind in _COLUMNS}
    for kind, at_s, fields in batch:
        times, rows = kinds[kind]
        times.append(at_s * _NS_PER_S)
        rows.append(fields)
    # One lock for all of an event's figures: a reader sees a sync counted in full, or not at all.
    with _lock:
        for kind, (times, rows) in kinds.items():
            if rows:
                _COLUMNS[kind](times, *zip(*rows, strict=True))


def _of_each(what: Sequence[Any], *columns: Sequence[float]) -> Iterator[tuple[Any, list[Sequence[float]]]]:
    """Each different thing in a column, with the parts of other columns that belong to it. Things are told apart by
    identity: to hash a member of an enumeration takes longer."""
    different = {id(one): one for one in what}
    for one in different.values():
        if len(different) == 1:
            yield one, list(columns)
        else:
            yield (
                one,
                [[value for other, value in zip(what, column, strict=True) if other is one] for column in columns],
            )


def _ns(column: Sequence[float]) -> list[float]:
    return [value_s * _NS_PER_S for value_s in column]


def _on_syncs(at_ns: Sequence[float], *columns: Sequence[Any]) -> None:
    reasons, instructions, _, outputs, _, known, record_s, _, durations_s = columns
    for compiled, name in ((True, "CachedCompile"), (False, "UncachedCompile")):
        _count(name, known.count(compiled))
    _count("SyncedTensorsWithIR", sum(outputs))
    _sample("TensorsGraphSize", instructions, "", at_ns)
    _sample("RecordTime", _ns(record_s), "ns", at_ns)
    for reason, (own, times) in _of_each(reasons, durations_s, at_ns):
        if reason is SyncReason.EXPLICIT or reason is SyncReason.OPTIMIZER:
            _count("MarkStep", len(own))
        elif reason is SyncReason.BOUND:
            _count("TrimIrGraph", len(own))
        _sample(_SYNC_TIMES[reason], _ns(own), "ns", times)


def _on_executions(at_ns: Sequence[float], *columns: Sequence[Any]) -> None:
    _, backends, durations_s, failed, captured, _ = columns
    _count("ExecuteFailed", sum(failed))
    _count("GraphReplay", sum(captured))
    for backend, (own,) in _of_each(backends, durations_s):
        _count("Execute::" + backend, len(own))
    _sample("ExecuteTime", _ns(durations_s), "ns", at_ns)


# The original counts reads of numbers under the name of the operator.
_LOCAL_SCALAR = "aten::_local_scalar_dense"


def _on_reads(at_ns: Sequence[float], *columns: Sequence[Any]) -> None:
    uses, sizes_bytes, durations_s, _, waits_s = columns
    _count(_LOCAL_SCALAR, uses.count("item"))
    _sample("ReadTime", _ns(durations_s), "ns", at_ns)
    _sample("WaitTime", _ns(waits_s), "ns", at_ns)
    _sample("InboundData", sizes_bytes, "bytes", at_ns)


def _on_uploads(at_ns: Sequence[float], *columns: Sequence[Any]) -> None:
    sizes_bytes, durations_s, _ = columns
    _sample("UploadTime", _ns(durations_s), "ns", at_ns)
    _sample("OutboundData", sizes_bytes, "bytes", at_ns)


_COLUMNS: Mapping[type, Callable[..., None]] = {
    SyncEvent: _on_syncs,
    ExecuteEvent: _on_executions,
    ReadEvent: _on_reads,
    UploadEvent: _on_uploads,
}


def _on_compile(event: CompileEvent) -> None:
    _count_timed("Compile", "CompileTime", event.duration_s)


def _on_load(event: LoadEvent) -> None:
    _count_timed("CompileLoaded", "LoadTime", event.duration_s)


def _on_fallback(event: FallbackEvent) -> None:
    _count_timed(event.op, "FallbackTime", event.duration_s)


def _count_timed(counter: str, metric: str, duration_s: float) -> None:
    with _lock:
        _count(counter)
        _sample(metric, (duration_s * _NS_PER_S,), "ns", (time.monotonic_ns(),))


_HANDLERS: Mapping[type, Callable[[Any], None]] = {
    CompileEvent: _on_compile,
    LoadEvent: _on_load,
    FallbackEvent: _on_fallback,
    RefusalEvent: lambda _: count("CompileRefused"),
    CaptureEvent: lambda event: count("GraphRefused" if event.refusal else "GraphCapture"),
    GraphsDroppedEvent: lambda event: count("GraphDropped", event.programs),
    MismatchEvent: lambda _: count("MetaMismatch"),
    PruneEvent: lambda _: count("TreePruned"),
}
for _kind, _handler in _HANDLERS.items():
    events.subscribe(_handler, _kind)
events.keep_figures(_keep, *_COLUMNS)
