"""Tolerances: the distance of a backend's numbers from those of PyTorch's own kernels, by dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_ltc.pytorch.private import default_tolerances

__all__ = ["Tolerance", "default_tolerance", "larger", "program_tolerance"]

Tolerance = tuple[float, float]
"""Relative and absolute, as `rtol` and `atol` of `torch.testing`."""

# What one call may differ adds up over the calls of a program.
_PROGRAM_FACTOR = 8


def default_tolerance(dtype: torch.dtype) -> Tolerance:
    """The tolerance of `torch.testing` for one call; zero for integers."""
    relative, absolute = default_tolerances(dtype)
    return float(relative), float(absolute)


def larger(left: Tolerance, right: Tolerance) -> Tolerance:
    """The larger of both, part by part."""
    return max(left[0], right[0]), max(left[1], right[1])


def program_tolerance(dtype: torch.dtype, claimed: Mapping[torch.dtype, Tolerance]) -> Tolerance:
    """The tolerance for a result of a whole program, of a backend that claims these. The absolute one is for numbers
    of the size of 1: sums of large numbers that cancel out leave errors of their size."""
    relative, absolute = default_tolerance(dtype)
    own = (_PROGRAM_FACTOR * relative, max(relative, absolute))
    return larger(own, claimed[dtype]) if dtype in claimed else own
