"""Bars: what passes, what fails, and that a missing figure never passes."""

from __future__ import annotations

import copy

import pytest

from benchmarks.bars import BARS, judge, render, slow_steps


def figures(seconds, **others):
    rounds = [{"round": turn, "step_s": seconds, "cpu_s": seconds, "record_s": seconds / 10} for turn in range(3)]
    return {"status": "ok", "rounds": rounds, "record_s": {"median": seconds / 10}, **others}


def results(inductor=0.2, torchscript=0.5, **others):
    """Results in which the backends take these seconds, eager 1, the original 2 and torch.compile 0.5."""
    common = {
        "first_step_s": 1.5,
        "first_steps_s": [2.0, 1.0, 1.0, 1.0],
        "compiling": [True, False, False, False],
        "compiles": 1,
        "settled": True,
        "steady_peak_bytes": 100,
        "second_compiles": 0,
        "operations": 7,
        **others,
    }
    systems = {
        "eager": figures(1.0, first_step_s=1.0, steady_peak_bytes=100),
        "original": figures(2.0),
        "compile": figures(0.5),
        "compile-optimizer": figures(0.4),
        "ltc-torchscript": figures(torchscript, **common),
        "ltc-inductor": figures(inductor, **common),
        "ltc-jit-inductor": figures(inductor),
    }
    keys = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "tiny", "rate")
    adds = {"ratio": 0.5, "torch_ltc_us": 2.0, "original_us": 4.0}
    return {"workloads": {key: copy.deepcopy(systems) for key in keys}, "adds": adds}


def verdict(title, measured):
    return next(found for found in judge(measured) if found.bar.title.startswith(title))


def test_good_figures_pass_every_bar():
    assert [found.bar.title for found in judge(results()) if not found.passed] == []


def test_without_figures_nothing_passes():
    assert not any(found.passed for found in judge({"workloads": {}}))


@pytest.mark.parametrize(
    ("title", "changes"),
    [
        ("steady step on inductor / eager", {"inductor": 0.8}),
        ("steady step on inductor / original", {"inductor": 0.8}),
        ("steady step on inductor / torch.compile", {"inductor": 0.45}),
        ("steady step on torchscript / original", {"torchscript": 1.5}),
        ("record the tiny transformer step / original's trace", {"torchscript": 1.0}),
        ("first step / eager's first", {"first_step_s": 2.5}),
        ("later steps over 3 medians", {"first_steps_s": [1.0, 9.0, 1.0, 1.0], "compiling": [False, True] * 2}),
        ("compiles, j", {"compiles": 5}),
        ("compiles, i", {"compiles": 5}),
        ("compiles, Adam", {"compiles": 5}),
        ("peak memory / eager", {"steady_peak_bytes": 120}),
        ("compiles of a second process", {"second_compiles": 1}),
    ],
)
def test_bar_fails_on_a_bad_figure(title, changes):
    assert verdict(title, results()).passed
    found = verdict(title, results(**changes))
    assert found.figure.value is not None
    assert not found.passed


def test_torch_compile_counts_in_its_faster_form():
    found = verdict("steady step on inductor / torch.compile", results(inductor=0.2))
    assert found.figure.value == pytest.approx(0.5)


def test_the_worst_workload_decides():
    measured = results()
    slow = {**measured["workloads"]["f"]["ltc-inductor"], "first_step_s": 3.0}
    measured["workloads"]["f"]["ltc-inductor"] = slow
    found = verdict("first step / eager's first, worst workload [inductor]", measured)
    assert found.figure.value == 3.0
    assert not found.passed


def test_mean_leaves_out_what_the_other_system_cannot_run_and_says_so():
    measured = results()
    measured["workloads"]["d"]["original"] = {"status": "failed", "reason": "memory"}
    found = verdict("steady step on inductor / original", measured)
    assert found.passed
    assert "without d" in found.figure.detail


@pytest.mark.parametrize("title", ["steady step on inductor / original", "steady step on inductor / eager"])
def test_mean_over_a_part_does_not_pass(title):
    measured = results()
    measured["workloads"]["d"]["ltc-inductor"] = {"status": "failed", "reason": "ours broke"}
    assert verdict(title, measured).word == "part"
    assert not verdict(title, measured).passed
    del measured["workloads"]["e"]
    assert "without d, e" in verdict(title, measured).figure.detail


def test_worst_of_a_part_does_not_pass():
    measured = results()
    del measured["workloads"]["c"]["ltc-inductor"]["steady_peak_bytes"]
    assert verdict("peak memory / eager, worst of b to h [inductor]", measured).word == "part"
    assert verdict("peak memory / eager, worst of b to h [torchscript]", measured).word == "pass"


def test_compiles_of_a_system_that_failed_are_no_figure_but_a_reason():
    measured = results()
    measured["workloads"]["i"]["ltc-inductor"] = {"status": "failed", "reason": "no answer within 60 s"}
    found = verdict("compiles, i: generation of 64 tokens [inductor]", measured)
    assert not found.passed
    assert found.figure.detail == "no answer within 60 s"


def test_slow_step_counts_only_during_a_compile():
    steps = [5.0, 1.0, 9.0, 1.0, 9.0, 1.0, 1.0]
    assert slow_steps({"first_steps_s": steps, "compiling": [True, False, True, False, False, True, False]}) == 1.0
    assert slow_steps({"first_steps_s": [1.0, 1.0], "compiling": [False, False]}) is None


def test_table_has_a_line_for_every_bar():
    lines = render(judge(results())).splitlines()
    assert len(lines) == len(BARS) + 2
    assert lines[-1] == f"{len(BARS)} of {len(BARS)} bars pass"
