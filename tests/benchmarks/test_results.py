"""What is made of samples: ratios round by round, medians, agreement with eager, and the file."""

from __future__ import annotations

import pytest

from benchmarks.results import agree, geometric_mean, load, quartiles, ratio, ratios, save, summarise


def samples(*seconds, first=0):
    return {
        "status": "ok",
        "rounds": [{"round": first + turn, "step_s": value, "cpu_s": value} for turn, value in enumerate(seconds)],
    }


def test_ratio_is_taken_within_a_round_before_the_median():
    # Over all rounds the medians are equal; within each round the system takes twice as long.
    eager = samples(1.0, 10.0, 2.0)
    system = samples(2.0, 20.0, 4.0)
    assert ratio({"eager": eager, "system": system}, "system", "eager") == 2.0
    shuffled = samples(20.0, 2.0, 4.0)
    assert ratios(shuffled, eager, "step_s") == [20.0, 0.2, 2.0]


def test_rounds_that_one_side_lacks_are_left_out():
    assert ratios(samples(3.0, 3.0, first=1), samples(1.0, 2.0), "step_s") == [1.5]


def test_ratio_without_samples_is_none():
    assert ratio({"eager": samples(1.0)}, "original", "eager") is None


def test_record_time_may_be_compared_with_another_quantity():
    system = {"rounds": [{"round": 0, "step_s": 9.0, "record_s": 3.0}, {"round": 1, "step_s": 9.0, "record_s": None}]}
    assert ratios(system, samples(2.0, 2.0), "record_s", "step_s") == [1.5]


def test_quartiles_of_few_samples():
    assert quartiles([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0}
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
    assert geometric_mean([]) is None


def test_agreement_notices_a_wrong_value():
    assert agree([1.0, 2.001], [1.0, 2.0])
    assert not agree([1.0, 2.1], [1.0, 2.0])
    assert not agree([float("nan")], [1.0])


def test_summary_has_first_and_worst_step_ratio_and_agreement():
    eager = {**samples(1.0, 1.0, 1.0), "starts_s": [4.0, 2.0, 3.0], "first_steps_s": [4.0, 1.0], "values": [1.0]}
    system = {**samples(3.0, 1.0, 2.0), "starts_s": [9.0], "first_steps_s": [9.0, 1.0, 7.0], "values": [5.0]}
    summarise({"eager": eager, "system": system})
    assert eager["first_step_s"] == 3.0
    assert system["worst_later_step_s"] == 7.0
    assert system["ratio"] == {"median": 2.0, "q1": 1.5, "q3": 2.5}
    assert system["record_s"] is None
    assert (eager["agrees"], system["agrees"]) == (True, False)


def test_summary_of_a_system_that_failed_adds_nothing():
    failed = {"status": "failed", "reason": "it broke"}
    summarise({"eager": samples(1.0), "system": failed})
    assert failed == {"status": "failed", "reason": "it broke"}


def test_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "results.json"
    save(path, {"format": 1, "workloads": {}})
    assert load(path)["workloads"] == {}
    save(path, {"format": 0})
    with pytest.raises(ValueError, match="format 0"):
        load(path)
