"""Runs all cases of fault injection and writes the matrix of places and faults into the documentation.

    python -m tests.faults.run [--most N] [--only WORKLOAD] [--results FILE] [--docs FILE]

Results are kept in a file, workload by workload: a run that was stopped goes on with `--only`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.faults.cases import GAPS, cases_of, places, run_case, survey
from tests.faults.places import FAULTS
from tests.faults.workloads import WORKLOADS

# Outcomes in one letter, for the cells of the matrix.
LETTERS = {
    "all done": ("d", "the step is done, and nothing is said"),
    "warning, all done": ("w", "the step is done, with a warning"),
    "error, all done": ("a", "an error; the step is done"),
    "error, nothing done": ("b", "an error; nothing of the step is done"),
    "error, as in eager, without the call": ("c", "an error; all is done but the call and what depends on it"),
    "error, half of the step has happened": ("g", "an error; a part of the step is done: a known gap, below"),
    "not reached": ("-", "the call did not come: another thread was first"),
    "WRONG": ("WRONG", "not as it has to be"),
}
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"

Rows = list[tuple[str, str, str]]


def run_workloads(chosen: list[str], most: int) -> Iterator[tuple[str, Rows]]:
    """Each workload with place, fault and outcome of each case."""
    with places() as injector:
        for workload in WORKLOADS:
            if chosen and workload.name not in chosen:
                continue
            counts = survey(workload, injector)
            began = time.process_time()
            rows: Rows = []
            for case in cases_of(workload, counts, injector, most):
                outcome = run_case(case, injector)
                rows.append((case.place, case.fault.name, outcome.label))
                if outcome.wrong:
                    print(f"{case}: {outcome.wrong[:3]} {outcome.errors[:2]}", flush=True)
            print(f"{workload.name}: {len(rows)} cases in {time.process_time() - began:.0f} s", flush=True)
            yield workload.name, rows


def matrix_text(results: dict[str, Rows]) -> str:
    """The matrix, the workloads and the known gaps as Markdown."""
    cells: dict[tuple[str, str], Counter[str]] = {}
    for rows in results.values():
        for place, fault, label in rows:
            cells.setdefault((place, fault), Counter())[label] += 1
    faults = [fault.name for fault in FAULTS if any(name == fault.name for _, name in cells)]
    lines = [f"| place | {' | '.join(faults)} |", "|---" * (len(faults) + 1) + "|"]
    for place in sorted({place for place, _ in cells}):
        shown = [_cell(cells.get((place, fault), Counter())) for fault in faults]
        lines.append(f"| `{place}` | {' | '.join(shown)} |")
    total = sum(map(len, results.values()))
    wrong = sum(label == "WRONG" for rows in results.values() for _, _, label in rows)
    lines += ["", f"{total:,} cases, {wrong} of them wrong, {time.strftime('%Y-%m-%d')}.", ""]
    lines += [f"- **{letter}**: {text}" for letter, text in LETTERS.values() if letter != "WRONG"]
    lines += ["", "| workload | cases | places |", "|---|---|---|"]
    lines += [f"| {name} | {len(rows)} | {len({row[0] for row in rows})} |" for name, rows in results.items()]
    lines += ["", "Known gaps:", "", "| workload | place | reason |", "|---|---|---|"]
    lines += [f"| {workload} | `{place}` | {reason} |" for (workload, place), reason in GAPS.items()]
    return "\n".join(lines)


def _cell(labels: Counter[str]) -> str:
    return " ".join(f"{count}{LETTERS.get(label, (label, ''))[0]}" for label, count in sorted(labels.items())) or " "


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run")
    parser.add_argument("--most", type=int, default=4, help="calls of each place of a workload (%(default)s)")
    parser.add_argument("--only", action="append", default=[], help="this workload; repeatable")
    parser.add_argument("--results", type=Path, default=Path("build/faults.json"), help="%(default)s")
    parser.add_argument("--docs", type=Path, help="write the matrix into this page")
    given = parser.parse_args()
    results: dict[str, Rows] = json.loads(given.results.read_text()) if given.results.exists() else {}
    given.results.parent.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for name, rows in run_workloads(given.only, given.most):
        results[name] = rows
        wrong += sum(label == "WRONG" for _, _, label in rows)
        given.results.write_text(json.dumps(results))
    if given.docs is not None:
        page = given.docs.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        given.docs.write_text(
            f"{before}{BEGIN}\n{matrix_text(results)}\n{END}{rest.partition(END)[2]}", encoding="utf-8"
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
