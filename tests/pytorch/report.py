"""Tables of results, and the judgement which of them are new."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from tests.pytorch.known_failures import KNOWN_FAILURES, Known
from tests.pytorch.records import BAD, COUNTED, LATE, Outcome, Record

BEGIN, END = "<!-- begin: PyTorch's tests -->", "<!-- end: PyTorch's tests -->"

Tables = Mapping[str, Sequence[Record]]


def table(tables: Tables) -> str:
    """A Markdown table, one line per file and one for all."""
    words = [outcome.value for outcome in Outcome]
    lines = [f"| file | {' | '.join(words)} | passes |", f"|---|{'---:|' * (len(words) + 1)}"]
    for file, records in tables.items():
        lines.append(_row(f"`{file}`", records) if records else f"| `{file}` | does not load with this PyTorch |")
    lines.append(_row("all", [record for records in tables.values() for record in records]))
    return "\n".join(lines)


def _row(title: str, records: Sequence[Record]) -> str:
    counts = Counter(record.outcome for record in records)
    counted = sum(counts[outcome] for outcome in COUNTED)
    good = counted - sum(counts[outcome] for outcome in BAD)
    numbers = " | ".join(str(counts[outcome]) for outcome in Outcome)
    return f"| {title} | {numbers} | {f'{100 * good / counted:.1f} %' if counted else ''} |"


def reasons(tables: Tables) -> str:
    """A Markdown table of the failures by reason, and how many tests pass but for the moment of an error."""
    counts: Counter[tuple[str, str]] = Counter()
    late = 0
    for file, records in tables.items():
        for record in records:
            late += record.outcome is Outcome.PASS and record.message.startswith(LATE)
            if record.outcome in BAD:
                known = find(file, record)
                counts[(known.kind.value, known.reason) if known else ("not looked into", record.message[:80])] += 1
    lines = ["| failures | kind | reason |", "|---:|---|---|"]
    lines += [f"| {n} | {kind} | {' '.join(reason.split())} |" for (kind, reason), n in counts.most_common()]
    return "\n".join(
        [
            *lines,
            "",
            f"Of those that pass, {late} got an error that depends on data at the sync instead of at the call.",
        ]
    )


def judge(tables: Tables, *, complete: bool) -> tuple[dict[str, list[Record]], list[Known]]:
    """Failures that are not known, by file; and, of a complete run, known ones that no test shows any more."""
    unknown: dict[str, list[Record]] = {}
    shown: set[Known] = set()
    for file, records in tables.items():
        for record in records:
            if record.outcome in BAD:
                known = find(file, record)
                if known is None:
                    unknown.setdefault(file, []).append(record)
                else:
                    shown.add(known)
    return unknown, [known for known in KNOWN_FAILURES if known not in shown] if complete else []


def find(file: str, record: Record) -> Known | None:
    """The entry of the table of known failures for a test."""
    return next((known for known in KNOWN_FAILURES if known.matches(file, record)), None)


def lines(unknown: Tables) -> Iterator[str]:
    """A line for each failure, with its first line of text."""
    for file, records in unknown.items():
        for record in records:
            yield f"{record.outcome.value}: {file} {record.name}: {record.message.splitlines()[0][:200]}"


def write(path: Path, text: str, version: str, extent: str) -> None:
    """Put the table between the markers of a page; `extent` says how much was run."""
    head, rest = path.read_text().split(BEGIN)
    _, tail = rest.split(END)
    said = f"Tests of PyTorch {version} with torch {metadata.version('torch')}: {extent}."
    path.write_text(f"{head}{BEGIN}\n{said}\n\n{text}\n{END}{tail}")
