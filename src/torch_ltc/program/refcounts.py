"""Which objects of a list someone else holds, by counting references."""

from __future__ import annotations

import sys
from typing import TypeVar

Item = TypeVar("Item")


def _counts(items: list[Item]) -> list[int]:
    count = sys.getrefcount
    return [count(item) for item in items]


# What the count of an object is that only the list holds: measured, because interpreters differ in what they count.
_LIST_ALONE = _counts([object()])[0]


def held_elsewhere(items: list[Item]) -> list[Item]:
    """The items that something besides this list holds. They must be in no other list of the caller's."""
    return [item for item, count in zip(items, _counts(items), strict=True) if count > _LIST_ALONE]
