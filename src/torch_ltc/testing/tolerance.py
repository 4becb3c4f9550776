"""How far a compiler's values may be from eager's.

Owns the policy. A backend that claims exact values is held to the bit. Any other is allowed what `torch.testing` allows
for the dtype, what PyTorch's own database allows for the operator where two implementations of it are compared, and
what the backend itself asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torch_ltc.lowering.tolerance import Tolerance, default_tolerance, larger

COMPARING_TESTS = frozenset(
    {"TestCommon", "TestConsistency", "TestDecomp", "TestEagerFusionOpInfo", "TestInductorOpInfo", "TestJit"}
)
"""PyTorch's test classes that compare an operator's kernel with another form of it. Those that compare with NumPy, or
with a higher precision, allow for differences that two kernels of one precision do not have."""
MOST_ABSOLUTE = 1e-2
"""The database names absolute tolerances up to 0.7, meant for comparison with a higher precision."""


def tolerances(op: Any, claimed: Mapping[torch.dtype, Tolerance]) -> dict[torch.dtype, Tolerance]:
    """Per dtype what is allowed for an operator of the database; dtypes that have only the default are left out."""
    found = {dtype: larger(default_tolerance(dtype), tolerance) for dtype, tolerance in claimed.items()}
    for dtype, tolerance in _overrides(op):
        found[dtype] = larger(found.get(dtype, default_tolerance(dtype)), tolerance)
    return found


def _overrides(op: Any) -> Iterator[tuple[torch.dtype, Tolerance]]:
    """The tolerances in an operator's list of test decorators."""
    for entry in op.decorators or ():
        for decorator in _applicable(entry):
            # Both decorators keep a dictionary `d`: of (absolute, relative), or of a number that is the absolute one.
            for dtype, given in getattr(decorator, "d", {}).items():
                absolute, relative = (given.atol, given.rtol) if hasattr(given, "atol") else (given, 0.0)
                yield dtype, (relative, min(absolute, MOST_ABSOLUTE))


def _applicable(entry: Any) -> tuple[Any, ...]:
    """The decorators behind an entry: itself, or those that it holds for tests that compare on the CPU."""
    if not hasattr(entry, "cls_name"):
        return (entry,)
    if entry.device_type not in (None, "cpu") or entry.cls_name not in {None, *COMPARING_TESTS}:
        return ()
    return tuple(entry.decorators)
