"""Metrics for monitoring systems: the exact text, and that it is what the format allows."""

import math
import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from torch_ltc import events, metrics
from torch_ltc.events import SyncEvent, SyncReason

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"({_NAME})(\{{{_LABEL}(?:,{_LABEL})*\}})? (\S+)")
_HELP = re.compile(rf"# HELP ({_NAME}) (?:[^\\\n]|\\[\\n])+")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|summary)")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    metrics.reset()
    yield
    metrics.reset()


def parse(text: str) -> dict[str, dict[str, float]]:
    """Samples by family and by name with labels; raises for whatever the format does not allow."""
    found: dict[str, dict[str, float]] = {}
    assert text.endswith("\n")
    lines = iter(text.splitlines())
    family = kind = ""
    for line in lines:
        if line.startswith("# HELP"):
            head = _HELP.fullmatch(line)
            typed = _TYPE.fullmatch(next(lines))
            assert head is not None, line
            assert typed is not None, line
            assert head[1] == typed[1]
            family, kind = typed[1], typed[2]
            assert family not in found, f"{family} comes twice"
            assert family.endswith("_total") == (kind == "counter")
            found[family] = {}
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample is not None, f"not a sample: {line!r}"
        name, labels, value = sample[1], sample[2] or "", float(sample[3])
        allowed = [family] if kind == "counter" else [family, f"{family}_sum", f"{family}_count"]
        assert name in allowed, f"{name} stands under {family}"
        assert (name == family and kind == "summary") == ("quantile=" in labels), line
        assert name + labels not in found[family], f"{name}{labels} comes twice"
        found[family][name + labels] = value
    return found


def emit_some() -> None:
    for duration_s in (0.001, 0.003):
        events.emit(SyncEvent(SyncReason.READ, 5, 3, 2, 1, True, 0.25, None, duration_s))
    events.emit(events.ExecuteEvent(1, "torchscript", 0.5, failed=False))
    events.emit(events.FallbackEvent("aten::nonzero", "data", None, 0.125))
    metrics.count_ops({"aten::add": 3})


def family_text(name: str) -> str:
    """The lines of one family."""
    lines = metrics.to_prometheus().splitlines()
    start = lines.index(next(line for line in lines if line.startswith(f"# HELP {name} ")))
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("# HELP")), len(lines))
    return "\n".join(lines[start:end])


def test_counters_have_this_text() -> None:
    emit_some()
    assert family_text("torch_ltc_cached_compile_total") == (
        "# HELP torch_ltc_cached_compile_total Syncs whose program was in the cache.\n"
        "# TYPE torch_ltc_cached_compile_total counter\n"
        "torch_ltc_cached_compile_total 2"
    )
    assert family_text("torch_ltc_execute_total") == (
        "# HELP torch_ltc_execute_total Runs of programs, by what ran them.\n"
        "# TYPE torch_ltc_execute_total counter\n"
        'torch_ltc_execute_total{backend="torchscript"} 1'
    )
    assert family_text("torch_ltc_recorded_ops_total").endswith('\ntorch_ltc_recorded_ops_total{op="add"} 3')
    assert family_text("torch_ltc_fallback_ops_total").endswith('\ntorch_ltc_fallback_ops_total{op="aten::nonzero"} 1')
    # At 0 from the start: a rate needs a beginning.
    assert family_text("torch_ltc_compile_total").endswith("\ntorch_ltc_compile_total 0")


def test_times_are_summaries_in_seconds_with_this_text() -> None:
    emit_some()
    low, high = "0.001", "0.003"
    values = [low, low, low, low, high, high, high, high, high]
    shares = ["0.01", "0.05", "0.1", "0.2", "0.5", "0.8", "0.9", "0.95", "0.99"]
    assert family_text("torch_ltc_sync_time_seconds") == "\n".join(
        [
            "# HELP torch_ltc_sync_time_seconds Time that a sync took of the thread that asked for it, waiting for "
            "room in the queue included, by its reason: explicit, read, optimizer, bound, fallback, seed, state, "
            "barrier, jit, eager.",
            "# TYPE torch_ltc_sync_time_seconds summary",
            *(
                f'torch_ltc_sync_time_seconds{{reason="read",quantile="{share}"}} {value}'
                for share, value in zip(shares, values, strict=True)
            ),
            'torch_ltc_sync_time_seconds_sum{reason="read"} 0.004',
            'torch_ltc_sync_time_seconds_count{reason="read"} 2',
        ]
    )


@pytest.mark.parametrize("filled", [False, True])
def test_the_text_is_what_the_format_allows(filled: bool) -> None:
    if filled:
        emit_some()
        metrics.count("mine, with a space")
        metrics.count('odd::"\\\n')
        metrics.sample("Mine", math.inf)
        metrics.sample("Mine too", 3, "bytes")
        metrics.sample("ExecuteTime", math.nan, "ns")
    found = parse(metrics.to_prometheus())
    fixed = [name for name in (*metrics.COUNTERS, *metrics.METRICS) if "::" not in name]
    assert sum(bool(samples) for samples in found.values()) >= len(fixed)
    if filled:
        assert found["torch_ltc_other_total"] == {'torch_ltc_other_total{name="mine, with a space"}': 1}
        assert found["torch_ltc_fallback_ops_total"]['torch_ltc_fallback_ops_total{op="odd::\\"\\\\\\n"}'] == 1
        assert found["torch_ltc_other"]['torch_ltc_other_sum{name="Mine"}'] == math.inf
        assert found["torch_ltc_other_bytes"]['torch_ltc_other_bytes_count{name="Mine too"}'] == 1


def test_the_parser_of_prometheus_reads_the_same() -> None:
    emit_some()
    metrics.count('odd::"\\\n')
    text = metrics.to_prometheus()
    specializations = list(text_string_to_metric_families(text))
    assert {family.type for family in specializations} == {"counter", "summary"}
    ours = {name: value for samples in parse(text).values() for name, value in samples.items()}
    theirs = [sample for family in specializations for sample in family.samples]
    assert len(theirs) == len(ours)
    odd = [sample for sample in theirs if sample.labels.get("op", "").startswith("odd")]
    assert [(sample.labels, sample.value) for sample in odd] == [({"op": 'odd::"\\\n'}, 1.0)]
