"""Conformance tests of a backend against eager PyTorch, and its coverage of operators and semantics.

`conformance(backend)` runs the suite and gives a `Report`; `python -m torch_ltc conformance NAME` prints one.
"""

from __future__ import annotations

from torch_ltc.testing.records import Failure, Result, State, What
from torch_ltc.testing.report import Report
from torch_ltc.testing.suite import Options, conformance

__all__ = ["Failure", "Options", "Report", "Result", "State", "What", "conformance"]
