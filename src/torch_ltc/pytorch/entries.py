"""Entries of the seam's table, and their probes: what the package needs of PyTorch that PyTorch does not promise."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from torch_ltc.errors import LtcError
from torch_ltc.pytorch.versions import CURRENT, OLDEST, Version

__all__ = ["Interface", "Patch", "Registration", "Risk", "Table", "failing_probes", "resolve", "table", "takes"]

Check = Callable[[Any], object]
Kind = TypeVar("Kind", bound="Entry")


class Risk(Enum):
    """The way in which another version of PyTorch could break an entry."""

    EXPERIMENTAL = "PyTorch calls it experimental: it may change in any release"
    INTERNAL = "no promise: it may be renamed, moved, or take other arguments in any release"
    BINDING = "a C++ binding: its arguments may change, and nothing but a call shows it"
    STABLE = "private by its name, but many packages use it: it has not changed for years"
    CALLERS = "the name is public; PyTorch may stop to call it by that name"


@dataclass(frozen=True, slots=True)
class Entry:
    """Something of PyTorch that the package depends on: why, and what breaks without it."""

    path: str
    why: str
    without: str
    risk: Risk = Risk.INTERNAL
    since: Version = OLDEST
    until: Version | None = None
    # True, or a value that counts as true, for the object as the package expects it.
    check: Check = callable

    def is_expected(self) -> bool:
        """True when this version of PyTorch should have it."""
        return self.since <= CURRENT and (self.until is None or self.until >= CURRENT)

    def probe(self, load: bool = True) -> str | None:
        """The reason why the package cannot use it, with what breaks, or None. Without `load` no module is imported:
        of a module that is not loaded yet the source text is searched."""
        if not self.is_expected():
            return None
        try:
            source = None if load else _unloaded_source(self.path)
            if source is not None:
                fine: object = re.search(rf"\b{self.path.rpartition('.')[2]}\b", source)
            else:
                fine = self.check(resolve(self.path))
        except Exception as error:
            return f"{self.path}: {type(error).__name__}: {error}; without it: {self.without}"
        return None if fine else f"{self.path} is not as expected; without it: {self.without}"


@dataclass(frozen=True, slots=True)
class Interface(Entry):
    """A private interface that the package uses."""


@dataclass(frozen=True, slots=True)
class Patch(Entry):
    """An attribute of PyTorch that the package replaces."""

    # Nothing breaks when PyTorch does not have it.
    optional: bool = False
    # The extension in C++ does without it.
    python_only: bool = False

    def is_present(self) -> bool:
        """True when there is something to replace."""
        owner, _, name = self.path.rpartition(".")
        try:
            return hasattr(resolve(owner), name)
        except (AttributeError, ImportError):
            return False

    def is_expected(self) -> bool:
        """True when this version of PyTorch should have it."""
        return Entry.is_expected(self) and (not self.optional or self.is_present())


@dataclass(frozen=True, slots=True)
class Registration(Entry):
    """A change in PyTorch by one of its registration interfaces; `path` says in words what is changed."""

    # Registered again by `install()` after `uninstall()` has taken it out; else it lasts as long as the process.
    reversible: bool = True

    def probe(self, load: bool = True) -> str | None:
        """None: what is registered is an interface with an entry of its own."""
        return None


class Table:
    """Entries by path. A second one for the same path is an error."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def add(self, *entries: Entry) -> None:
        """Add entries."""
        for entry in entries:
            if entry.path in self._entries:
                raise LtcError(f"{entry.path} is in the table already", hint="one entry says all that it is needed for")
            self._entries[entry.path] = entry

    def entries(self, kind: type[Kind]) -> list[Kind]:
        """The entries of a kind, in the order in which they were added."""
        return [entry for entry in self._entries.values() if isinstance(entry, kind)]

    def entry(self, path: str, kind: type[Kind]) -> Kind:
        """The entry of this path; raises when there is none of this kind."""
        found = self._entries.get(path)
        if not isinstance(found, kind):
            raise LtcError(
                f"{path} has no {kind.__name__} in the table",
                hint="add one to pytorch/table.py, or to the private.py of the backend",
            )
        return found


table = Table()


def failing_probes() -> list[str]:
    """A line for each probe that fails on this PyTorch, with the feature that breaks; imports nothing."""
    probed = (entry.probe(load=False) for entry in table.entries(Entry))
    return [problem for problem in probed if problem is not None]


def resolve(path: str) -> Any:
    """The object of a dotted path; modules on the way are imported."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            importlib.import_module(".".join(parts[:end]))
        elif not hasattr(found, part):
            # A package may have something else under the name of a module of its own.
            found = sys.modules.get(".".join(parts[: end - 1]), found)
        found = getattr(found, part)
    return found


def _unloaded_source(path: str) -> str | None:
    """The text of the module that `path` begins with, if it is written in Python and not loaded."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 1, -1):
        file = Path(torch.__file__).parent.joinpath(*parts[1:end])
        for candidate in (file.with_suffix(".py"), file / "__init__.py"):
            if candidate.exists():
                return None if ".".join(parts[:end]) in sys.modules else candidate.read_text()
    return None


def takes(*names: str) -> Check:
    """A check that a Python function's parameters begin with these names."""

    def check(function: Any) -> bool:
        return tuple(inspect.signature(function).parameters)[: len(names)] == names

    return check
