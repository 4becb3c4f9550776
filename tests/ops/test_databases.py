"""A part of the comparison of modules and optimizers that fits a test run; the whole is `make ops`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.equality import differences

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "part", [("--modules", "--every", "6", "--max-samples", "1"), ("Adam", "SGD", "Rprop", "Muon")]
)
def test_modules_and_optimizers_equal_eager(part: tuple[str, ...]) -> None:
    # In a process of its own: PyTorch's test modules change global settings when they are imported.
    command = [sys.executable, "-m", "tests.ops.databases", *part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Fewer than this means that the comparison silently shrank.
    assert done.stdout.count(": equal") >= 3


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.tensor([1.0, 2.5]), "values differ by up to 0.5"),
        (torch.tensor([1, 2]), "torch.int64 (2,) instead of torch.float32 (2,)"),
        (torch.tensor([1.0, 0.0, 2.0])[::2], "strides (2,) instead of (1,)"),
        (None, "None instead of tensor([1., 2.])"),
    ],
)
def test_comparison_sees_what_differs(other: object, said: str) -> None:
    expected = {"x": torch.tensor([1.0, 2.0])}
    assert list(differences("result", expected, {"x": other})) == [f"result[0]: {said}"]
    assert list(differences("result", expected, {"x": torch.tensor([1.0, 2.0])})) == []
    assert list(differences("result", expected, {"y": torch.tensor([1.0, 2.0])})) != []
