"""The history keeps what happened within bounds, and gives it as plain values."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_ltc
from tests.support import recordings
from tests.support.backends import FunctionalBackend, registered
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.debug import history as module
from torch_ltc.debug.history import History, history
from torch_ltc.debug.recording import FORMAT, Recording, Span, from_json
from torch_ltc.errors import RecordingError
from torch_ltc.events import FallbackEvent, SyncEvent, SyncReason, UploadEvent
from torch_ltc.source import Source

pytestmark = pytest.mark.blocking_tiers


def train(steps: int, sizes: tuple[int, ...] = (4,)) -> None:
    net = nn.Linear(3, 2).to("ltc")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.ones(sizes[step % len(sizes)], 3).to("ltc")
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch_ltc.sync(wait=True)


def test_programs_have_their_figures() -> None:
    train(5)
    recording = history.recording()
    last = recording.programs[-1]
    assert sum(row.syncs for row in recording.programs) == sum(row.runs for row in recording.programs) >= 5
    assert recording.steps == 5
    assert (last.reason, last.failed, last.refused) == ("optimizer", 0, "")
    assert last.compiles == 1
    assert 0 < last.interpreted < last.runs
    assert last.backend == "torchscript"
    assert min(last.record_s, last.run_s, last.compile_s) > 0
    assert last.interpreted_s < last.run_s
    assert last.calls == sum("aten::" in line.text for line in last.lines)
    assert {Path(line.source.file).name for line in last.lines} == {Path(__file__).name}


def test_spans_lie_where_their_work_was_done() -> None:
    train(3)
    (torch.ones(2).to("ltc") + 1).nonzero()
    (torch.ones(2).to("ltc") + 1).cpu()
    spans = history.recording().spans
    lanes = {span.kind: span.lane for span in spans}
    assert lanes["record"] == lanes["sync"] == lanes["upload"] == lanes["copy"] == lanes["fallback"] == "user"
    assert lanes["run"] == "worker"
    assert lanes["compile"] == "compiler"
    assert [span.step for span in spans if span.kind == "record"][:3] == [0, 1, 2]
    assert all(span.begin_s >= -1e-3 and span.duration_s >= 0 for span in spans)
    assert {span.size_bytes for span in spans if span.kind == "upload"} >= {48, 8}
    assert [span.size_bytes for span in spans if span.kind == "copy"] == [8]


def test_records_and_syncs_of_one_program_follow_each_other() -> None:
    train(1)
    spans = [span for span in history.recording().spans if span.program]
    by_kind = {span.kind: span for span in spans if span.program == spans[-1].program}
    record, sync = by_kind["record"], by_kind["sync"]
    assert record.begin_s + record.duration_s == pytest.approx(sync.begin_s, abs=1e-4)


def test_explicit_syncs_are_steps_where_no_optimizer_is() -> None:
    for _ in range(3):
        _ = torch.ones(2).to("ltc") + 1
        torch_ltc.sync()
    assert history.recording(texts=False).steps == 3
    train(2)
    assert history.recording(texts=False).steps == 2


def test_fallbacks_are_counted_by_line_and_operator() -> None:
    x = torch.ones(3).to("ltc")
    for _ in range(3):
        x.nonzero()
        x[x > 0]
    rows = {row.op: row for row in history.recording(texts=False).fallbacks}
    assert rows["aten::nonzero"].count == 3
    assert rows["aten::index.Tensor"].count == 3
    assert rows["aten::nonzero"].source.line + 1 == rows["aten::index.Tensor"].source.line
    assert rows["aten::nonzero"].total_s > 0


def test_a_refusal_is_kept_with_its_program() -> None:
    class Refuses(FunctionalBackend):
        name = "refuses"

        def compile(self, program: object) -> object:
            raise ValueError("not today")

    x = torch.ones(3).to("ltc")
    with registered(Refuses()), settings.scope(backend="refuses"), pytest.warns(torch_ltc.errors.BackendWarning):
        for _ in range(3):
            (x * 2).sum().item()
        torch_ltc.sync(wait=True)
    refused = [row for row in history.recording(texts=False).programs if row.refused]
    assert len(refused) == 1
    assert "not today" in refused[0].refused


def test_memory_is_sampled_at_every_run() -> None:
    own = History()
    x = torch.ones(3).to("ltc")
    for _ in range(5):
        (x * 2).sum().item()
    samples = own.recording(texts=False).memory.samples
    assert len(samples) == 5
    assert [at for at, _ in samples] == sorted(at for at, _ in samples)


def test_spans_are_bounded_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SPANS", 10)
    own = History()
    for _ in range(25):
        own._on_upload(0.0, 4, 0.1, None)
    recording = own.recording(texts=False)
    assert (len(recording.spans), recording.dropped_spans) == (10, 15)


def add_sync(own: History, event: SyncEvent) -> None:
    own._on_sync(time.perf_counter(), *[getattr(event, field.name) for field in dataclasses.fields(event)])


def sync_event(program: int, line: int = 1) -> SyncEvent:
    return SyncEvent(SyncReason.READ, 3, 1, 1, program, False, 0.1, Source("a.py", line, "f"), 0.2)


def test_programs_are_bounded_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PROGRAMS", 5)
    own = History()
    for program in range(12):
        add_sync(own, sync_event(program))
    recording = own.recording(texts=False)
    assert [row.identity for row in recording.programs] == [7, 8, 9, 10, 11]
    assert recording.dropped_programs == 7


def test_old_texts_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_INSTRUCTIONS", 12)
    for count in range(2, 7):
        x = torch.ones(2).to("ltc")
        for _ in range(count):
            x = x + 1
        torch_ltc.sync(wait=True)
    rows = history.recording().programs
    assert rows[-1].lines
    assert not rows[0].lines
    assert sum(len(row.lines) for row in rows) <= 12
    assert all(row.syncs == 1 for row in rows)


def test_lines_are_bounded_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SITES", 3)
    own = History()
    for line in range(10):
        add_sync(own, sync_event(1, line))
    # The same line, found anew.
    add_sync(own, sync_event(1, 0))
    rows = own.recording(texts=False).syncs
    assert sum(row.count for row in rows) == 11
    assert len(rows) == 4


def test_equal_lines_are_one_row() -> None:
    own = History()
    add_sync(own, sync_event(1))
    add_sync(own, sync_event(2))
    own._on_read(time.perf_counter(), "item", 4, 0.3, Source("a.py", 1, "f"), 0.1)
    own._on_read(time.perf_counter(), "item", 4, 0.3, Source("a.py", 1, "f"), 0.0)
    own._on_fallback(FallbackEvent("aten::x", "why", Source("a.py", 1, "f"), 0.5))
    own._on_fallback(FallbackEvent("aten::x", "why", Source("a.py", 1, "f"), 0.25))
    recording = own.recording(texts=False)
    sync, read = recording.syncs
    assert (sync.count, sync.programs, sync.wait_s) == (2, (1, 2), pytest.approx(0.4))
    assert (read.count, read.size_bytes, read.wait_s) == (2, 8, pytest.approx(0.6))
    assert [(row.count, row.total_s) for row in recording.fallbacks] == [(2, 0.75)]


def test_a_recording_survives_json() -> None:
    train(4, (4, 4, 5, 5))
    str(torch.ones(2).to("ltc") + 1)
    recording = history.recording()
    text = recording.to_json()
    assert json.loads(text)["format"] == FORMAT
    assert from_json(text) == Recording(**{name: getattr(recording, name) for name in recording.__dataclass_fields__})
    assert isinstance(from_json(text).spans[0], Span)
    # Backward calls share forward lines, and programs share lines.
    rows = json.loads(text)["sources"]
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows) < 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "run.json is not JSON"),
        ("[]", "run.json is no recording of torch_ltc"),
        ('{"format": 99}', "run.json has format 99, this version reads"),
        (f'{{"format": {FORMAT}, "spans": 3}}', "run.json is damaged"),
    ],
)
def test_what_is_no_recording_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        from_json(text, "run.json")


def test_a_recording_of_the_version_before_is_read() -> None:
    made = recordings.recording(compiles=(recordings.compilation(1, out_of_process=True),))
    older = made.to_json().replace('"out_of_process"', '"elsewhere"')
    assert '"elsewhere":true' in older
    assert from_json(older) == made


def test_it_can_be_switched_off_and_on() -> None:
    history.stop()
    try:
        train(2)
        assert history.recording(texts=False).programs == ()
    finally:
        history.listen()
    train(2)
    assert history.recording(texts=False).steps == 2


def test_recordings_are_taken_while_other_threads_work() -> None:
    failures: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                history.recording().to_json()
            except BaseException as error:
                failures.append(error)
                return

    looker = threading.Thread(target=look)
    looker.start()
    try:
        train(30, (2, 3, 4, 5, 6))
    finally:
        done.set()
        looker.join()
    assert failures == []


def test_a_user_may_listen_too() -> None:
    seen: list[object] = []
    stop = events.subscribe(seen.append, SyncEvent, UploadEvent)
    try:
        (torch.ones(2).to("ltc") + 1).sum().item()
    finally:
        stop()
    assert [type(one) for one in seen] == [UploadEvent, SyncEvent]
    sync = seen[1]
    assert isinstance(sync, SyncEvent)
    assert sync.source is not None
    assert Path(sync.source.file).name == Path(__file__).name
