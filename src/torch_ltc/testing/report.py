"""The report of a conformance run: as text, as JSON, as a verdict, and result by result.

Owns the judgement of failures against the tables of known gaps, the grouping of failures by cause, and the coverage
table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_ltc.testing.gaps import Gaps
from torch_ltc.testing.records import DTYPES, AnyUnit, CaseUnit, Failure, Result, State, Unit, What

GROUPS_SHOWN = 12
"""The short form describes this many groups of failures, and counts the others."""
NAMES_SHOWN = 8
"""A group names this many operators, and counts the others."""
NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")

Command = Callable[[AnyUnit, Failure], str]
"""The command that repeats one failure."""


@dataclass(slots=True)
class Group:
    """Failures with the same first line, numbers aside."""

    what: str
    line: str
    gap: str | None
    counts: bool
    """They fail the run: not if they are known gaps, nor if the backend may refuse programs."""
    members: list[tuple[AnyUnit, Failure]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The operators and cases, each once."""
        return list(Counter(name_of(unit) for unit, _ in self.members))

    @property
    def excused(self) -> bool:
        """True when the backend refused the programs, as it may, and nothing else is wrong."""
        return self.what == What.REFUSED.value and not self.counts and self.gap is None


@dataclass(slots=True)
class Report:
    """All results of a run on one backend. `passed` is the verdict; iterating gives the results."""

    backend: str
    gaps: Gaps
    command: Command
    results: list[Result] = field(default_factory=list)
    complete: bool = True
    """No sample was left out, so that a known gap that does not show is gone."""
    strict: bool = False
    """A program that the backend does not take fails the run."""
    title: str = ""

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def passed(self) -> bool:
        """True when nothing is wrong but known gaps, and no known gap is gone."""
        return not self.unexpected() and not self.vanished_gaps()

    def unexpected(self) -> list[Result]:
        """Results with a failure that counts."""
        return [each for each in self.results if any(self._counts(each.unit, failure) for failure in each.failures)]

    def vanished_gaps(self) -> list[str]:
        """Known gaps of units that ran in full and did not show."""
        if not self.complete:
            return []
        shown = {self.gaps.find(result.unit, failure.what) for result in self.results for failure in result.failures}
        return [
            key
            for key in self.gaps.all()
            if key not in shown and any(self.gaps.concerns(key, result.unit) for result in self.results)
        ]

    def groups(self) -> list[Group]:
        """Failures by cause: those that count first, then by number of operators."""
        found: dict[tuple[str, str, str | None], Group] = {}
        for result in self.results:
            for failure in result.failures:
                line = failure.message.splitlines()[0]
                gap = self.gaps.find(result.unit, failure.what)
                key = (failure.what, NUMBERS.sub("#", line), gap)
                group = found.setdefault(key, Group(failure.what, line, gap, self._counts(result.unit, failure)))
                group.members.append((result.unit, failure))
        return sorted(found.values(), key=lambda group: (not group.counts, -len(group.names), group.line))

    def text(self, everything: bool = False) -> str:
        """The report to print: failures, coverage table, verdict; in short, unless `everything` is asked for."""
        parts = [self._failures(everything), self._refusals(everything), self._mismatches(everything)]
        parts += [self._semantics(everything), self._coverage(), self._verdict()]
        blocks = ["\n".join(part) for part in parts]
        return "\n\n".join([*([self.title] if self.title else []), *(block for block in blocks if block)])

    def json(self) -> dict[str, Any]:
        """Everything, as lists, dicts, numbers and text."""
        return {
            "backend": self.backend,
            "passed": self.passed,
            "complete": self.complete,
            "strict": self.strict,
            "known_gaps": self.gaps.all(),
            "vanished_gaps": self.vanished_gaps(),
            "states": {state.value: sum(each.state is state for each in self.results) for state in State},
            "results": [{**asdict(each), "state": each.state.value} for each in self.results],
        }

    # ---- parts of the text ----------------------------------------------------------------------------------------

    def _counts(self, unit: AnyUnit, failure: Failure) -> bool:
        if self.gaps.find(unit, failure.what) is not None:
            return False
        return self.strict or failure.what != What.REFUSED.value

    def _failures(self, everything: bool) -> Iterator[str]:
        groups = [group for group in self.groups() if everything or not group.excused]
        shown = groups if everything else groups[:GROUPS_SHOWN]
        for group in shown:
            kind = "FAILED" if group.counts else "not taken" if group.gap is None else "known gap"
            what = "" if group.excused else f" ({group.what})"
            yield f"{kind}{what}: {group.line}"
            yield f"  {_times(group)} in {_listed(group.names)}"
            if group.gap is not None:
                yield f"  reason: {self.gaps.reason(group.gap)}"
            for unit, failure in group.members if everything else group.members[:1]:
                yield f"  {_place(unit, failure)}: {failure.line}"
                yield f"    repeat: {self.command(unit, failure)}"
        if len(groups) > len(shown):
            yield f"... and {len(groups) - len(shown)} more kinds of failures: --all shows everything"

    def _refusals(self, everything: bool) -> Iterator[str]:
        """The refused programs in short: a line for each reason."""
        groups = [] if everything else [group for group in self.groups() if group.excused]
        if groups:
            yield "not taken, by reason:"
        for group in groups[:GROUPS_SHOWN]:
            yield f"  {group.line}\n    {_times(group)} in {_listed(group.names)}"
        if len(groups) > GROUPS_SHOWN:
            yield f"  ... and {len(groups) - GROUPS_SHOWN} more reasons: --all shows everything"

    def _mismatches(self, everything: bool) -> Iterator[str]:
        if not everything:
            return
        seen: dict[str, str] = {}
        for result in self.results:
            for each in result.mismatches:
                seen.setdefault(each.partition(": ")[0], each)
        if seen:
            yield f"{len(seen)} ATen operators whose meta kernel promises another layout than the kernel gives:"
            yield from (f"  {each}" for each in sorted(seen.values()))

    def _semantics(self, everything: bool) -> Iterator[str]:
        cases = [each for each in self.results if isinstance(each.unit, CaseUnit)]
        if everything:
            yield from (f"{name_of(each.unit):<40} {each.state.value}" for each in cases)

    def _coverage(self) -> Iterator[str]:
        cases = [each for each in self.results if isinstance(each.unit, CaseUnit)]
        operators = [each for each in self.results if isinstance(each.unit, Unit)]
        if operators:
            yield from _operator_table(operators)
            yield ""
        yield from _state_table({"operators": operators, "semantics": cases})

    def _verdict(self) -> Iterator[str]:
        for key in self.vanished_gaps():
            yield f"the known gap {key!r} does not show any more: remove it"
        unexpected = len(self.unexpected())
        known = sum(
            any(self.gaps.find(each.unit, failure.what) is not None for failure in each.failures)
            for each in self.results
        )
        verdict = "passed" if self.passed else "FAILED"
        yield f"{verdict}: backend {self.backend}, {len(self.results)} run, {unexpected} fail, {known} with known gaps"


