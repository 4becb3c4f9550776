"""accelerate, transformers, Lightning and Ray Train on two processes: to the bit what they compute on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1300)]
# Workers that import PyTorch on a busy machine need longer than Ray waits by itself.
RAY = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "600"}
Found = dict[str, list[dict[str, Any]]]


def run(folder: Path, *command: str) -> None:
    """Run a command in the environment of these tests, and show what it wrote when it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **RAY}
    done = subprocess.run(
        [sys.executable, *command, str(folder)], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def read(folder: Path) -> Found:
    """What the two ranks have written on each device."""
    return {device: [torch.load(folder / f"{device}.{rank}.pt") for rank in range(2)] for device in ("cpu", "ltc")}


def assert_equal(found: Found) -> None:
    """All tensors of all ranks are those of the CPU."""
    for one, other in zip(found["ltc"], found["cpu"], strict=True):
        tensors = {name: value for name, value in one.items() if isinstance(value, torch.Tensor)}
        assert tensors
        for name, value in tensors.items():
            torch.testing.assert_close(
                value, other[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("what", ["accelerator", "trainer"])
def test_accelerate_launch_trains_as_on_the_cpu(tmp_path: Path, what: str) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    # Without a GPU accelerate starts several processes for this flag alone.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    for device in ("cpu", "ltc"):
        run(tmp_path, *launch, *options, "-m", "tests.ecosystem.rank_accelerate", what, device)
    found = read(tmp_path)
    assert_equal(found)
    assert [one["device"] for one in found["ltc"]] == ["ltc:0", "ltc:1"]
    assert [one["model"] for one in found["ltc"]] == ["DistributedDataParallel"] * 2


@pytest.mark.parametrize("what", ["trainer", "fabric"])
def test_lightning_ddp_trains_as_on_the_cpu(tmp_path: Path, what: str) -> None:
    pytest.importorskip("lightning")
    for device in ("cpu", "ltc"):
        run(tmp_path, "-m", "tests.ecosystem.rank_lightning", what, device)
    found = read(tmp_path)
    assert_equal(found)
    assert [one["device"] for one in found["ltc"]] == ["ltc:0", "ltc:1"]


def test_ray_train_trains_as_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch")
    for device in ("cpu", "ltc"):
        run(tmp_path, "-m", "tests.ecosystem.rank_ray", device)
    found = read(tmp_path)
    assert_equal(found)
    assert {one["device"].partition(":")[0] for one in found["ltc"]} == {"ltc"}
    assert [one["model"] for one in found["ltc"]] == ["DistributedDataParallel"] * 2
