"""The registry of the doctor's rules.

A rule never ends an examination: one that raises, and a package whose rules cannot be loaded, becomes a finding.
"""

from __future__ import annotations

import importlib.metadata
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch_ltc.debug.messages import MESSAGES, Message, message
from torch_ltc.debug.recording import Finding, Recording
from torch_ltc.source import UNKNOWN, Source

ENTRY_POINTS = "torch_ltc.doctor_rules"

Severity: TypeAlias = Literal["error", "warning", "hint"]

# From the worst to the mildest: the order in which findings are shown.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")


@dataclass(frozen=True, slots=True)
class Symptom:
    """A yield of a rule: a `title` of a few words, `evidence` with figures, the user's line, and what to do.

    Without a `fix` the rule's advice is shown, without a `severity` it is the rule's. `cost_s` estimates the time that
    was lost at most, 0 when that is not known.
    """

    title: str
    evidence: str
    source: Source = UNKNOWN
    fix: str = ""
    cost_s: float = 0.0
    severity: Severity | None = None


Find: TypeAlias = Callable[[Recording], Iterable[Symptom]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its stable id with what it means and what to do, how bad a finding is, and the function that looks."""

    message: Message
    severity: Severity
    find: Find

    def findings(self, recording: Recording) -> list[Finding]:
        """The findings of the rule in the recording; when it raises, a finding on that."""
        try:
            return [_finding(self.message, self.severity, symptom) for symptom in self.find(recording)]
        except Exception as error:
            return [_broken_rule(self.message, error)]


def _finding(message: Message, severity: Severity, symptom: Symptom) -> Finding:
    return Finding(
        rule=message.name,
        code=message.code,
        severity=symptom.severity or severity,
        title=symptom.title,
        evidence=symptom.evidence,
        source=symptom.source,
        fix=symptom.fix or message.advice,
        cost_s=symptom.cost_s,
    )


_PLUGIN = message(
    "LTC298",
    "plug-in not loaded",
    "An installed package promises rules for the doctor and importing them failed.",
    "Correct or remove the package.",
)
_BROKEN = message(
    "LTC299",
    "rule failed",
    "One of the doctor's rules raised an exception, so that what it looks for is not known. All other rules were "
    "applied.",
    "Correct the rule, or report it together with the recording if it is one of torch_ltc's.",
)


def _broken_rule(broken: Message, error: Exception) -> Finding:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    raised = f"{broken.code} raised {type(error).__name__}: {error}"
    source = Source(frame.filename, frame.lineno or 0, frame.name)
    return _finding(_BROKEN, "warning", Symptom(f"the rule '{broken.name}' failed", raised, source))


def _broken_plugin(entry: importlib.metadata.EntryPoint, error: Exception) -> Finding:
    raised = f"importing {entry.value} raised {type(error).__name__}: {error}"
    return _finding(_PLUGIN, "warning", Symptom(f"the doctor's plug-in '{entry.name}' could not be loaded", raised))


class Rules:
    """All rules by code. A second one with the same code is an error."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._not_loaded: list[Finding] | None = None

    def __iter__(self) -> Iterator[Rule]:
        return iter([self._rules[code] for code in sorted(self._rules)])

    def __len__(self) -> int:
        return len(self._rules)

    def register(self, made: Rule) -> Rule:
        """Apply the rule from now on."""
        code = made.message.code
        if code in self._rules:
            raise ValueError(f"the doctor has a rule {code} already\n  try: another code, or rules.remove({code!r})")
        self._rules[code] = made
        return made

    def remove(self, code: str) -> None:
        """Apply the rule no more, and forget its id."""
        if code not in self._rules:
            raise KeyError(f"the doctor has no rule {code}; its rules are {', '.join(sorted(self._rules))}")
        del self._rules[code]
        MESSAGES.pop(code, None)

    def load(self) -> list[Finding]:
        """Import the rules of installed packages, once; what could not be imported, as findings."""
        if self._not_loaded is None:
            self._not_loaded = []
            for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
                try:
                    loaded = entry.load()
                    if isinstance(loaded, Rule) and loaded.message.code not in self._rules:
                        self.register(loaded)
                except Exception as error:
                    self._not_loaded.append(_broken_plugin(entry, error))
        return self._not_loaded


rules = Rules()


def register_rule(
    find: Find, code: str, name: str, *, severity: Severity = "warning", means: str, advice: str = ""
) -> Rule:
    """Have the doctor apply `find`, a function that takes a Recording and yields Symptoms.

    `code` is a stable id that no other rule has, as "ACME1"; `name` a few words; `means` says what a finding means, and
    `advice` what to do unless the symptom says more.
    """
    if severity not in SEVERITIES:
        raise ValueError(f"the severity of a rule is one of {', '.join(SEVERITIES)}, not {severity!r}")
    return rules.register(Rule(message(code, name, means, advice), severity, find))


def rule(
    code: str, name: str, *, severity: Severity = "warning", means: str, advice: str = ""
) -> Callable[[Find], Find]:
    """`register_rule` as a decorator."""

    def register(find: Find) -> Find:
        register_rule(find, code, name, severity=severity, means=means, advice=advice)
        return find

    return register
