"""Locks that remember in which order they were taken: `install` before `torch_ltc` is imported.

Every lock that a line of the package makes is wrapped. Taking one while another is held is an edge; a cycle of edges is
a deadlock that waits for its day. Waiting for a worker with the recorder's lock held is one, too.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

MADE = re.compile(r"(\w+) = (?:threading\.(?:Lock|RLock)|Condition)\(")
RECORDER = "record/recorder.py lock"
_RECORD = Path(__file__).resolve().parents[2] / "docs" / "decisions" / "0010-one-recorder-for-all-threads.md"
_ROW = re.compile(r"^\| (\d) \| `([\w/]+\.py) (\w+)` \|", re.MULTILINE)

# Pairs of locks: the second was taken while the first was held.
edges: set[tuple[str, str]] = set()
taken: set[str] = set()
faults: list[str] = []
_held = threading.local()


def documented() -> dict[str, int]:
    """The level of each lock, by its name."""
    return {f"{file} {attribute}": int(level) for level, file, attribute in _ROW.findall(_RECORD.read_text())}


def out_of_order() -> list[str]:
    """What was seen since the last time that is not in the order that is written down."""
    levels = documented()
    wrong = [f"{after} is taken while {before} is held" for before, after in edges if levels[before] >= levels[after]]
    found = [*faults, *sorted(wrong)]
    edges.clear()
    faults.clear()
    return found


def held() -> list[str]:
    """The names of the locks that this thread holds, the first taken first."""
    if not hasattr(_held, "names"):
        _held.names = []
    names: list[str] = _held.names
    return names


class CheckedLock:
    """A lock, or reentrant lock, that notes what was held when it was taken."""

    def __init__(self, lock: Any, name: str) -> None:
        self._lock = lock
        self._name = name

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock."""
        if not self._lock.acquire(blocking, timeout):
            return False
        names = held()
        taken.add(self._name)
        if self._name not in names:
            edges.update((before, self._name) for before in names)
        names.append(self._name)
        return True

    def release(self) -> None:
        """Give it back."""
        self._lock.release()
        names = held()
        del names[len(names) - 1 - names[::-1].index(self._name)]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()

    # What conditions, and the recorder, ask of a reentrant lock.

    def _is_owned(self) -> bool:
        return self._name in held()

    def _release_save(self) -> Any:
        names = held()
        count = names.count(self._name)
        _held.names = [name for name in names if name != self._name]
        for _ in range(count):
            self._lock.release()
        return count

    def _acquire_restore(self, count: Any) -> None:
        for _ in range(count):
            self.acquire()


def _name_of_maker() -> str:
    """The lock that a line of the package makes, as "folder/file.py attribute"; empty for others."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    file = frame.f_code.co_filename
    made = MADE.search(linecache.getline(file, frame.f_lineno))
    _, package, inside = file.rpartition("/torch_ltc/")
    return f"{inside} {made[1]}" if package and made else ""


def install() -> None:
    """Wrap the locks that the package makes from now on, and watch what is waited for."""

    def checking(make: Any) -> Any:
        def made() -> Any:
            name = _name_of_maker()
            return CheckedLock(make(), name) if name else make()

        return made

    threading.Lock, threading.RLock = checking(threading.Lock), checking(threading.RLock)  # type: ignore[misc]
    for method in ("result", "exception"):
        setattr(Future, method, _watched(getattr(Future, method)))


def _watched(wait: Any) -> Any:
    def watched(future: Future[Any], timeout: float | None = None) -> Any:
        if not future.done() and held():
            faults.append(f"waits for a worker with {held()}")
        return wait(future, timeout)

    return watched


def note_callback() -> None:
    """Called by code of the user's that the package calls: only the recorder's lock may be held around it."""
    others = [name for name in held() if name != RECORDER]
    if others:
        faults.append(f"calls a listener with {others}")
