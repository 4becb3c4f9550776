"""Names of the machine's parts, for people."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

_TIME_LIMIT_S = 10.0


def cpu_name() -> str:
    """The processor's name and how many this process may use."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        # Not Linux: the name that Python knows will do.
        return f"{name}, {os.cpu_count()} threads"
    return f"{name}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} threads"


def first_line(*command: str) -> str:
    """The first line that a program prints, as compilers print their version; empty when there is no such program."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run: {error}"
    return next(iter((done.stdout or done.stderr).strip().splitlines()), "")
