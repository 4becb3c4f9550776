"""Attributes of PyTorch that are replaced while a script runs, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_INHERITED = object()


class Patches:
    """A list of replaced attributes. A `with` block around it puts all of them back, the last one first."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give `owner` this attribute."""
        self._before.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a function by `around(function)`, which keeps its name and docstring."""
        original = getattr(owner, name)
        self.put(owner, name, functools.wraps(original)(around(original)))

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *raised: object) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
