"""The worker processes of a run: none outlives it, and none is taken for crashed that the run itself has ended."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import IO

ENVIRONMENT = {"LTC_CACHE_DIR": "off", "LTC_EAGER_REGIONS": "off", "LTC_FALLBACK": "allow"}
"""Of workers: thousands of programs that nobody will run again have no place in the user's cache; most tests read after
every few calls, so that with eager regions they would hardly test what is recorded; and some count warnings."""


class Stopped(Exception):
    """The run was stopped: the test that was under way has no result."""


class Workers:
    """The worker processes under way; once stopped, no more begin."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def run(self, command: Sequence[str], names: Iterable[str], log: IO[bytes]) -> int:
        """The exit status of a worker that was given names of tests; what it prints is in `log`."""
        environment = {**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
        with self._lock:
            if self.stopped:
                raise Stopped
            # A session of its own: an interrupt of the terminal's is for the runner, and a test's children end with it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            # The pipe stays open: a worker whose runner was killed sees its end.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("".join(f"{name}\n" for name in (*names, "")).encode())
                process.stdin.flush()
            status = process.wait()
        finally:
            with self._lock:
                self._running.discard(process)
            _end(process)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if self.stopped:
            raise Stopped
        return status

    def stop(self) -> None:
        """End all that run, and those that would begin."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                _end(process)


def _end(worker: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
