"""The benchmark on a GPU, tried without one: a failing system is reported, results are merged, the table is made."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest

from benchmarks import gpu
from benchmarks.children import WorkerError
from benchmarks.gpu_workloads import GPU_WORKLOADS
from benchmarks.markdown import GPU_BEGIN, GPU_END, GPU_PAGES, GPU_SYSTEMS, gpu_block, gpu_table, write
from benchmarks.results import equal_steps, summarise
from benchmarks.systems import SYSTEMS


class StandIn:
    """A worker of known speed; one of a system without a speed fails."""

    step_ms: ClassVar[dict[str, float]] = {"eager": 10.0, "ltc-jit": 5.0}
    left: ClassVar[list[str]] = []

    def __init__(self, system: str, workload: str, cache: object, **options: object) -> None:
        self.system = system
        StandIn.left.append(system)

    def ask(self, do: str, **request: object) -> dict[str, Any]:
        if self.system not in self.step_ms:
            raise WorkerError(f"{do} failed")
        step_s = self.step_ms[self.system] / 1e3
        return {
            "build": {"build_s": 1.0},
            "first": {"step_s": [1.0, step_s], "compiling": [False, False], "values": [3.0, 2.0]},
            "settle": {"settled": True, "step_s": step_s},
            "run": {"step_s": step_s, "cpu_s": step_s, "record_s": None, "record_cpu_s": None},
            "report": {"device_reserved_bytes": 2**30, "remarks": ["a remark"]},
        }[do]

    def close(self) -> None:
        StandIn.left.remove(self.system)


def measured(monkeypatch: pytest.MonkeyPatch, systems: tuple[str, ...]) -> dict[str, Any]:
    monkeypatch.setattr(gpu, "Child", StandIn)
    figures = gpu.measure("small-sgd", systems, gpu.Plan(2, 2, "cpu", time.monotonic(), 60.0))
    summarise(figures)
    return figures


def test_failing_system_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(monkeypatch, ("eager", "compile", "ltc-jit"))
    assert list(figures) == ["eager", "compile", "ltc-jit"]
    assert figures["compile"] == {"status": "failed", "reason": "build failed"}
    assert figures["ltc-jit"]["ratio"]["median"] == 0.5
    assert figures["ltc-jit"]["equal_steps"] == 2
    assert StandIn.left == []


def test_table_has_times_ratios_memory_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(monkeypatch, ("eager", "compile", "ltc-jit"))
    results = gpu.results_so_far(gpu.RESULTS / "no such file", "a GPU", merge=True)
    gpu.merge_figures(results, "one", "training", figures)
    gpu.merge_figures(results, "two", "decoding", {name: figures[name] for name in ("eager", "ltc-jit")})
    results["options"] = {"rounds": 2, "read_every": 10}
    assert gpu_table(results).splitlines() == [
        "|  | training: ms, / eager, memory | decoding: tokens/s, / eager, memory |",
        "|---|---|---|",
        "| eager | 10, 1.00, 1.00 | 100, 1.00, 1.00 |",
        "| `torch.compile` | failed | - |",
        "| `torch_ltc.jit`, eager's kernels | 5, 0.50, 1.00 | 200, 0.50, 1.00 |",
    ]
    assert "a GPU" in write(f"{GPU_BEGIN}\n{GPU_END}", gpu_block(results), GPU_BEGIN, GPU_END)


def test_merging_replaces_what_was_measured_again_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    results = gpu.results_so_far(gpu.RESULTS / "no such file", "a GPU", merge=False)
    gpu.merge_figures(results, "one", "training", {"ltc-jit": {"status": "ok"}, "compile": {"status": "ok"}})
    gpu.merge_figures(results, "one", "training", {"eager": {"status": "ok"}, "compile": {"status": "failed"}})
    assert results["workloads"]["one"] == {
        "eager": {"status": "ok"},
        "compile": {"status": "failed"},
        "ltc-jit": {"status": "ok"},
    }
    assert results["systems"] == ["eager", "compile", "ltc-jit"]


def test_systems_and_workloads_are_known() -> None:
    assert sorted(gpu.SYSTEMS) == sorted(gpu.SHOWN)
    assert set(gpu.SHOWN) <= set(SYSTEMS)
    assert set(gpu.SHOWN) <= set(GPU_SYSTEMS)
    assert set(gpu.WORKLOADS) <= set(GPU_WORKLOADS)


@pytest.mark.parametrize("page", GPU_PAGES, ids=lambda page: page.name)
def test_pages_have_a_place_for_the_table(page: Any) -> None:
    text = page.read_text()
    assert text.index(GPU_BEGIN) < text.index(GPU_END)


def test_equal_steps_are_counted_to_the_first_difference() -> None:
    assert equal_steps([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.5, 4.0]) == 2


def test_workers_replay_and_capture_by_hand_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(gpu.RESULTS.parents[1])
    monkeypatch.setenv("PYTHONPATH", "src")
    plan = gpu.Plan(1, 2, "cpu", time.monotonic(), 240.0, sample_s=0.05, first_steps=6)
    figures = gpu.measure("small-sgd", ("eager", "eager-graph", "ltc-jit"), plan)
    summarise(figures)
    for name in ("eager", "eager-graph", "ltc-jit"):
        assert figures[name]["status"] == "ok", figures[name]
        assert figures[name]["settled"]
        assert figures[name]["agrees"]
    # It says so when nothing is replayed.
    assert figures["ltc-jit"]["remarks"] == []
