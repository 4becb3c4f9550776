"""`python -m tests.fuzz.worker`: a process that runs blocks of programs, as `python -m tests.fuzz` tells it to.

A line of its input is a mode, the first seed and how many; its output has a line at the begin and the end of each
program, so that one which ends the process or hangs is known.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import torch

import torch_ltc
from tests.fuzz.check import Oracle, check, eager, shrink
from tests.fuzz.generate import generate
from tests.fuzz.modes import MODES, entered
from tests.fuzz.program import Mode, Program, script
from tests.fuzz.runner import Seen, Skip

PREFIX = "fuzz: "
# Programs after which the caches are emptied; until then each finds what others have recorded.
RESET_EVERY = 50
MOST_SHRUNK = 12
MOST_TRIES = 150
# On a CUDA device these end the process, in eager too.
_ASSERTS = re.compile("index|out of|Class values|probability|expected|must be", re.IGNORECASE)

_LOST = re.compile("device-side assert|CUDA error|unspecified launch failure")


class OtherProcess:
    """Eager on a device, in a process of its own: here autograd knows the lazy device alone."""

    def __init__(self, device: str) -> None:
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.oracle", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def __call__(self, program: Program) -> list[Seen]:
        """What is seen there."""
        if any(_ASSERTS.search(text) for seen in eager(program) for text in seen.messages.values()):
            raise Skip("would end the process on CUDA")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(program, self._process.stdin)
        self._process.stdin.flush()
        made: list[Seen] = pickle.load(self._process.stdout)
        return made

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()


class Worker:
    """Runs programs one by one."""

    def __init__(self, oracle: Oracle, folder: Path, executions: int) -> None:
        self.oracle = oracle
        self.folder = folder
        self.executions = executions
        self.failures = 0
        # The latest block: its seeds and kind, and by seed the programs with what eager shows.
        self._latest: tuple[int, int, str | None] | None = None
        self._programs: dict[int, Program] = {}
        self._seen: dict[str, list[Seen]] = {}

    def block(self, mode: Mode, first: int, count: int, kind: str | None) -> None:
        """Run the programs of the seeds from `first` on. The next mode runs the same ones, most often."""
        if self._latest != (first, count, kind):
            self._latest, self._programs, self._seen = (first, count, kind), {}, {}
        with entered(mode):
            for seed in range(first, first + count):
                if seed % RESET_EVERY == 0:
                    torch_ltc.ir_cache.reset()
                say(f"begin seed {seed}")
                program = self._programs.get(seed)
                if program is None:
                    try:
                        program = self._programs[seed] = generate(seed, self.executions, kind)
                    except Exception as error:
                        say(f"fail {kind or 'all'} the program of seed {seed} cannot be made: {error!r}"[:300])
                        continue
                say(f"begin {program.name}")
                word, text = self.one(program, mode)
                say(f"{word} {program.kind} {text}")
                if _LOST.search(text):
                    # Nothing more can be run on the device in this process.
                    os._exit(3)

    def one(self, program: Program, mode: Mode) -> tuple[str, str]:
        """Run one program: "ok", "skip" or "fail", and what failed."""
        try:
            found = check(program, mode, self._known)
        except Skip as reason:
            return "skip", str(reason)
        if not found:
            return "ok", ""
        self.failures += 1
        if self.failures <= MOST_SHRUNK and not _LOST.search(found):
            torch_ltc.ir_cache.reset()
            again = self._again(program, mode)
            if again:
                program, found = shrink(program, again, mode, self._told, MOST_TRIES)
            else:
                found += " (not alone: after the programs before it)"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{mode.name}-{program.name}.py"
        path.write_text(script(program, mode, found), encoding="utf-8")
        return "fail", f"{path.name}: {found.splitlines()[0][:300]}"

    def _known(self, program: Program) -> list[Seen]:
        """What the oracle shows, asked once for all modes."""
        seen = self._seen.get(program.name)
        if seen is None:
            seen = self._seen[program.name] = self.oracle(program)
        return seen

    def _again(self, program: Program, mode: Mode) -> str | None:
        try:
            return check(program, mode, self.oracle)
        except Skip:
            return None

    def _told(self, program: Program) -> list[Seen]:
        """The oracle, while a program is made smaller, which takes long where each try is compiled."""
        say("alive")
        return self.oracle(program)


def say(text: str) -> None:
    """A line for the process that started this one."""
    print(PREFIX + text, flush=True)


def main() -> int:
    """Do what the lines of the input say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--oracle", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--executions", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    worker = Worker(OtherProcess("cuda") if given.oracle == "cuda" else eager, given.folder, given.executions)
    say(f"ready {torch.__version__}")
    for line in sys.stdin:
        if not line.strip():
            break
        name, first, count, kind = line.split()
        worker.block(MODES[name], int(first), int(count), None if kind == "all" else kind)
        say("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
