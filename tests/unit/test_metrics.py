"""Metrics: what events count, the report's exact text, snapshots."""

import json
import threading
from collections.abc import Iterator

import pytest
import torch

from torch_ltc import events, metrics
from torch_ltc.events import SyncEvent, SyncReason
from torch_ltc.hooks import Hook


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test starts and ends with nothing counted."""
    metrics.reset()
    yield
    metrics.reset()


def sync(reason: SyncReason, known: bool = True, outputs: int = 2, duration_s: float = 0.0) -> SyncEvent:
    return SyncEvent(reason, 5, 3, outputs, 1, known, record_s=0.001, source=None, duration_s=duration_s)


@pytest.mark.parametrize(
    ("reason", "extra"),
    [
        (SyncReason.EXPLICIT, ["MarkStep"]),
        (SyncReason.OPTIMIZER, ["MarkStep"]),
        (SyncReason.BOUND, ["TrimIrGraph"]),
        (SyncReason.READ, []),
        (SyncReason.FALLBACK, []),
        (SyncReason.SEED, []),
    ],
)
def test_sync_is_counted_by_its_reason(reason: SyncReason, extra: list[str]) -> None:
    events.emit(sync(reason))
    events.emit(sync(reason, known=False))
    assert metrics.counter_names() == sorted(["CachedCompile", "UncachedCompile", "SyncedTensorsWithIR", *extra])
    assert f"SyncTime::{reason.name.lower()}" in metrics.metric_names()
    assert [metrics.counter_value(name) for name in extra] == [2] * len(extra)
    assert metrics.counter_value("CachedCompile") == 1
    assert metrics.counter_value("UncachedCompile") == 1
    assert metrics.counter_value("SyncedTensorsWithIR") == 4


def test_sync_without_outputs_leaves_no_counter_of_them() -> None:
    events.emit(sync(SyncReason.READ, outputs=0))
    assert metrics.counter_names() == ["CachedCompile"]
    assert metrics.counter_value("SyncedTensorsWithIR") is None
    assert "SyncedTensorsWithIR" not in metrics.metrics_report()


def test_other_events_are_counted_and_timed() -> None:
    events.emit(events.CompileEvent(1, "torchscript", 0.25))
    events.emit(events.ExecuteEvent(1, "torchscript", 0.5, failed=False))
    events.emit(events.ExecuteEvent(1, "torchscript", 0.5, failed=True))
    events.emit(events.FallbackEvent("aten::index.Tensor", "data-dependent", None, 0.1))
    events.emit(events.ReadEvent("item", 4, 0.125, None, wait_s=0.0625))
    events.emit(events.UploadEvent(64, 0.25))
    events.emit(events.RefusalEvent(1, "torchscript", "compile", "no rule"))
    events.emit(events.MismatchEvent("aten::add", "a", "b"))
    events.emit(events.PruneEvent(2, 1))
    snapshot = metrics.snapshot()
    assert snapshot["counters"] == {
        "Compile": 1,
        "CompileRefused": 1,
        "Execute::torchscript": 2,
        "ExecuteFailed": 1,
        "MetaMismatch": 1,
        "TreePruned": 1,
        "aten::_local_scalar_dense": 1,
        "aten::index.Tensor": 1,
    }
    assert {name: value["accumulator"] for name, value in snapshot["metrics"].items()} == {
        "CompileTime": 250e6,
        "ExecuteTime": 1000e6,
        "FallbackTime": 100e6,
        "InboundData": 4,
        "OutboundData": 64,
        "ReadTime": 125e6,
        "UploadTime": 250e6,
        "WaitTime": 62.5e6,
    }


def test_count_ops_names_them_as_the_original() -> None:
    metrics.count_ops({"add": 2, "aten::mul": 1})
    metrics.count_ops({"aten::add": 3})
    assert {name: metrics.counter_value(name) for name in metrics.counter_names()} == {"lazy::add": 5, "lazy::mul": 1}


def test_count_adds_up() -> None:
    metrics.count("TrieForked")
    metrics.count("TrieForked", 2)
    assert metrics.counter_value("TrieForked") == 3


def test_percentiles_are_samples_at_the_places_of_the_original() -> None:
    for value in range(12):
        metrics.sample("Quantity", value)
    percentiles = metrics.snapshot()["metrics"]["Quantity"]["percentiles"]
    assert list(percentiles.values()) == [0, 0, 1, 2, 6, 9, 10, 11, 11]


def test_unknown_and_zero_counters_are_none() -> None:
    metrics.count("Zero", 0)
    assert metrics.counter_value("Zero") is None
    assert metrics.counter_value("Unknown") is None
    assert metrics.counter_names() == []
    assert metrics.metrics_report() == ""


def test_report_has_the_text_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 500_000_000, 2_000_000_000, 2_000_000_000])
    monkeypatch.setattr("time.monotonic_ns", lambda: next(clock))
    for value in (1, 4, 4):
        metrics.sample("TensorsGraphSize", value)
    metrics.sample("ExecuteTime", 1_234_567_890, "ns")
    metrics.count("MarkStep", 3)
    metrics.count("CachedCompile", 2)
    assert metrics.metrics_report() == (
        "Metric: ExecuteTime\n"
        "  TotalSamples: 1\n"
        "  Accumulator: 01s234ms567.890us\n"
        "  Percentiles: " + "; ".join(f"{p}%=01s234ms567.890us" for p in (1, 5, 10, 20, 50, 80, 90, 95, 99)) + "\n"
        "Metric: TensorsGraphSize\n"
        "  TotalSamples: 3\n"
        "  Accumulator: 9.00\n"
        "  ValueRate: 4.50 / second\n"
        "  Rate: 1.5 / second\n"
        "  Percentiles: 1%=1.00; 5%=1.00; 10%=1.00; 20%=1.00; 50%=4.00; 80%=4.00; 90%=4.00; 95%=4.00; 99%=4.00\n"
        "Counter: CachedCompile\n"
        "  Value: 2\n"
        "Counter: MarkStep\n"
        "  Value: 3\n"
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (942, "ns", "000.942us"),
        (14_246, "ns", "014.246us"),
        (1_600_000, "ns", "001ms600.000us"),
        (999_999.9, "ns", "001ms000.000us"),
        (3_600e9 + 61e9, "ns", "01h01m01s000ms000.000us"),
        (90_000e9, "ns", "01d01h00m00s000ms000.000us"),
        (0, "bytes", "0.00B"),
        (1023, "bytes", "1023.00B"),
        (1536, "bytes", "1.50KB"),
        (5 * 1024**3, "bytes", "5.00GB"),
        (2 * 1024**6, "bytes", "2048.00PB"),
        (2, "", "2.00"),
    ],
)
def test_values_are_written_with_their_unit(value: float, unit: metrics.Unit, text: str) -> None:
    metrics.sample("Quantity", value, unit)
    assert f"  Accumulator: {text}\n" in metrics.metrics_report()


def test_samples_kept_are_bounded_and_all_are_summed() -> None:
    for value in range(3000):
        metrics.sample("Quantity", value)
    quantity = metrics.snapshot()["metrics"]["Quantity"]
    assert (quantity["total_samples"], quantity["accumulator"]) == (3000, sum(range(3000)))
    assert quantity["percentiles"]["1%"] >= 3000 - 1024


def test_snapshot_is_json_and_reset_forgets() -> None:
    events.emit(sync(SyncReason.EXPLICIT))
    assert json.loads(json.dumps(metrics.snapshot())) == metrics.snapshot()
    assert metrics.metric_names() == ["RecordTime", "SyncTime::explicit", "TensorsGraphSize"]
    assert json.loads(metrics.to_json()) == metrics.snapshot()
    assert metrics.to_json(indent=1).startswith('{\n "counters"')
    metrics.reset()
    assert metrics.snapshot() == {"counters": {}, "metrics": {}}


def test_sync_times_are_told_apart_by_reason() -> None:
    events.emit(sync(SyncReason.READ, duration_s=0.25))
    events.emit(sync(SyncReason.READ, duration_s=0.25))
    events.emit(sync(SyncReason.BOUND, duration_s=1.0))
    recorded = metrics.snapshot()["metrics"]
    assert recorded["SyncTime::read"]["accumulator"] == 500e6
    assert recorded["SyncTime::read"]["total_samples"] == 2
    assert recorded["SyncTime::bound"]["accumulator"] == 1000e6


def test_reset_asks_others_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_on_reset", Hook[[], None]("test", "in this test", listed=False))
    left = [3]
    metrics.on_reset(left.clear)
    metrics.reset()
    assert left == []


def test_a_block_has_what_it_counted_and_nothing_else() -> None:
    metrics.count("MarkStep", 5)
    metrics.count("TrieForked")
    metrics.sample("ExecuteTime", 100, "ns")
    with metrics.recorded() as block:
        assert block.counters == {}
        metrics.count("MarkStep", 2)
        for value in (7, 9):
            metrics.sample("ExecuteTime", value, "ns")
    metrics.count("MarkStep")
    assert block.counters == {"MarkStep": 2}
    assert set(block.metrics) == {"ExecuteTime"}
    executed = block.metrics["ExecuteTime"]
    assert (executed["unit"], executed["total_samples"], executed["accumulator"]) == ("ns", 2, 16)
    assert (executed["percentiles"]["1%"], executed["percentiles"]["99%"]) == (7, 9)


def test_a_block_with_more_samples_than_are_kept_has_the_percentiles_of_the_latest() -> None:
    with metrics.recorded() as block:
        for value in range(3000):
            metrics.sample("Quantity", value)
    assert block.metrics["Quantity"]["total_samples"] == 3000
    assert block.metrics["Quantity"]["percentiles"]["1%"] >= 3000 - 1024


def test_a_reset_inside_a_block_begins_it_anew_and_an_error_leaves_it_filled() -> None:
    metrics.count("MarkStep", 5)

    def fail() -> None:
        with metrics.recorded() as block:
            found.append(block)
            metrics.reset()
            metrics.count("MarkStep", 2)
            raise KeyError

    found: list[metrics.Block] = []
    with pytest.raises(KeyError):
        fail()
    assert found[0].counters == {"MarkStep": 2}


def test_threads_lose_no_count() -> None:
    def work() -> None:
        for _ in range(500):
            events.emit(sync(SyncReason.EXPLICIT))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.counter_value("MarkStep") == 4000


def test_every_figure_of_an_event_is_documented() -> None:
    for reason in SyncReason:
        events.emit(sync(reason))
        events.emit(sync(reason, known=False))
    events.emit(events.CompileEvent(1, "b", 0.1))
    events.emit(events.LoadEvent(1, "b", 0.1, "folder"))
    events.emit(events.ExecuteEvent(1, "b", 0.1, failed=True, captured=True))
    events.emit(events.RefusalEvent(1, "b", "run", "no rule"))
    events.emit(events.FallbackEvent("aten::nonzero", "data", None, 0.1))
    events.emit(events.ReadEvent("item", 4, 0.1, None))
    events.emit(events.UploadEvent(4, 0.1))
    events.emit(events.MismatchEvent("aten::add", "a", "b"))
    events.emit(events.PruneEvent(2, 1))
    events.emit(events.CaptureEvent(1, 2, "all", ""))
    events.emit(events.CaptureEvent(1, 0, "", "a read"))
    events.emit(events.GraphsDroppedEvent(1, 2, "no memory"))
    # Counted where no event tells of it.
    others = {"lazy::<op>", "TrieForked", "CompileNotOnDisk", "NativeHits"}
    patterns = {
        "Execute::b": "Execute::<backend>",
        "aten::nonzero": "aten::<op>",
        "aten::_local_scalar_dense": "aten::<op>",
    }
    assert {patterns.get(name, name) for name in metrics.counter_names()} == set(metrics.COUNTERS) - others
    recorded = metrics.snapshot()["metrics"]
    units = {name.partition("::")[0]: recorded[name]["unit"] for name in recorded}
    assert units == {name.partition("::")[0]: unit for name, (unit, _) in metrics.METRICS.items()}
    reasons = {name.partition("::")[2] for name in recorded} - {""}
    assert reasons == {reason.name.lower() for reason in SyncReason}


def test_uploads_are_told_later_as_reads_are() -> None:
    events.catch_up()
    torch.ones(4).to("ltc")
    assert [kind for kind, *_ in events._noted] == [events.UploadEvent]
    assert metrics.snapshot()["metrics"]["OutboundData"]["accumulator"] == 16
