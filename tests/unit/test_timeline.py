"""The timeline as trace events: what the format wants, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import torch_ltc
from torch_ltc.debug.history import history
from torch_ltc.debug.recording import Memory, ProgramRow, Recording, Span
from torch_ltc.debug.timeline import chrome_trace, write_trace
from torch_ltc.source import UNKNOWN, Source

SITE = Source("/home/me/train.py", 12, "main", module="Net")
ROW = ProgramRow(7, 3, 2, 1, SITE, "READ", UNKNOWN, 2, 2, 1, 0, "torchscript", 1, 0, 0.1, 0.2, 0.3, "", ())
SPANS = (
    Span("record", "user", 0.001, 0.002, 0, 7),
    Span("sync", "user", 0.003, 0.001, 0, 7, "read"),
    Span("wait", "user", 0.004, 0.010, 0, 0, "item"),
    Span("run", "worker", 0.005, 0.008, 0, 7, "interpreter"),
    Span("copy", "user", 0.0140000004, 0.00001, 0, 0, "item", 4),
    Span("sync", "user", 0.020, 0.001, 1, 7, "read"),
    Span("compile", "compiler", 0.0205, 0.005, 1, 7, "torchscript"),
    Span("run", "worker", 0.026, 0.001, 1, 7, "torchscript"),
)
RECORDING = Recording(
    command=("/home/me/train.py", "--fast"),
    started="2026-01-02T03:04:05",
    duration_s=1.0,
    steps=2,
    versions={"torch": "2.13"},
    settings=(),
    programs=(ROW,),
    spans=SPANS,
    syncs=(),
    fallbacks=(),
    compiles=(),
    memory=Memory(current_bytes=8, samples=((0.0, 0), (0.006, 8))),
    metrics={},
)


def events(recording: Recording = RECORDING) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(chrome_trace(recording))["traceEvents"]
    return found


def of_phase(phase: str, recording: Recording = RECORDING) -> list[dict[str, Any]]:
    return [event for event in events(recording) if event["ph"] == phase]


def test_every_event_has_what_its_phase_needs() -> None:
    needed = {
        "M": {"name", "pid", "args"},
        "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
        "i": {"name", "ts", "pid", "tid", "s"},
        "C": {"name", "ts", "pid", "args"},
        "s": {"name", "cat", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    }
    assert {event["ph"] for event in events()} == set(needed)
    for event in events():
        assert needed[event["ph"]] <= set(event), event


def test_times_are_microseconds_and_in_order() -> None:
    times = [event["ts"] for event in events() if event["ph"] != "M"]
    assert times == sorted(times)
    (copied,) = [event for event in of_phase("X") if event["cat"] == "copy"]
    assert (copied["ts"], copied["dur"]) == (14000.0, 10.0)


def test_a_span_that_holds_another_comes_first() -> None:
    spans = (Span("wait", "user", 0.1, 0.1, 0), Span("read", "user", 0.1, 0.5, 0))
    assert [event["cat"] for event in of_phase("X", replace(RECORDING, spans=spans))] == ["read", "wait"]


def test_lanes_are_threads_with_names_in_order() -> None:
    told = [(event["name"], event.get("tid"), event["args"]) for event in of_phase("M")]
    assert told == [
        ("process_name", None, {"name": "torch_ltc: train.py"}),
        ("thread_name", 100, {"name": "your program"}),
        ("thread_sort_index", 100, {"sort_index": 100}),
        ("thread_name", 200, {"name": "worker: programs run"}),
        ("thread_sort_index", 200, {"sort_index": 200}),
        ("thread_name", 300, {"name": "compiler: programs are made"}),
        ("thread_sort_index", 300, {"sort_index": 300}),
    ]


def test_a_lane_that_is_not_known_gets_a_thread_of_its_own() -> None:
    spans = (*SPANS, Span("run", "second worker", 0.5, 0.1, 1, 7))
    named = {event["args"]["name"]: event["tid"] for event in of_phase("M", replace(RECORDING, spans=spans))[1::2]}
    assert named["second worker"] == 400


def test_spans_say_program_step_bytes_and_line() -> None:
    spans = {(event["name"], event["ts"]): event for event in of_phase("X")}
    assert spans["run program 7", 5000.0]["args"] == {
        "step": 0,
        "program": 7,
        "label": "interpreter",
        "calls": 3,
        "synced at": "/home/me/train.py:12 in main [Net]",
    }
    assert spans["copy item", 14000.0]["args"] == {"step": 0, "label": "item", "bytes": 4}


def test_arrows_lead_from_each_sync_to_its_run() -> None:
    begins = {event["id"]: (event["ts"], event["tid"]) for event in of_phase("s")}
    ends = {event["id"]: (event["ts"], event["tid"]) for event in of_phase("f")}
    assert begins == {1: (3500.0, 100), 2: (20500.0, 100)}
    assert ends == {1: (5000.0, 200), 2: (26000.0, 200)}


def test_programs_that_wait_in_the_queue_run_in_the_order_of_their_syncs() -> None:
    spans = [Span("sync", "user", begin_s, 0.0, 0, 7) for begin_s in (0.1, 0.2)]
    spans += [Span("run", "worker", begin_s, 0.1, 0, 7) for begin_s in (0.3, 0.4)]
    recording = replace(RECORDING, spans=tuple(spans))
    assert [event["ts"] for event in of_phase("s", recording) if event["id"] == 1] == [100000.0]
    assert [event["ts"] for event in of_phase("f", recording) if event["id"] == 1] == [300000.0]


def test_a_run_without_a_sync_has_no_arrow() -> None:
    assert of_phase("s", replace(RECORDING, spans=SPANS[3:4])) == []


def test_steps_are_marks_where_they_begin() -> None:
    assert [(event["name"], event["ts"]) for event in of_phase("i")] == [("step 0", 1000.0), ("step 1", 20000.0)]


def test_memory_is_a_counter() -> None:
    assert [(event["ts"], event["args"]) for event in of_phase("C")] == [(0.0, {"bytes": 0}), (6000.0, {"bytes": 8})]


def test_the_file_says_what_was_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, RECORDING)
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"] == {
        "command": "/home/me/train.py --fast",
        "started": "2026-01-02T03:04:05",
        "steps": "2",
        "dropped_spans": "0",
        "torch": "2.13",
    }


def test_an_empty_recording_is_a_trace_too() -> None:
    empty = replace(RECORDING, spans=(), programs=(), memory=Memory(), command=())
    assert [event["name"] for event in events(empty)] == ["process_name"]


def test_spans_that_overlap_are_drawn_on_threads_of_their_own() -> None:
    spans = (
        Span("record", "user", 0.1, 0.3, 0),
        Span("upload", "user", 0.2, 0.1, 0),
        Span("record", "user", 0.3, 0.4, 0),
        Span("upload", "user", 0.35, 0.05, 0),
        Span("sync", "user", 0.7, 0.1, 0),
    )
    recording = replace(RECORDING, spans=spans)
    assert [event["tid"] for event in of_phase("X", recording)] == [100, 100, 101, 100, 100]
    assert of_phase("M", recording)[3]["args"] == {"name": "your program (2)"}


def test_a_span_does_not_end_after_the_one_that_holds_it() -> None:
    spans = (Span("record", "user", 0.1, 0.1, 0), Span("upload", "user", 0.15, 0.0500005, 0))
    outer, inner = of_phase("X", replace(RECORDING, spans=spans))
    assert outer["tid"] == inner["tid"]
    assert inner["ts"] + inner["dur"] == outer["ts"] + outer["dur"]


def test_the_trace_of_this_process_has_a_run_and_an_arrow_for_a_sync(tmp_path: Path) -> None:
    # Without what all tests before it have left, which takes many seconds to write.
    torch_ltc.sync(wait=True)
    history.clear()
    x = torch.ones(3).to("ltc")
    total = x.exp().sum().item()
    torch_ltc.wait_device_ops()
    path = tmp_path / "trace.json"
    torch_ltc.debug.export_trace(path)
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    times = [event["ts"] for event in found if event["ph"] != "M"]
    assert times == sorted(times)
    assert {"sync", "run"} <= {event["cat"] for event in found if event["ph"] == "X"}
    begins = {event["id"]: event["ts"] for event in found if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in found if event["ph"] == "f"}
    assert begins
    assert begins.keys() == ends.keys()
    assert all(begins[number] <= ends[number] for number in begins)
    assert total > 8
