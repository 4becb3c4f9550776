"""Runs all cases of fault injection and writes the matrix of faults and places into the documentation.

python -m tests.faults.run [--most N] [--only TEXT] [--write FILE]
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.faults.cases import Case, Outcome, cases_of, places, run_case, survey
from tests.faults.workloads import WORKLOADS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run")
    parser.add_argument("--most", type=int, default=4, help="calls of each place of a workload")
    parser.add_argument("--only", action="append", default=[], help="cases of this workload, as 'interpreter: call 1'")
    parser.add_argument("--list", action="store_true", help="the places and their calls alone")
    given = parser.parse_args()
    done: list[tuple[Case, Outcome]] = []
    with places() as injector:
        for workload in WORKLOADS:
            if given.only and not any(text.startswith(f"{workload.name}:") for text in given.only):
                continue
            counts = survey(workload, injector)
            print(f"== {workload.name}: {counts}", flush=True)
            if given.list:
                continue
            began = time.process_time()
            cases = [
                case
                for case in cases_of(workload, counts, injector, given.most)
                if not given.only or str(case).startswith(tuple(given.only))
            ]
            for case in cases:
                outcome = run_case(case, injector)
                done.append((case, outcome))
                if outcome.wrong:
                    print(
                        f"{case}: {outcome.label}: {outcome.wrong[:3]} {[e[:160] for e in outcome.errors[:2]]}",
                        flush=True,
                    )
            print(f"   {len(cases)} cases in {time.process_time() - began:.1f} s", flush=True)
    wrong = sum(bool(outcome.wrong) for _, outcome in done)
    print(f"{len(done)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
