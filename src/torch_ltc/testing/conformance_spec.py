"""What a backend claims about itself, by which a conformance run judges it.

Owns the names of the attributes that are read, each with what holds when a backend does not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class ConformanceSpec:
    """What may be expected of a backend. Each field is an attribute of the backend's class."""

    exact_values: bool = False
    """Values equal eager's bit by bit. Otherwise they are compared with a tolerance."""
    eager_random: bool = True
    """Random numbers equal eager's. Otherwise they only have to follow from the seed, and to be drawn once."""
    computes: bool = True
    """Results are meant to be right. Otherwise only their number, dtypes and shapes count."""
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    """Per dtype a relative and an absolute tolerance, where those of `torch.testing` are too narrow."""
    known_gaps: Mapping[str, str] = field(default_factory=dict)
    """What is known to differ, with the reason: see `torch_ltc.testing.gaps`."""


def conformance_spec_of(backend: Backend) -> ConformanceSpec:
    """The claims of a backend."""
    return ConformanceSpec(
        exact_values=backend.exact_values,
        eager_random=backend.eager_random,
        computes=backend.computes,
        tolerances=backend.tolerances,
        known_gaps=backend.known_gaps,
    )
