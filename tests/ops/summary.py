"""What a sweep found, as text, as JSON and as an exit status.

Owns the judgement of failures against the table of known gaps, and the grouping of failures by cause.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.ops.known_gaps import KNOWN_GAPS, Gap, gap_for
from tests.ops.records import Failure, Report, Unit

OPERATORS_NAMED = 14
"""A group of failures names this many operators, and counts the others."""
NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(slots=True)
class Group:
    """Failures with the same first line, numbers aside."""

    what: str
    line: str
    known: bool
    members: list[tuple[Unit, Failure]] = field(default_factory=list)


@dataclass(slots=True)
class Summary:
    """All reports of a sweep. `complete` says that no sample was left out, so that a gap that does not show is gone."""

    complete: bool
    reports: list[Report] = field(default_factory=list)

    def unexpected(self) -> int:
        """How many units have a failure that is not a known gap."""
        return sum(any(_gap(report.unit, each) is None for each in report.failures) for report in self.reports)

    def vanished_gaps(self) -> list[Gap]:
        """Known gaps of units that ran in full and did not show."""
        if not self.complete:
            return []
        shown = {_gap(report.unit, failure) for report in self.reports for failure in report.failures}
        return [gap for gap in KNOWN_GAPS if gap not in shown and self._ran(gap)]

    def passed(self) -> bool:
        return self.unexpected() == 0 and not self.vanished_gaps()

    def groups(self) -> list[Group]:
        """Failures by cause, those not known first, then by number of operators."""
        found: dict[tuple[str, str, bool], Group] = {}
        for report in self.reports:
            for failure in report.failures:
                line = failure.message.splitlines()[0]
                known = _gap(report.unit, failure) is not None
                key = (failure.what, NUMBERS.sub("#", line), known)
                found.setdefault(key, Group(failure.what, line, known)).members.append((report.unit, failure))
        return sorted(found.values(), key=lambda group: (group.known, -len(_operators(group)), group.line))

    def text(self) -> str:
        return "\n".join([*self._failures(), *self._mismatches(), *self._table(), *self._verdict()])

    def json(self) -> dict[str, Any]:
        return {
            "passed": self.passed(),
            "percentage": self.percentage(),
            "vanished_gaps": self.vanished_gaps(),
            "reports": [asdict(report) for report in self.reports],
        }

    def percentage(self) -> float:
        """Share of units that pass, in per cent."""
        good = sum(not report.failures for report in self.reports)
        return 100.0 * good / max(1, len(self.reports))

    def _ran(self, gap: Gap) -> bool:
        """Whether a gap could have shown: a gap for all dtypes or backends needs all of them that there are."""
        operator, dtype, backend, _ = gap
        # Eager compared with itself has no gaps to show.
        units = [report.unit for report in self.reports if report.unit.operator == operator]
        units = [unit for unit in units if unit.device != "cpu"]
        dtype_ran = any(dtype in (None, unit.dtype) for unit in units)
        return dtype_ran and any(backend in (None, unit.backend) for unit in units)

    def _failures(self) -> Iterator[str]:
        for group in self.groups():
            unit, failure = group.members[0]
            names = _operators(group)
            more = f" and {len(names) - OPERATORS_NAMED} more" if len(names) > OPERATORS_NAMED else ""
            kind = "known gap" if group.known else "FAILED"
            yield f"{kind} {group.what}: {group.line}"
            yield f"  {len(names)} operators, {len(group.members)} cases: {', '.join(names[:OPERATORS_NAMED])}{more}"
            for line in failure.message.splitlines()[1:]:
                yield f"    {line}"
            if group.known:
                yield f"  reason: {KNOWN_GAPS[_known_gap(unit, failure)]}"
            yield f"  repeat: {command(unit, failure)}\n"

    def _mismatches(self) -> Iterator[str]:
        seen: dict[str, str] = {}
        for report in self.reports:
            for each in report.mismatches:
                seen.setdefault(each.partition(": ")[0], each)
        if seen:
            yield f"{len(seen)} ATen operators whose meta kernel promises another layout than the kernel gives:"
            yield from (f"  {each}" for each in sorted(seen.values()))
            yield ""

    def _table(self) -> Iterator[str]:
        yield f"{'dtype':<10} {'backend':<12} {'operators':>13} {'cases':>15} {'time':>8}"
        for (dtype, backend), reports in _by_column(self.reports).items():
            good = sum(not report.failures for report in reports)
            cases = sum(report.cases for report in reports)
            good_cases = cases - sum(report.failed_cases for report in reports)
            duration_s = sum(report.duration_s for report in reports)
            operators = f"{good}/{len(reports)}"
            yield f"{dtype:<10} {backend:<12} {operators:>13} {f'{good_cases}/{cases}':>15} {duration_s:>6.0f} s"

    def _verdict(self) -> Iterator[str]:
        for gap in self.vanished_gaps():
            yield f"known gap {gap} does not show any more: remove it from tests/ops/known_gaps.py"
        known = sum(bool(report.failures) for report in self.reports) - self.unexpected()
        yield (
            f"{self.percentage():.2f} % of {len(self.reports)} pass "
            f"({self.unexpected()} fail unexpectedly, {known} are known gaps)"
        )


def command(unit: Unit, failure: Failure) -> str:
    """The command that repeats a failing case alone."""
    parts = ["python -m tests.ops.sweep", f"--only {unit.operator}", f"--dtype {unit.dtype}"]
    parts.append(f"--backend {unit.backend}")
    if unit.device != "ltc":
        parts.append(f"--device {unit.device}")
    if failure.sample is not None:
        parts.append(f"--sample {failure.sample} --variant {failure.variant}")
    return " ".join(parts)


def _gap(unit: Unit, failure: Failure) -> Gap | None:
    return gap_for(unit.operator, unit.dtype, unit.backend, failure.what)


def _known_gap(unit: Unit, failure: Failure) -> Gap:
    gap = _gap(unit, failure)
    assert gap is not None
    return gap


def _operators(group: Group) -> list[str]:
    return list(Counter(unit.operator for unit, _ in group.members))


def _by_column(reports: Sequence[Report]) -> dict[tuple[str, str], list[Report]]:
    columns: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        columns.setdefault((report.unit.dtype, report.unit.backend), []).append(report)
    return columns
