"""Ranks that differ, die, or do not come: an error on every rank that is left, in time, and no process left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.processes import Ended, run_ranks

pytestmark = pytest.mark.distributed


def play(folder: Path, scene: str, *, check: int = 1, timeout_s: float = 60) -> list[Ended]:
    """What became of two ranks."""
    arguments = ("--timeout-s", str(timeout_s), "--check", str(check), scene)
    return run_ranks(folder, 2, "tests.distributed.failing_rank", *arguments, timeout_s=300)


def test_different_shapes_raise_on_every_rank(tmp_path: Path) -> None:
    for rank in play(tmp_path, "different_shapes"):
        assert rank.status == 3, rank.errors
        assert "RankMismatchError: ranks 0 and 1 of the process group '0'" in rank.output
        assert "rank 0: allreduce_([float32[4]], '0', 0, -1)" in rank.output
        assert "rank 1: allreduce_([float32[5]], '0', 0, -1)" in rank.output
        assert rank.output.count("failing_rank.py:") >= 2
        assert " in step" in rank.output


def test_different_collectives_raise_on_every_rank(tmp_path: Path) -> None:
    for rank in play(tmp_path, "different_operators"):
        assert rank.status == 3, rank.errors
        assert "rank 0: allreduce_([float32[4]]" in rank.output
        assert "rank 1: broadcast_([float32[4]]" in rank.output
        assert len(set(re.findall(r"failing_rank.py:\d+ in different_operators", rank.output))) == 2


@pytest.mark.parametrize("check", [0, 1])
def test_the_death_of_a_rank_raises_on_the_other(tmp_path: Path, check: int) -> None:
    left, dead = play(tmp_path, "crash", check=check)
    assert dead.status == 7
    assert left.status == 3, left.errors
    # The last line is where the collective was recorded.
    assert "the remote worker" in left.output
    assert "failing_rank.py" in left.output.splitlines()[-1]


@pytest.mark.parametrize("check", [0, 1])
def test_a_rank_that_does_not_come_in_time_raises(tmp_path: Path, check: int) -> None:
    waiting, late = play(tmp_path, "silence", check=check, timeout_s=15)
    assert waiting.status == 3, waiting.errors
    assert "Timed out waiting 15000ms" in waiting.output
    assert late.status == 3, late.errors


def test_a_rank_that_never_joins_raises(tmp_path: Path) -> None:
    waiting, _ = play(tmp_path, "absence", timeout_s=5)
    assert waiting.status == 3, waiting.errors
    assert "imeout" in waiting.output or "imed out" in waiting.output


def test_batch_norm_over_ranks_is_refused_on_the_cpu(tmp_path: Path) -> None:
    for rank in play(tmp_path, "sync_batch_norm"):
        assert "GroupError: SyncBatchNorm needs kernels that PyTorch has for GPUs alone" in rank.output


def test_what_ranks_may_do_otherwise_is_no_difference(tmp_path: Path) -> None:
    for rank in play(tmp_path, "unlike"):
        assert rank.status == 0, rank.output + rank.errors
