"""The counts of random programs: how far each mode has come, and what came of its programs, by version of PyTorch.

`python -m tests.fuzz.journal FILE...` adds journals of several machines up and prints the table of docs/reliability.md.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

# Those that were compared, that nothing is promised for, that differ, and that end the process or hang.
OUTCOMES = ("ok", "skip", "fail", "crash")
# Programs of one kind have other seeds than those of all kinds: none is counted twice.
KIND_OFFSET = 500_000_000
SAVED_EVERY_S = 2.0

# By mode; by version; by outcome and, for each kind of program, how many of them were compared.
Counts = dict[str, dict[str, Counter[str]]]


class Journal:
    """A file with the seed that comes next in each mode, and the counts. Safe to use from several threads."""

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._first = first
        self._saved_s = 0.0
        self.next: dict[str, int] = {}
        self.counts: Counts = {}
        if path.exists():
            self.next, self.counts = load(path)

    def take(self, mode: str, kind: str | None, count: int) -> int:
        """The first seed of the next `count` of the mode."""
        with self._lock:
            key = mode if kind is None else f"{mode} {kind}"
            seed = self.next.setdefault(key, self._first + (0 if kind is None else KIND_OFFSET))
            self.next[key] = seed + count
            return seed

    def note(self, mode: str, version: str, outcome: str, kind: str) -> None:
        """Add a program."""
        with self._lock:
            counter = self.counts.setdefault(mode, {}).setdefault(version, Counter())
            counter[outcome] += 1
            if outcome in ("ok", "fail"):
                counter[kind] += 1
            if time.monotonic() - self._saved_s > SAVED_EVERY_S:
                self._save()

    def save(self) -> None:
        """Write the file."""
        with self._lock:
            self._save()

    def _save(self) -> None:
        # Replaced at once: whoever is stopped in the middle leaves the one before.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({"next": self.next, "counts": self.counts}, indent=1) + "\n")
        beside.replace(self.path)
        self._saved_s = time.monotonic()

    def failed(self) -> bool:
        """True when a program differed, ended its process or hung."""
        return any(counter["fail"] + counter["crash"] for modes in self.counts.values() for counter in modes.values())


def load(path: Path) -> tuple[dict[str, int], Counts]:
    """What a journal holds."""
    held = json.loads(path.read_text())
    counts = {
        mode: {version: Counter(counter) for version, counter in versions.items()}
        for mode, versions in held["counts"].items()
    }
    return held["next"], counts


def total(journals: list[Counts]) -> Counts:
    """The sum of several journals."""
    made: Counts = {}
    for counts in journals:
        for mode, versions in counts.items():
            for version, counter in versions.items():
                made.setdefault(mode, {}).setdefault(version, Counter()).update(counter)
    return made


def table(counts: Counts) -> str:
    """The counts as a table of a page: a line for each mode and version, and the sums."""
    lines = [
        "| mode | torch | compared | of them jit | training | threads | skipped | differ | end or hang |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    whole: Counter[str] = Counter()
    for mode, versions in counts.items():
        for version, counter in versions.items():
            lines.append(_line(f"`{mode}`", version, counter))
            whole.update(counter)
    return "\n".join([*lines, _line("all", "", whole)])


def _line(mode: str, version: str, counter: Counter[str]) -> str:
    numbers = [counter["ok"] + counter["fail"], *(counter[key] for key in ("jit", "training", "threads"))]
    numbers += [counter[key] for key in ("skip", "fail", "crash")]
    return " | ".join([f"| {mode}", version, *(f"{number:,}" for number in numbers)]) + " |"


def main() -> int:
    """Print the sum of the journals that are named."""
    print(table(total([load(Path(name))[1] for name in sys.argv[1:]])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
