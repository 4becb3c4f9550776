"""The doctor: rules that look through a recording and say what is wrong, where, what it costs, and what to do.

    from torch_ltc.debug.doctor import examine, findings_text

    print(findings_text(examine(recording)))

A rule of your own takes a recording and yields symptoms; see `rule`. Packages bring rules with an entry point
"torch_ltc.doctor_rules" that names the module in which they are defined.
"""

from torch_ltc.debug.doctor.examination import examine
from torch_ltc.debug.doctor.registry import ENTRY_POINTS, Rule, Rules, Symptom, register_rule, rule, rules
from torch_ltc.debug.doctor.text import findings_text

__all__ = [
    "ENTRY_POINTS",
    "Rule",
    "Rules",
    "Symptom",
    "examine",
    "findings_text",
    "register_rule",
    "rule",
    "rules",
]
