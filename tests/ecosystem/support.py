"""A library's work on both devices: equal results, no fallback once it is known, and figures for the table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torch_ltc
from tests.semantics.support import observe

Work = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one piece of work cost: of the first run programs and compiles, of the second fallbacks, of the later ones
    the least time."""

    library: str
    work: str
    programs: int
    compiles: int
    fallbacks: int
    cpu_s: float
    device_s: float


# After a first run, which is not measured.
MEASURED_RUNS = 3
# Of all comparisons of this process, in order.
measured: list[Figures] = []


def compare(library: str, work: str, run: Work, tolerance: float = 0.0, fallbacks: int = 0) -> None:
    """Run the work on the CPU and on the device, in turns: what it returns must be equal, and each run on the device
    but the first may fall back `fallbacks` times."""
    runs, eager_s, device_s = [], [], []
    for _ in range(1 + MEASURED_RUNS):
        expected, took_s = timed(run, "cpu")
        eager_s.append(took_s)
        with observe() as observed:
            found, took_s = timed(run, "ltc")
        device_s.append(took_s)
        runs.append(observed)
        assert_equal(found, expected, tolerance)
        torch_ltc.wait_for_compiles()
    fell_back = max(([event.op for event in later.fallbacks] for later in runs[1:]), key=len)
    assert len(fell_back) <= fallbacks, fell_back
    programs = len({sync.program for sync in runs[0].syncs})
    assert programs, "nothing ran on the device"
    compiles = len(runs[0].compiles)
    measured.append(Figures(library, work, programs, compiles, len(fell_back), min(eager_s[1:]), min(device_s[1:])))


def timed(run: Work, device: str) -> tuple[list[Any], float]:
    """What the work returns, on the CPU, and the CPU time that it took."""
    torch.manual_seed(0)
    began_s = time.process_time()
    returned = run(device)
    if device == "ltc":
        torch_ltc.sync(wait=True)
    took_s = time.process_time() - began_s
    leaves = pytree.tree_leaves(returned)
    return [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], took_s


def assert_equal(found: Sequence[Any], expected: Sequence[Any], tolerance: float) -> None:
    """Equal leaf by leaf: to the bit, or within a tolerance."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        elif isinstance(one, float):
            assert abs(one - other) <= tolerance, (one, other)
        else:
            assert one == other


def write(path: Path) -> None:
    """Write the figures for the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in measured], indent=1) + "\n")
