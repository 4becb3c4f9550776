"""Training on several ranks: to the bit what the same ranks compute on tensors of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import CASES, STEPS, UNUSED
from tests.distributed.processes import run_ranks
from torch_ltc.native.library import extension

QUICK = "ddp_mlp"
Found = list[dict[str, Any]]


def _run(folder: Path, size: int, cases: list[str], timeout_s: float) -> Found:
    """What each rank found of each case."""
    ended = run_ranks(folder, size, "tests.distributed.rank", *cases, timeout_s=timeout_s)
    failed = [f"rank {rank}: {one.status}\n{one.errors[-3000:]}" for rank, one in enumerate(ended) if one.status != 0]
    assert not failed, "\n".join(failed)
    return [json.loads(one.output.splitlines()[-1]) for one in ended]


def _check_values(case: dict[str, Any]) -> None:
    assert case["differences"] == []
    assert case["distances"] == []
    assert case["fallbacks"] == []


def _check_steps(case: dict[str, Any]) -> None:
    # DDP makes its buckets before the first step, and anew in the second, and reads then how they are made.
    syncs = case["syncs"]
    steps = [position for position, (reason, _) in enumerate(syncs) if reason == "OPTIMIZER"]
    assert len(steps) == STEPS
    later = syncs[steps[1] + 1 : steps[-1] + 1]
    assert [reason for reason, _ in later] == ["OPTIMIZER"] * (STEPS - 2), "one program a step"
    assert all(known for _, known in later[1:]), "no new program after the third step"
    assert case["late_compiles"] == 0


def test_ddp_trains_as_on_the_cpu(tmp_path: Path) -> None:
    for rank in _run(tmp_path, 2, [QUICK], 120):
        _check_values(rank[QUICK])
        _check_steps(rank[QUICK])


@pytest.mark.distributed
def test_ranks_may_have_unequal_numbers_of_batches(tmp_path: Path) -> None:
    for rank in _run(tmp_path, 2, ["ddp_join"], 200):
        assert rank["ddp_join"]["differences"] == []


@pytest.mark.distributed
@pytest.mark.skipif(extension is None, reason="the reducer asks the extension for pinned memory")
def test_ddp_finds_unused_parameters(tmp_path: Path) -> None:
    for rank in _run(tmp_path, 2, list(UNUSED), 200):
        for name in UNUSED:
            # Which parameters others did not use is read, in the steps that need it.
            assert rank[name]["differences"] == []
            assert rank[name]["fallbacks"] == []


@pytest.mark.distributed
@pytest.mark.skipif(extension is not None, reason="works with the extension")
def test_unused_parameters_are_refused_without_the_extension(tmp_path: Path) -> None:
    for rank in run_ranks(tmp_path, 2, "tests.distributed.rank", "ddp_unused"):
        assert "GroupError: DistributedDataParallel with find_unused_parameters" in rank.errors


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases on so many ranks."""
    return _run(tmp_path_factory.mktemp("ranks"), request.param, list(CASES), 1500)


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_training_is_as_on_the_cpu(found: Found, name: str) -> None:
    for rank in found:
        _check_values(rank[name])


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_one_program_that_is_known_after_the_third(found: Found, name: str) -> None:
    for rank in found:
        _check_steps(rank[name])


@pytest.mark.distributed
def test_the_order_of_gradients_decides_the_last_bits_of_sums_over_four_ranks(found: Found) -> None:
    for rank in found:
        # Two runs in eager, which differ in nothing but the order in which gradients become ready.
        assert bool(rank["ddp_views"]["differences_by_order"]) == (len(found) > 2)
        assert rank["ddp_views"]["differences_from_plain"] == rank["ddp_views"]["differences_by_order"]


@pytest.mark.distributed
@pytest.mark.compilers
def test_ranks_whose_programs_inductor_compiles_train_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each rank compiles in its own time, and runs the programs call by call until then.
    monkeypatch.setenv("LTC_BACKEND", "inductor")
    for rank in _run(tmp_path, 2, ["ddp_many"], 500):
        assert "inductor" in rank["ddp_many"]["backends"]
        assert rank["ddp_many"]["distances"] == []
        assert rank["ddp_many"]["fallbacks"] == []
