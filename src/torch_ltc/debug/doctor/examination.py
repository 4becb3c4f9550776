"""Applies all rules to a recording: importing this module brings the doctor's own rules."""

from __future__ import annotations

from torch_ltc.debug.doctor import balance, compiles, memory, programs, reads
from torch_ltc.debug.doctor.registry import SEVERITIES, rules
from torch_ltc.debug.recording import Finding, Recording

__all__ = ["OWN_RULES", "examine"]

OWN_RULES = (reads, compiles, programs, memory, balance)


def examine(recording: Recording) -> list[Finding]:
    """What all rules find in the recording: the worst first, then what costs most. Never raises for a rule."""
    found = list(rules.load())
    for known in rules:
        found += known.findings(recording)
    return sorted(found, key=_order)


def _order(finding: Finding) -> tuple[int, float, str, str, int]:
    rank = SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else len(SEVERITIES)
    return rank, -finding.cost_s, finding.code, finding.source.file, finding.source.line
