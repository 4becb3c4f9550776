"""`python -m tests.fuzz`: random programs in every mode, for as long as is said, in several processes.

A journal keeps how far each mode has come: the next run goes on from there. Programs that fail are made smaller and
written as scripts. Exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.generate import KINDS
from tests.fuzz.journal import Journal, table
from tests.fuzz.modes import EVERYWHERE, MODES
from tests.fuzz.worker import PREFIX

BLOCK = 50
# A program that takes longer hangs.
LIMIT_S = 240.0
# Turns that modes may be ahead of those for which a process of another environment would have to be started.
AHEAD = 4
# Blocks after which a process is started anew, for what it may have gathered.
MOST_BLOCKS = 200


class Process:
    """A worker process, started anew when it ends or hangs."""

    def __init__(self, mode: str, given: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker", "--folder", str(given.folder / "failures")]
        command += ["--oracle", given.oracle, "--executions", str(given.executions)]
        self.environment = environment(mode)
        self.blocks = 0
        self.log = (given.folder / f"worker-{os.getpid()}-{threading.get_ident() % 10_000}.log").open("ab")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **MODES[mode].environment},
            bufsize=0,
            # An interrupt from the keyboard is for this process, which ends that one.
            start_new_session=True,
        )
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self.version = (self.line() or "ready unknown").split()[1]

    def send(self, text: str) -> None:
        """Tell it what to run."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
        except BrokenPipeError:
            # It has ended: the next line says so.
            return

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

    def kill(self) -> None:
        """End it at once, from any thread."""
        self._process.kill()

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


def environment(mode: str) -> str:
    """What a process needs for the mode: those that need the same can share one."""
    return json.dumps(MODES[mode].environment, sort_keys=True)


class Turns:
    """Whose turn it is: modes that can share a process run the same programs one after the other, which are made and
    run in eager once. Those with the fewest turns are next, and rather those that need no new process."""

    def __init__(self, modes: list[str]) -> None:
        self._lock = threading.Lock()
        self._modes: dict[str, list[str]] = {}
        for mode in modes:
            self._modes.setdefault(environment(mode), []).append(mode)
        self._turns: Counter[str] = Counter(dict.fromkeys(self._modes, 0))

    def take(self, process_environment: str | None) -> list[str]:
        """The modes of the next blocks."""

        def cost(needed: str) -> int:
            return self._turns[needed] + (AHEAD if process_environment not in (None, needed) else 0)

        with self._lock:
            needed = min(self._turns, key=cost)
            self._turns[needed] += 1
            return self._modes[needed]


class Fuzzer:
    """Gives workers blocks of programs until the time is over or somebody stops it."""

    def __init__(self, given: argparse.Namespace, journal: Journal) -> None:
        self.given = given
        self.journal = journal
        self.deadline = time.monotonic() + given.seconds
        self.stopped = threading.Event()
        self._turns = Turns(given.modes.split(","))
        self._processes: dict[int, Process] = {}

    def work(self, place: int) -> None:
        """Keep one worker busy."""
        process: Process | None = None
        while not self._is_over():
            modes = self._turns.take(process.environment if process else None)
            if process and (process.environment != environment(modes[0]) or process.blocks >= MOST_BLOCKS):
                process.send("")
                process.end()
                process = None
            for mode in modes:
                if self._is_over():
                    break
                if process is None:
                    process = self._processes[place] = Process(mode, self.given)
                process.blocks += 1
                if not self._block(process, mode):
                    process = None
        if process is not None:
            process.send("")
            process.end()

    def _is_over(self) -> bool:
        return time.monotonic() >= self.deadline or self.stopped.is_set()

    def _block(self, process: Process, mode: str) -> bool:
        """Run a block; False when the process has ended."""
        first = self.journal.take(mode, self.given.kind, BLOCK)
        process.send(f"{mode} {first} {BLOCK} {self.given.kind or 'all'}")
        running = f"seed {first}"
        while (said := process.line()) != "done":
            if said is None:
                how = process.end()
                if not self.stopped.is_set():
                    self.journal.note(mode, process.version, "crash", "")
                    print(f"{mode}: {running} {how}", flush=True)
                return False
            word, _, rest = said.partition(" ")
            if word == "begin":
                running = rest
            elif word != "alive":
                kind, _, text = rest.partition(" ")
                self.journal.note(mode, process.version, word, kind)
                if word == "fail":
                    print(f"{mode}: fail {text}", flush=True)
        return True

    def stop(self) -> None:
        """End all workers; what they have said so far is counted."""
        self.stopped.set()
        for process in list(self._processes.values()):
            process.kill()


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed of modes that the journal does not have")
    parser.add_argument("--modes", default=",".join((*EVERYWHERE, "python")), help="of " + ", ".join(MODES))
    parser.add_argument("--kind", choices=KINDS, help="programs of this kind alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--oracle", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--executions", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    return parser.parse_args()


def main() -> int:
    """Fuzz for the time given."""
    given = parsed()
    given.folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(given.folder / "journal.json", given.seed)
    fuzzer = Fuzzer(given, journal)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: fuzzer.stop())
    threads = [threading.Thread(target=fuzzer.work, args=(place,)) for place in range(given.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.save()
    print(table(journal.counts))
    return int(journal.failed())


if __name__ == "__main__":
    raise SystemExit(main())