def name_of(unit: AnyUnit) -> str:
    """An operator's name, or a case's as `semantics/NAME`."""
    return unit.operator if isinstance(unit, Unit) else f"semantics/{unit.case}"


def _times(group: Group) -> str:
    return "once" if len(group.members) == 1 else f"{len(group.members)} times"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"


def _place(unit: AnyUnit, failure: Failure) -> str:
    if isinstance(unit, CaseUnit):
        return name_of(unit)
    which = "" if failure.sample is None else f" sample {failure.sample} {failure.variant}"
    return f"{unit.operator} {unit.dtype}{which}"


def _operator_table(results: Sequence[Result]) -> Iterator[str]:
    """Operators taken of those run, a row for each group and a column for each dtype."""
    counts: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        unit = result.unit
        assert isinstance(unit, Unit)
        for group in (unit.group, "all"):
            counts.setdefault((group, unit.dtype), []).append(result)
    dtypes = [dtype for dtype in DTYPES if ("all", dtype) in counts]
    groups = sorted({group for group, _ in counts} - {"all"})
    yield f"{'operators taken':<24}" + "".join(f"{dtype:>12}" for dtype in dtypes)
    for group in [*groups, "all"]:
        cells = [_taken(counts.get((group, dtype), [])) for dtype in dtypes]
        yield f"{group or 'others':<24}" + "".join(f"{cell:>12}" for cell in cells)


def _taken(results: Sequence[Result]) -> str:
    """The number taken in their plain form, of those that give the backend something to compile."""
    total = sum(each.state is not State.NOTHING for each in results)
    return f"{sum(each.covered for each in results)}/{total}" if total else "-"


def _state_table(kinds: dict[str, Sequence[Result]]) -> Iterator[str]:
    present = {kind: results for kind, results in kinds.items() if results}
    yield f"{'':<24}" + "".join(f"{kind:>12}" for kind in present)
    for state in State:
        counts = [sum(each.state is state for each in results) for results in present.values()]
        yield f"{state.value:<24}" + "".join(f"{count:>12}" for count in counts)
