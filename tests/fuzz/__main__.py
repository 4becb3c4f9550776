"""`python -m tests.fuzz`: random programs in every mode, for as long as is said, in several processes.

A journal keeps how far each mode has come: the next run goes on from there. Programs that fail are made smaller and
written as scripts. Exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.modes import EVERYWHERE, MODES
from tests.fuzz.worker import PREFIX

BLOCK = 50
# A program that takes longer hangs.
LIMIT_S = 240.0


class Journal:
    """How many programs each mode has run, with what outcome, and the seed that comes next."""

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._first = first
        self.modes: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def take(self, mode: str) -> int:
        """The first seed of the next block of the mode."""
        with self._lock:
            entry = self.modes.setdefault(mode, {"next": self._first})
            entry["next"] += BLOCK
            return int(entry["next"]) - BLOCK

    def note(self, mode: str, outcomes: Counter[str]) -> None:
        """Add what a block did."""
        with self._lock:
            entry = self.modes[mode]
            for outcome, count in outcomes.items():
                entry[outcome] = entry.get(outcome, 0) + count
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.modes, indent=1) + "\n")


class Process:
    """A worker process, started anew when it ends or hangs."""

    def __init__(self, mode: str, given: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker", "--folder", str(given.folder / "failures")]
        command += ["--oracle", given.oracle, "--executions", str(given.executions)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **MODES[mode].environment}
        self.log = (given.folder / f"worker-{mode}-{os.getpid()}-{threading.get_ident() % 10_000}.log").open("ab")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=environment, bufsize=0
        )
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self.line()

    def send(self, text: str) -> None:
        """Tell it what to run."""
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")

    def line(self) -> str | None:
        """The next line that it says; None when it has ended or hangs."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + LIMIT_S
        while True:
            text, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                said = text.decode(errors="replace")
                if said.startswith(PREFIX):
                    return said.removeprefix(PREFIX)
                continue
            if not self._selector.select(max(deadline - time.monotonic(), 0.0)):
                return None
            more = os.read(self._process.stdout.fileno(), 65536)
            if not more:
                return None
            self._rest += more

    def end(self) -> str:
        """End it; how it ended by itself."""
        status = self._process.poll()
        if status is None:
            try:
                status = self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.log.close()
        return "hangs" if status is None else f"ends the process with {status}"


def run_modes(modes: list[str], journal: Journal, given: argparse.Namespace, deadline: float) -> None:
    """Give a worker blocks of these modes, one mode after the other, until the time is over."""
    process: Process | None = None
    turn = 0
    while time.monotonic() < deadline:
        mode = modes[turn % len(modes)]
        turn += 1
        process = process or Process(mode, given)
        first = journal.take(mode)
        outcomes: Counter[str] = Counter()
        running = first
        process.send(f"{mode} {first} {BLOCK}")
        while (said := process.line()) != "done":
            if said is None:
                how = process.end()
                process = None
                outcomes["crash"] += 1
                print(f"{mode}: seed {running} {how}", flush=True)
                break
            word = said.split()[0]
            if word == "begin":
                running = int(said.split()[1])
                continue
            outcomes[word] += 1
            if word == "fail":
                print(f"{mode}: {said}", flush=True)
        journal.note(mode, outcomes)
    if process is not None:
        process.send("")
        process.end()


def groups(modes: list[str], jobs: int) -> list[list[str]]:
    """The modes of each worker: those that need one environment can share one."""
    by_environment: dict[str, list[str]] = {}
    for mode in modes:
        by_environment.setdefault(json.dumps(MODES[mode].environment, sort_keys=True), []).append(mode)
    shared = list(by_environment.values())
    made = [list(shared[place % len(shared)]) for place in range(max(jobs, len(shared)))]
    # Workers of one group begin with different modes.
    return [group[place % len(group) :] + group[: place % len(group)] for place, group in enumerate(made)]


def main() -> int:
    """Fuzz for the time given."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed of modes that the journal does not have")
    parser.add_argument("--modes", default=",".join((*EVERYWHERE, "python")), help="of " + ", ".join(MODES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--oracle", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--executions", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(given.folder / "journal.json", given.seed)
    deadline = time.monotonic() + given.seconds
    threads = [
        threading.Thread(target=run_modes, args=(group, journal, given, deadline))
        for group in groups(given.modes.split(","), given.jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mode, entry in journal.modes.items():
        print(mode, " ".join(f"{key}={value}" for key, value in entry.items()))
    return int(any(entry.get("fail", 0) + entry.get("crash", 0) for entry in journal.modes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
