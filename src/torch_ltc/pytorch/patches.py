"""Changes in PyTorch that can be undone: replaced attributes, and what was registered.

A replacement wraps whatever is there when it is applied. When it is undone and another package has wrapped it since,
what is there stays, and our part of it becomes a pass-through: calls go on to what we had found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch_ltc.errors import LtcError, UnsupportedTorchError
from torch_ltc.pytorch.entries import Entry, Patch, Registration, resolve
from torch_ltc.pytorch.table import table

__all__ = ["Changes", "Patches", "changes", "registers", "replaces"]

Around = Callable[[Any], Any]
Undo = Callable[[], object]
_INHERITED = object()


@dataclass(frozen=True, slots=True)
class _Replacement:
    """One replaced attribute: what was found there, what the owner itself had, and what is there instead."""

    owner: Any
    name: str
    found: Any
    own: Any
    ours: Any

    @classmethod
    def make(cls, owner: Any, name: str, ours: Any) -> _Replacement:
        made = cls(owner, name, getattr(owner, name, None), vars(owner).get(name, _INHERITED), ours)
        setattr(owner, name, ours)
        return made

    def undo(self) -> bool:
        """Put back what was there. False when what is there is not ours any more."""
        if vars(self.owner).get(self.name) is not self.ours:
            _pass_through(self.ours, self.found)
            return False
        if self.own is _INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)
        return True


def _passing(*args: Any, _found: Any, **kwargs: Any) -> Any:
    return _found(*args, **kwargs)


def _pass_through(ours: Any, found: Any) -> None:
    """Have the function call what it replaced, for whoever still holds it. A property or a class stays as it is: for
    other devices it does what PyTorch's does."""
    if isinstance(ours, FunctionType):
        # The code is replaced, so that no call pays for a look at a flag.
        ours.__kwdefaults__ = {"_found": found}
        ours.__code__ = _passing.__code__.replace(co_freevars=ours.__code__.co_freevars)
        ours.__defaults__ = None


class Patches:
    """A list of replaced attributes. A `with` block around it puts all of them back, the last one first."""

    def __init__(self) -> None:
        self._done: list[_Replacement] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give `owner` this attribute."""
        self._done.append(_Replacement.make(owner, name, value))

    def wrap(self, owner: Any, name: str, around: Around) -> None:
        """Replace an attribute by `around(attribute)`; a function keeps its name and docstring."""
        original = getattr(owner, name)
        made = around(original)
        self.put(owner, name, functools.wraps(original)(made) if isinstance(made, FunctionType) else made)

    def undo(self) -> bool:
        """Put everything back, the last one first. False if another package has wrapped one of them since."""
        clean = True
        while self._done:
            clean = self._done.pop().undo() and clean
        return clean

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()


def _apply(entry: Patch, around: Around) -> Undo:
    patches = Patches()
    if entry.is_present():
        owner, _, name = entry.path.rpartition(".")
        patches.wrap(resolve(owner), name, around)
    elif entry.is_expected():
        raise UnsupportedTorchError(f"PyTorch has no {entry.path}; without it: {entry.without}")
    return patches.undo


class Changes:
    """All changes of the package in PyTorch, by the path of their entries in the table."""

    def __init__(self) -> None:
        self._known: dict[str, Callable[[], Undo]] = {}
        self._undo: dict[str, Undo] = {}
        self._python_only: set[str] = set()
        self._active = False

    def replaces(self, path: str) -> Callable[[Around], Around]:
        """Use `around(attribute)` in place of the attribute of this path, while the package is installed."""
        entry = table.entry(path, Patch)

        def add(around: Around) -> Around:
            self._add(entry, functools.partial(_apply, entry, around))
            if entry.python_only:
                self._python_only.add(path)
            return around

        return add

    def registers(self, path: str) -> Callable[[Callable[[], Undo]], Callable[[], Undo]]:
        """Call the function when the package is installed; what it returns undoes it."""
        entry = table.entry(path, Registration)

        def add(start: Callable[[], Undo]) -> Callable[[], Undo]:
            self._add(entry, start)
            return start

        return add

    def _add(self, entry: Entry, start: Callable[[], Undo]) -> None:
        if entry.path in self._known:
            raise LtcError(f"{entry.path} is changed already", hint="one change per entry of the table")
        self._known[entry.path] = start
        if self._active:
            # A backend that is loaded later.
            self._undo[entry.path] = start()

    def known(self) -> list[str]:
        """Paths of all changes that there are replacements for."""
        return list(self._known)

    def install(self, native: bool = False) -> None:
        """Make all changes that are not made yet; with the extension in C++ those that it needs too."""
        self._active = True
        for path, start in self._known.items():
            if path not in self._undo and not (native and path in self._python_only):
                self._undo[path] = start()

    def uninstall(self) -> list[str]:
        """Undo all changes, the last one first; returns the paths of those that another package has wrapped since."""
        self._active = False
        left = []
        while self._undo:
            path, undo = self._undo.popitem()
            if undo() is False:
                left.append(path)
        return left


changes = Changes()
replaces = changes.replaces
registers = changes.registers
