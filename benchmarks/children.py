"""The parent's side of a worker: starts it, asks it, and ends it whatever happens.

Every worker runs in a process group of its own with one thread, and with caches in a folder of its choice. A request
that takes too long, or a worker that dies, raises WorkerError; the group is gone then. Leaving `Child` as a context
ends the group too.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

END_TIMEOUT_S = 5.0
# Where compilers keep what they made. A fresh folder makes a first step a first step.
CACHE_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "LTC_CACHE_DIR": "ltc",
    "JAX_COMPILATION_CACHE_DIR": "jax",
    "XDG_CACHE_HOME": "xdg",
}
# For timing: freed memory is kept, by one arena for all threads. With glibc's defaults a large tensor that is freed
# goes back to Linux or not, as it happens to lie, and the page faults may then cost more than the arithmetic.
STEADY_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 1024**3),
    "MALLOC_TOP_PAD_": str(64 * 1024 * 1024),
}
# For memory: it goes back as soon as it is freed, so that the resident size is what is in use.
EXACT_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
CUDA_VARIABLE = "LTC_TS_CUDA"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerError(Exception):
    """A worker could not do what it was asked; the message says why."""


class Child:
    """A worker process for one workload on one system."""

    def __init__(
        self,
        system: str,
        workload: str,
        cache: Path,
        *,
        python: str = sys.executable,
        allocator: Mapping[str, str] = STEADY_ALLOCATOR,
        memory_limit_bytes: int = 0,
        physical: str = "cpu",
        threads: int = 1,
        open_timeout_s: float = 180.0,
    ) -> None:
        self.system = system
        self.workload = workload
        self._buffer = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        self._process = subprocess.Popen(
            [
                *(python, "-m", "benchmarks.worker", "--system", system, "--workload", workload),
                *("--memory-limit", str(memory_limit_bytes), "--physical", physical, "--threads", str(threads)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**environment(cache, physical, threads), **allocator},
            start_new_session=True,
        )
        try:
            self.opened = self._answer(open_timeout_s)
        except BaseException:
            self.close()
            raise
        if "unavailable" in self.opened:
            self.close()
            raise WorkerError(self.opened["unavailable"])

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, do: str, *, timeout_s: float, **request: Any) -> dict[str, Any]:
        """The worker's answer; raises WorkerError and ends it when it fails or takes too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # The worker is gone: reading the answer says so, with its exit status.
        try:
            answer = self._answer(timeout_s)
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            self.close()
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the worker and everything that it started in its group; a second time does nothing."""
        # Without its standard input the worker ends by itself.
        self._close_pipe(self._process.stdin)
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
        # Also when the worker has ended by itself: compilers that it started may still be there.
        self._kill()
        self._process.wait()
        self._close_pipe(self._process.stdout)
        self._errors.close()

    def _close_pipe(self, pipe: IO[bytes] | None) -> None:
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                return

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        line = self._line(timeout_s)
        if not line:
            # The pipe is closed: the process is ending, or cannot be talked to any more.
            try:
                status = self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise WorkerError("the process closed its pipe and did not end") from None
            raise WorkerError(f"the process ended with status {status}: {self._last_error()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _line(self, timeout_s: float) -> bytes:
        """The next line of the worker; empty when it closed its pipe."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise WorkerError(f"no answer within {timeout_s:.0f} s")
                received = os.read(self._process.stdout.fileno(), 65536)
                if not received:
                    return b""
                self._buffer += received
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"


def _share_extension(caches: Path) -> None:
    """Let a worker whose caches lie here find the extension that `ltc build` compiled: it is part of the package, and
    nothing that a first step makes."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = caches / "torch_ltc" / "native"
    shared.parent.mkdir(exist_ok=True, mode=0o700)
    if usual != caches and not shared.is_symlink():
        shared.symlink_to((usual / "torch_ltc" / "native").resolve(), target_is_directory=True)


def environment(cache: Path, physical: str = "cpu", threads: int = 1) -> dict[str, str]:
    """What a worker finds in its environment: the number of threads, caches below `cache`, and the device that
    computes. With `threads` 0, PyTorch chooses their number."""
    folders = {variable: str(cache / name) for variable, name in CACHE_VARIABLES.items()}
    for folder in folders.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    _share_extension(Path(folders["XDG_CACHE_HOME"]))
    # Taken out, not set to 0: the original asks whether the variable is there, whatever it holds.
    inherited = {name: value for name, value in os.environ.items() if name not in (CUDA_VARIABLE, *THREAD_VARIABLES)}
    chosen = {CUDA_VARIABLE: "1"} if physical == "cuda" else {}
    numbers = {name: str(threads) for name in THREAD_VARIABLES} if threads else {}
    return {**inherited, **numbers, "TOKENIZERS_PARALLELISM": "false", **folders, **chosen}
