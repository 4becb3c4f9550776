"""The compiler process: compiles programs for its parent, requests on standard input, answers on standard output.

It has no terminal, no signals of the user's and none of the user's modules. It ends when it has had nothing to do for a
while, or with its parent: what it compiles then it may finish, within a time limit, and write to disk.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from torch_ltc.compile.artifacts import Destination, variant_text
from torch_ltc.errors import LtcError
from torch_ltc.lowering.interface import refusal
from torch_ltc.lowering.lower import lower
from torch_ltc.lowering.serialize import NotSerializableError, dump_executable, load_data
from torch_ltc.lowering.versions import versions_text
from torch_ltc.pytorch.private import set_threads

__all__ = ["Answer", "main", "read_message", "write_message"]

_LENGTH = struct.Struct("<Q")
_IDLE_S = 600.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: the executable as bytes, or the parts of the error with which the backend refuses the
    program, or why this process is unable to compile it."""

    data: bytes = b""
    duration_s: float = 0.0
    refused: tuple[str, str, str | None, str | None, str] | None = None
    unable: str = ""
    # What tells the executable from others of the same key on disk.
    variant: str = ""


def write_message(pipe: IO[bytes], message: bytes) -> None:
    """Write one message, its length first."""
    left = memoryview(_LENGTH.pack(len(message)) + message)
    while left:
        # A pipe without a buffer takes as much as fits.
        left = left[pipe.write(left) :]
    pipe.flush()


def read_message(pipe: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the pipe."""
    head = _read(pipe, _LENGTH.size)
    return None if head is None else _read(pipe, _LENGTH.unpack(head)[0])


def _read(pipe: IO[bytes], count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = pipe.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def answer(request: bytes) -> Answer:
    """Compile one request."""
    began = time.perf_counter()
    try:
        versions, rest, *_ = pickle.loads(request)
        if versions != versions_text():
            return Answer(unable="the files of torch_ltc or PyTorch have changed since the parent began")
        torch_state, threads, backend, asked, strict = load_data(rest)
    except NotSerializableError as error:
        return Answer(unable=str(error))
    except Exception as error:
        return Answer(unable=f"{type(error).__name__}: {error}")
    set_threads(threads)
    torch_state.enter()
    try:
        executable = lower(backend, asked.program, asked.numbers, asked.varying, strict, asked.specialization)
        data = dump_executable(backend, asked.program, executable)
    except NotSerializableError as error:
        return Answer(unable=str(error))
    except Exception as error:
        made = refusal(backend.name, asked.program, error)
        return Answer(refused=_parts(made, error))
    if data is None:
        return Answer(unable=f"{backend.name} cannot serialize what it made of this program")
    return Answer(data, time.perf_counter() - began, variant=variant_text(executable))


def _parts(error: LtcError, cause: Exception) -> tuple[str, str, str | None, str | None, str]:
    trace = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    return type(error).__name__, str(error), error.source, error.hint, trace


def main() -> None:
    """Answer until the parent is gone or has no more to ask."""
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever libraries print must not be taken for an answer.
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    work = _Work()
    threading.Thread(target=_listen, args=(requests, work, os.getppid()), daemon=True).start()
    while True:
        try:
            request = requests.get(timeout=_IDLE_S)
        except queue.Empty:
            break
        made = answer(request)
        if not work.orphaned.is_set():
            try:
                write_message(answers, pickle.dumps(made))
            except BrokenPipeError:
                work.orphaned.set()
        work.end(made)
    os._exit(0)


class _Work:
    """The request under way, from its arrival on, and whether the parent is still there for the answer."""

    def __init__(self) -> None:
        self.orphaned = threading.Event()
        self._ended = threading.Event()
        self._destination: Destination | None = None

    def begin(self, request: bytes) -> None:
        """Note where the answer goes when the parent is gone."""
        with suppress(Exception):
            self._destination = pickle.loads(request)[2]

    def end(self, made: Answer) -> None:
        """Write the answer to disk if the parent is gone."""
        if self.orphaned.is_set() and self._destination is not None and made.data:
            self._destination.save(made.variant, made.data)
        self._destination = None
        self._ended.set()

    def finish(self) -> None:
        """Return when the request under way is answered, or its time is over. The parent is gone."""
        self._ended.clear()
        self.orphaned.set()
        destination = self._destination
        if destination is not None:
            self._ended.wait(destination.limit_s)


def _listen(requests: queue.SimpleQueue[bytes], work: _Work, parent: int) -> None:
    """Take requests, and end this process and the compilers that it started when the parent is gone.

    The pipe alone does not tell: a process that the parent forked has its other end too.
    """
    # Without a buffer: `select` must see what has not been read.
    with open(sys.stdin.fileno(), "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], _LOOK_S)
            message = read_message(pipe) if ready else b""
            if message is None or os.getppid() != parent:
                work.finish()
                os.killpg(os.getpgrp(), signal.SIGKILL)
            if message:
                # Here: the end of the pipe may come before the other thread has seen the request.
                work.begin(message)
                requests.put(message)


if __name__ == "__main__":
    main()
