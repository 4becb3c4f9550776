"""Hooks: the one mechanism by which a lower layer calls what an upper layer adds.

An event is a value that says what happened, for any number of observers; a hook hands over live objects to parts of the
package itself. `HOOKS` lists them, with when they are called; each setting has one more (`Settings.watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = ["HOOKS", "Hook"]

P = ParamSpec("P")
R = TypeVar("R")

HOOKS: dict[str, Hook[Any, Any]] = {}


class Hook(Generic[P, R]):
    """A named list of callbacks, called in the order in which they were added."""

    __slots__ = ("name", "called", "_callbacks")

    def __init__(self, name: str, called: str, *, listed: bool = True) -> None:
        if name in HOOKS:
            raise ValueError(f"there is a hook {name!r} already")
        self.name = name
        self.called = called
        self._callbacks: tuple[Callable[P, R], ...] = ()
        if listed:
            HOOKS[name] = self

    def add(self, callback: Callable[P, R]) -> Callable[[], None]:
        """Call this from now on; the result removes it again."""
        self._callbacks = (*self._callbacks, callback)

        def remove() -> None:
            """Call it no more."""
            self._callbacks = tuple(one for one in self._callbacks if one is not callback)

        return remove

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call every callback."""
        for callback in self._callbacks:
            callback(*args, **kwargs)

    def __iter__(self) -> Iterator[Callable[P, R]]:
        return iter(self._callbacks)

    def __bool__(self) -> bool:
        return bool(self._callbacks)
