"""Starts the ranks of a test as processes of their own, and leaves none behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank that has ended: its exit status, and what it wrote. The status is None for one that was stopped."""

    status: int | None
    output: str
    errors: str


def run_ranks(folder: Path, size: int, module: str, *arguments: str, timeout_s: float = 120) -> list[Ended]:
    """Run `module` as each of `size` ranks; those that have not ended in time are killed."""
    store = folder / "store"
    store.unlink(missing_ok=True)
    processes: list[subprocess.Popen[str]] = []
    files = []
    try:
        for rank in range(size):
            files.append((open(folder / f"out.{rank}", "w+"), open(folder / f"err.{rank}", "w+")))  # noqa: SIM115
            command = [sys.executable, "-m", module, "--store", str(store), "--rank", str(rank), "--size", str(size)]
            # As `torchrun` does: each rank has a device of its own, ltc:0, ltc:1, ...
            environment = {**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            out, err = files[-1]
            processes.append(
                subprocess.Popen([*command, *arguments], stdout=out, stderr=err, text=True, env=environment)
            )
        end = time.monotonic() + timeout_s
        for process in processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    ended = []
    for status, (out, err) in zip(statuses, files, strict=True):
        out.seek(0)
        err.seek(0)
        ended.append(Ended(status, out.read(), err.read()))
        out.close()
        err.close()
    return ended
