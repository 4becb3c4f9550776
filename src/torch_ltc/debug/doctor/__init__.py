"""The doctor: rules that look through a recording for what is wrong, where, what it costs, and what to do.

    from torch_ltc.debug.doctor import examine, findings_text

    print(findings_text(examine(recording)))

A rule of your own takes a recording and yields symptoms; see `rule`. Packages bring rules with an entry point
"torch_ltc.doctor_rules" that names the module in which they are defined.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from torch_ltc.debug.doctor import compiles, programs, reads, resources
from torch_ltc.debug.doctor.registry import ENTRY_POINTS, SEVERITIES, Rule, Rules, Symptom, register_rule, rule, rules
from torch_ltc.debug.messages import MESSAGES
from torch_ltc.debug.recording import Finding, Recording
from torch_ltc.formatting import count_text, duration_text

__all__ = ["ENTRY_POINTS", "Rule", "Rules", "Symptom", "examine", "findings_text", "register_rule", "rule", "rules"]

OWN_RULES = (reads, compiles, programs, resources)
_WIDTH = 120
_NAMES = ("where", "evidence", "costs", "fix", "more")
_INDENT = 2 + max(len(name) for name in _NAMES) + 2


def examine(recording: Recording) -> list[Finding]:
    """The findings of all rules, the worst first, then those that cost most. Never raises for a rule."""
    found = list(rules.load())
    for known in rules:
        found += known.findings(recording)
    return sorted(found, key=_order)


def _order(finding: Finding) -> tuple[int, float, str, str, int]:
    rank = SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else len(SEVERITIES)
    return rank, -finding.cost_s, finding.code, finding.source.file, finding.source.line


def findings_text(findings: Sequence[Finding]) -> str:
    """The findings, a paragraph each, after a line that counts them."""
    if not findings:
        return "The doctor found nothing.\n"
    counts = [(severity, sum(finding.severity == severity for finding in findings)) for severity in SEVERITIES]
    summary = ", ".join(count_text(count, severity) for severity, count in counts if count)
    return "\n".join([f"The doctor found {summary}.\n", *(_paragraph(finding) for finding in findings)])


def _paragraph(finding: Finding) -> str:
    known = MESSAGES.get(finding.code)
    parts = {
        "where": finding.source.describe() if finding.source.file else "",
        "evidence": finding.evidence,
        "costs": f"up to {duration_text(finding.cost_s)}" if finding.cost_s else "",
        "fix": finding.fix,
        "more": known.link if known is not None and known.code.startswith("LTC") else "",
    }
    lines = [_wrapped(f"{finding.severity} {finding.code}: ", finding.title, 4)]
    lines += [_wrapped(f"  {name}:".ljust(_INDENT), parts[name], _INDENT) for name in _NAMES if parts[name]]
    return "\n".join(lines) + "\n"


def _wrapped(head: str, text: str, indent: int) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * indent,
        # A path that is cut in two cannot be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
