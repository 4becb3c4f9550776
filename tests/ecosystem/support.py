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
    """What one piece of work cost: of the first run programs and compiles, of the second fallbacks and times."""

    library: str
    work: str
    programs: int
    compiles: int
    fallbacks: int
    cpu_s: float
    device_s: float


# Of all comparisons of this process, in order.
measured: list[Figures] = []


def compare(library: str, work: str, run: Work, tolerance: float = 0.0, fallbacks: int = 0) -> None:
    """Run the work on the CPU and on the device, twice each: what it returns must be equal, and the second run on the
    device may fall back `fallbacks` times."""
    expected, _ = timed(run, "cpu")
    with observe() as first:
        found, _ = timed(run, "ltc")
    assert_equal(found, expected, tolerance)
    torch_ltc.wait_for_compiles()
    again, cpu_s = timed(run, "cpu")
    with observe() as second:
        found, device_s = timed(run, "ltc")
    assert_equal(found, again, tolerance)
    fell_back = [event.op for event in second.fallbacks]
    assert len(fell_back) <= fallbacks, fell_back
    programs = len({sync.program for sync in first.syncs})
    assert programs, "nothing ran on the device"
    measured.append(Figures(library, work, programs, len(first.compiles), len(fell_back), cpu_s, device_s))


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
