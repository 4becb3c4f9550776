"""The README of the benchmarks names what the code has, and the tables for the documentation can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.markdown import BEGIN, END, PAGE, block, write
from benchmarks.systems import SYSTEMS, missing_package
from benchmarks.table import render_ratios, render_workload
from benchmarks.workloads import WORKLOADS

README = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text()


def quartiles(value):
    return {"median": value, "q1": value, "q3": value}


def results():
    eager = {"status": "ok", "step_s": quartiles(0.01), "ratio": quartiles(1.0), "cpu_ratio": quartiles(1.0)}
    ltc = {"status": "ok", "step_s": quartiles(0.005), "ratio": quartiles(0.5), "cpu_ratio": quartiles(0.6)}
    ltc.update(record_s=quartiles(0.001), operations=100, first_step_s=0.02, worst_later_step_s=0.03)
    ltc.update(compiles=2, steady_peak_bytes=3 * 2**20, settled=False, agrees=False, refused=4)
    failed = {"status": "failed", "reason": "it broke"}
    return {
        "format": 1,
        "machine": {"device": "CPU", "torch": "2.13", "python": "3.11", "processor": "none", "cores": 2},
        "options": {"rounds": 3, "read_every": 1},
        "systems": ["eager", "original", "ltc-inductor"],
        "titles": {"c": "an MLP"},
        "workloads": {"c": {"eager": eager, "original": failed, "ltc-inductor": ltc}},
    }


@pytest.mark.parametrize("name", SYSTEMS)
def test_readme_names_the_system(name):
    assert f"`{name}`" in README


@pytest.mark.parametrize("key", WORKLOADS)
def test_readme_names_the_workload(key):
    assert f"\n| {key} | " in README


def test_table_of_a_workload():
    text = render_workload("c: an MLP", results()["workloads"]["c"])
    # ruff: noqa: E501
    head = "system        step ms    /eager (q1-q3)  cpu/eager  record ms  ops  us/op  first ms  worst ms  compiles  peak MB"
    eager = "eager              10  1.00 (1.00-1.00)       1.00          -    -      -         -         -         -        -"
    ltc = "ltc-inductor        5  0.50 (0.50-0.50)       0.60          1  100   10.0        20        30         2        3"
    remark = "  WRONG VALUES, still compiling, 4 refused"
    assert text.splitlines() == ["c: an MLP", head, eager, ltc + remark, "original: failed: it broke"]


def test_table_of_ratios_has_no_mean_without_all_workloads():
    assert render_ratios(results()).splitlines() == [
        "step time / eager  original  ltc-inductor",
        "c: an MLP                 -          0.50",
    ]


def test_tables_are_written_between_the_marks():
    page = write(f"before\n{BEGIN}\nold\n{END}\nafter\n", block(results()))
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| c: an MLP | - | 0.50 |" in page
    assert "original: failed: it broke" in page
    with pytest.raises(ValueError, match="lacks the lines"):
        write("no marks", "text")


def test_ratios_with_another_number_of_threads_stand_beside_those_with_one():
    threaded = results()
    threaded["options"]["threads"] = 0
    threaded["workloads"]["c"]["ltc-inductor"]["ratio"] = quartiles(0.75)
    text = block(results(), threaded)
    suffix = "PyTorch's number of threads"
    assert f"| step time / eager | original | ltc-inductor | original, {suffix} | ltc-inductor, {suffix} |" in text
    assert "| c: an MLP | - | 0.50 | - | 0.75 |" in text


def test_page_of_the_documentation_has_the_marks():
    text = PAGE.read_text()
    assert text.index(BEGIN) < text.index(END)


def test_missing_package_says_which():
    assert missing_package("eager") is None
    reason = missing_package("torch_xla")
    assert reason is None or "torch_xla" in reason
