"""The compiler client: starts the compiler process when it is first needed, sends requests, ends it.

Used by one thread at a time.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from torch_ltc.compile.compiler_process import Answer, read_message, write_message
from torch_ltc.lowering.gil import CompileCancelled

__all__ = ["CompilerClient", "CompilerDied", "compiler_client"]

_NICENESS = 10
# A request fits, so that the process has all of it before it has started, should this one end meanwhile.
_PIPE_BYTES = 1 << 20
_LOOK_S = 0.1
# Not `-m`: the path is that of this process, whatever it has added to it, and nothing of the user's is imported.
_BOOT = (
    "import os, sys; os.nice({niceness}); sys.path[:] = {path!r}; "
    "from torch_ltc.compile.compiler_process import main; main()"
)


class CompilerDied(Exception):
    """The compiler process died in the middle of a request, or cannot be started."""


class CompilerClient:
    """The one compiler process of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requesting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        # True while the process works on a request whose answer it can write to disk itself.
        self._lasting = False

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def request(self, request: bytes, lasting: bool = False) -> Answer:
        """The answer to a compile request. Raises `CompilerDied`. With `lasting`, the compiler may go on with it when
        this process ends."""
        with self._requesting:
            self._lasting = lasting
            try:
                return self._request(request)
            finally:
                self._lasting = False

    def _request(self, request: bytes) -> Answer:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, request)
            while not select.select([process.stdout], [], [], _LOOK_S)[0]:
                if self._closed and self._process is None:
                    _close_pipes(process)
                    raise CompileCancelled
            message = read_message(process.stdout)
        except OSError:
            message = None
        if message is None:
            self.end()
            raise CompilerDied(f"the compiler process died with status {process.returncode}")
        made: Answer = pickle.loads(message)
        return made

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise CompilerDied("this process is ending")
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
            return self._process

    def end(self) -> None:
        """End the process, and the compilers that it started."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            _close_pipes(process)

    def close(self) -> None:
        """End the process and start none any more. What it may finish it finishes alone. At exit."""
        with self._lock:
            self._closed = True
            process = self._process
            if process is not None and self._lasting and process.poll() is None:
                self._process = None
                self._leave(process)
                return
        if process is not None:
            _kill(process)
            # Whoever reads from the pipes finds their end, and closes them.
            if self._requesting.acquire(blocking=False):
                self.end()
                self._requesting.release()

    def _leave(self, process: subprocess.Popen[bytes]) -> None:
        """Let the process go on alone: it sees the end of its input."""
        process.returncode = 0  # nothing to wait for
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()

    def forget(self) -> None:
        """In a process that was forked: the compiler belongs to the parent."""
        process = self._process
        self._lock = threading.Lock()
        self._requesting = threading.Lock()
        self._process = None
        if process is not None:
            process.returncode = 0  # nothing to wait for
            _close_pipes(process)


def _start() -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise CompilerDied("there is no Python to start")
    code = _BOOT.format(niceness=_NICENESS, path=[os.path.abspath(folder) for folder in sys.path])
    try:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A buffer has a lock: a process that is forked while a thread waits here could never close its copy.
            bufsize=0,
            # An interrupt from the terminal is for the user's process alone.
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerDied(f"no process can be started: {error}") from error
    assert process.stdin is not None
    # Users may not have that much, or no more.
    with suppress(OSError):
        fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.wait()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            # What was not written yet has no reader any more.
            with suppress(OSError):
                pipe.close()


compiler_client = CompilerClient()
os.register_at_fork(after_in_child=compiler_client.forget)
