"""Ranks that differ, die, or do not come: an error on every rank that is left, in time, and no process left behind."""

from __future__ import annotations

import re
import subprocess
import sys
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


def test_a_rank_that_joins_late_is_waited_for(tmp_path: Path) -> None:
    for rank in play(tmp_path, "late"):
        assert rank.status == 0, rank.output + rank.errors


def test_a_rank_that_joins_when_the_others_have_given_up_raises(tmp_path: Path) -> None:
    for rank in play(tmp_path, "too_late", timeout_s=5):
        assert rank.status == 3, rank.output + rank.errors
        assert re.search("[Tt]imed? ?out|refused|closed|reset", rank.output), rank.output


TORCHRUN = """
import os, signal, sys, time, torch, torch_ltc
import torch.distributed as dist

dist.init_process_group("ltc")
rank = dist.get_rank()
with open(f"{sys.argv[1]}/pid.{rank}", "w") as file:
    file.write(str(os.getpid()))
x = torch.ones(4, device="ltc")
for step in range(1000):
    dist.all_reduce(x)
    x = x / 2
    assert x.tolist() == [1.0] * 4
    if rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_under_torchrun_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    for rank in range(2):
        assert not Path("/proc", (tmp_path / f"pid.{rank}").read_text()).exists()


def test_batch_norm_over_ranks_is_refused_on_the_cpu(tmp_path: Path) -> None:
    for rank in play(tmp_path, "sync_batch_norm"):
        assert "GroupError: SyncBatchNorm needs kernels that PyTorch has for GPUs alone" in rank.output


def test_what_ranks_may_do_otherwise_is_no_difference(tmp_path: Path) -> None:
    for rank in play(tmp_path, "unlike"):
        assert rank.status == 0, rank.output + rank.errors
