"""Tables of results, and the judgement which of them are new."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from tests.pytorch.files import FILES
from tests.pytorch.known_failures import KNOWN_FAILURES, Known
from tests.pytorch.records import BAD, COUNTED, LATE, LATE_WARNING, Outcome, Record

BEGIN, END = "<!-- begin: PyTorch's tests -->", "<!-- end: PyTorch's tests -->"

NOT_LOADED = " does not load with this PyTorch |"
COLUMNS = (*(outcome.value for outcome in Outcome), "late")

Tables = Mapping[str, Sequence[Record]]


def table(tables: Tables, kept: Sequence[str] = ()) -> str:
    """A Markdown table, one line per file and one for all; `kept` are lines of files that were not run."""
    words = [outcome.value for outcome in Outcome]
    lines = [f"| file | {' | '.join(words)} | late | passes |", f"|---|{'---:|' * (len(words) + 2)}"]
    rows = [
        _row(f"`{file}`", counted(records)) if records else f"| `{file}` |{NOT_LOADED}"
        for file, records in tables.items()
    ]
    rows = sorted([*rows, *kept], key=_place)
    total: Counter[str] = Counter()
    for row in rows:
        total.update(_counts(row))
    return "\n".join([*lines, *rows, _row("all", total)])


def counted(records: Sequence[Record]) -> Counter[str]:
    """How many tests have each outcome, and how many pass with an error or a warning at the sync, not at the call."""
    counts = Counter(record.outcome.value for record in records)
    passed = [record.message for record in records if record.outcome is Outcome.PASS]
    counts["late"] = sum(message.startswith((LATE, LATE_WARNING)) for message in passed)
    return counts


def _row(title: str, counts: Mapping[str, int]) -> str:
    all_counted = sum(counts[outcome.value] for outcome in COUNTED)
    good = all_counted - sum(counts[outcome.value] for outcome in BAD)
    numbers = " | ".join(str(counts[column]) for column in COLUMNS)
    return f"| {title} | {numbers} | {f'{100 * good / all_counted:.1f} %' if all_counted else ''} |"


def _counts(row: str) -> dict[str, int]:
    """What a line of the table says."""
    numbers = [cell.strip() for cell in row.split("|")[2:-2]]
    return {column: int(number) for column, number in zip(COLUMNS, numbers, strict=False) if number.isdigit()}


def _place(row: str) -> int:
    file = row.split("`")[1]
    return FILES.index(file) if file in FILES else len(FILES)


def reasons(tables: Tables, kept: Sequence[str] = ()) -> str:
    """A Markdown table of the failures by file and reason; `kept` are lines of files that were not run."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for file, records in tables.items():
        for record in records:
            if record.outcome in BAD:
                known = find(file, record)
                kind, reason = (known.kind.value, known.reason) if known else ("not looked into", record.message[:80])
                counts[(file, kind, " ".join(reason.split()))] += 1
    rows = [f"| `{file}` | {n} | {kind} | {reason} |" for (file, kind, reason), n in counts.most_common()]
    return "\n".join(["| file | failures | kind | reason |", "|---|---:|---|---|", *sorted([*rows, *kept], key=_place)])


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


def write(path: Path, tables: Tables, version: str, extent: str) -> None:
    """Put the tables between the markers of a page; `extent` says how much was run.

    What the page says of files that were not run stays.
    """
    head, rest = path.read_text().split(BEGIN)
    old, tail = rest.split(END)
    kept = [line for line in old.splitlines() if line.startswith("| `") and line.split("`")[1] not in tables]
    lines = [line for line in kept if line.count("|") == len(COLUMNS) + 3 or NOT_LOADED in line]
    causes = [line for line in kept if line not in lines]
    said = f"Tests of PyTorch {version} with torch {metadata.version('torch')}: {extent}."
    if lines:
        said += f" Of an earlier commit: {', '.join(line.split('|')[1].strip() for line in lines)}."
    text = f"{said}\n\n{table(tables, lines)}\n\n{reasons(tables, causes)}"
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
