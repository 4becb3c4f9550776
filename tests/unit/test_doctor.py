"""The doctor's registry, plug-ins, order and text."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest

from tests.support.recordings import line, read, recording
from torch_ltc.debug.doctor import ENTRY_POINTS, Rule, Symptom, examine, findings_text, register_rule, rule, rules
from torch_ltc.debug.messages import MESSAGES, message
from torch_ltc.debug.recording import Finding, Recording
from torch_ltc.source import UNKNOWN, Source


@pytest.fixture(autouse=True)
def own_rules_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules and ids that a test registers go with it."""
    known, ids = dict(rules._rules), dict(MESSAGES)
    monkeypatch.setattr(rules, "_not_loaded", None)
    yield
    rules._rules.clear()
    rules._rules.update(known)
    MESSAGES.clear()
    MESSAGES.update(ids)


class FakeEntry:
    """An installed package's entry point."""

    def __init__(self, name: str, made: object) -> None:
        self.name, self.value, self.made = name, f"{name}.rules", made
        self.loads = 0

    def load(self) -> object:
        self.loads += 1
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def install(monkeypatch: pytest.MonkeyPatch, *entries: FakeEntry) -> None:
    def found(group: str) -> list[FakeEntry]:
        return list(entries) if group == ENTRY_POINTS else []

    monkeypatch.setattr(importlib.metadata, "entry_points", found)


def test_a_healthy_run_has_no_findings() -> None:
    assert examine(recording()) == []
    assert findings_text([]) == "The doctor found nothing.\n"


def test_every_rule_has_an_id_of_its_own_with_a_meaning() -> None:
    known = list(rules)
    assert len(known) >= 16
    for each in known:
        assert MESSAGES[each.message.code] is each.message
        assert each.message.code.startswith("LTC2")
        assert each.message.means.endswith(".")
        assert each.message.advice.endswith(".")


def test_a_rule_of_the_user_is_applied_with_its_advice_and_severity() -> None:
    @rule("ACME1", "slow start", severity="hint", means="The start is slow.", advice="Start sooner.")
    def slow_start(made: Recording) -> Iterator[Symptom]:
        yield Symptom("slow", f"{made.steps} steps", line(1))
        yield Symptom("slower", "much", line(2), fix="run", severity="error", cost_s=2.0)

    assert examine(recording()) == [
        Finding("slow start", "ACME1", "error", "slower", "much", line(2), "run", 2.0),
        Finding("slow start", "ACME1", "hint", "slow", "100 steps", line(1), "Start sooner."),
    ]
    rules.remove("ACME1")
    assert examine(recording()) == []
    assert "ACME1" not in MESSAGES


def test_what_cannot_be_registered_says_so() -> None:
    with pytest.raises(ValueError, match="LTC201 item again is defined twice"):
        register_rule(lambda made: [], "LTC201", "item again", means="")
    with pytest.raises(ValueError, match="one of error, warning, hint, not 'bad'"):
        register_rule(lambda made: [], "ACME2", "bad", severity="bad", means="")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has a rule LTC201 already"):
        rules.register(next(iter(rules)))
    with pytest.raises(KeyError, match="no rule ACME9"):
        rules.remove("ACME9")


def test_a_rule_that_raises_is_a_finding_and_the_others_are_applied() -> None:
    def broken(made: Recording) -> Iterator[Symptom]:
        yield Symptom("never seen", "", line(1))
        raise KeyError("gone")

    register_rule(broken, "ACME3", "broken", means="Broken.")
    codes = [finding.code for finding in examine(recording(syncs=(read(),)))]
    assert sorted(codes) == ["LTC201", "LTC299"]
    finding = next(finding for finding in examine(recording()) if finding.code == "LTC299")
    assert finding.title == "the rule 'broken' failed"
    assert finding.evidence == "ACME3 raised KeyError: 'gone'"
    assert (finding.severity, finding.source.function) == ("warning", "broken")
    assert finding.source.file == __file__


def test_rules_of_installed_packages_are_loaded_once_and_a_broken_package_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Rule(message("ACME4", "installed", "Installed.", "Nothing."), "hint", lambda made: [Symptom("here", "yes")])
    good, bad = FakeEntry("good", made), FakeEntry("bad", ImportError("no module named acme"))
    install(monkeypatch, bad, good)
    first, second = examine(recording()), examine(recording())
    assert first == second
    assert (good.loads, bad.loads) == (1, 1)
    assert first == [
        Finding(
            "plug-in not loaded",
            "LTC298",
            "warning",
            "the doctor's plug-in 'bad' could not be loaded",
            "importing bad.rules raised ImportError: no module named acme",
            UNKNOWN,
            "Correct or remove the package.",
        ),
        Finding("installed", "ACME4", "hint", "here", "yes", UNKNOWN, "Nothing."),
    ]


def test_findings_come_by_severity_and_then_by_cost() -> None:
    def several(made: Recording) -> Iterator[Symptom]:
        for severity, cost_s in (("hint", 9.0), ("warning", 1.0), ("error", 0.0), ("warning", 2.0)):
            yield Symptom("a", "b", UNKNOWN, severity=severity, cost_s=cost_s)  # type: ignore[arg-type]

    register_rule(several, "ACME5", "several", means="Several.")
    order = [(finding.severity, finding.cost_s) for finding in examine(recording())]
    assert order == [("error", 0.0), ("warning", 2.0), ("warning", 1.0), ("hint", 9.0)]


def test_findings_have_this_text() -> None:
    source = Source("train.py", 12, "step", module="Net.head")
    findings = [
        Finding("item", "LTC201", "warning", "a number is read in the loop", "100 reads", source, "Read less.", 0.31),
        Finding("mine", "ACME6", "hint", "something", "word " * 30, UNKNOWN, ""),
        Finding("item", "LTC201", "hint", "again", "few", Source("/" + "long/" * 30 + "a.py", 1, "f"), "No."),
    ]
    assert findings_text(findings) == (
        "The doctor found 1 warning, 2 hints.\n"
        "\n"
        "warning LTC201: a number is read in the loop\n"
        "  where:    train.py:12 in step [Net.head]\n"
        "  evidence: 100 reads\n"
        "  costs:    up to 310 ms\n"
        "  fix:      Read less.\n"
        "  more:     docs/messages.md#ltc201\n"
        "\n"
        "hint ACME6: something\n"
        "  evidence: " + " ".join(["word"] * 21) + "\n"
        "            " + " ".join(["word"] * 9) + "\n"
        "\n"
        "hint LTC201: again\n"
        "  where:    /" + "long/" * 30 + "a.py:1\n"
        "            in f\n"
        "  evidence: few\n"
        "  fix:      No.\n"
        "  more:     docs/messages.md#ltc201\n"
    )
    assert all(len(line) <= 120 or "long/" in line for line in findings_text(findings).splitlines())
