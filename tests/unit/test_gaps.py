"""Gaps between runs, and what the user's thread did in them."""

from __future__ import annotations

from dataclasses import replace

from tests.support.recordings import recording
from torch_ltc.debug.gaps import Gap, busy_s, gaps, gaps_text, worker_gaps
from torch_ltc.debug.recording import Span
from torch_ltc.debug.report.compact import compact


def test_gaps_lie_between_runs_that_do_not_touch() -> None:
    intervals = [(5.0, 6.0), (0.0, 1.0), (0.5, 2.0), (2.0, 3.0), (6.0001, 7.0)]
    assert gaps(intervals) == [Gap(3.0, 2.0)]
    assert gaps(intervals, least_s=0.0) == [Gap(3.0, 2.0), Gap(6.0, 6.0001 - 6.0)]
    assert busy_s(intervals) == 3.0 + 1.0 + (7.0 - 6.0001)


def test_a_run_inside_another_makes_no_gap() -> None:
    assert gaps([(0.0, 4.0), (1.0, 2.0), (4.0, 5.0)]) == []
    assert gaps([]) == []


def test_gaps_of_a_recording_say_what_the_users_thread_did() -> None:
    spans = (
        Span("run", "worker", 0.0, 1.0, 0, 1),
        Span("record", "user", 0.5, 1.4, 1, 1),
        Span("sync", "user", 1.9, 0.1, 1, 1),
        Span("run", "worker", 2.0, 1.0, 1, 1),
        Span("record", "user", 3.0, 0.1, 2, 1),
        Span("run", "worker", 4.0, 1.0, 2, 1),
        Span("compile", "compiler", 1.0, 1.0, 0, 1),
    )
    made = replace(recording(), spans=spans)
    found = worker_gaps(made)
    assert found == [Gap(1.0, 1.0, "record"), Gap(3.0, 1.0, "")]
    text = "2 gaps between runs longer than 200 us, 2.00 s in all, the longest 1.00 s: 1 in record, 1 in other code"
    assert gaps_text(found) == text
    assert compact(made, ())["gaps"] == text
    assert gaps_text([]) == ""
