"""Known differences from eager, each with the reason: the device's own table, and the reading of a backend's.

A key is `OPERATOR`, `OPERATOR/DTYPE` or `OPERATOR/DTYPE/WHAT`, where WHAT is a value of `records.What`; of a semantics
case it is `semantics/CASE` or `semantics/CASE/WHAT`. Each part may be a pattern as in `fnmatch`. A gap that no longer
shows in a full run is an error: remove its line.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch_ltc.testing.records import AnyUnit, Unit

SEMANTICS = "semantics"

_DATA = "eager looks at the data, which the device does when its program runs"

DEVICE_GAPS: dict[str, str] = {
    "gather/*/late": _DATA,
    "scatter/*/late": _DATA,
    "scatter_add/*/late": _DATA,
    "multinomial/*/late": _DATA,
    "masked_fill/*/late": _DATA,
}
"""Gaps of the device whatever the backend: they come from recording, not from compiling."""


class Gaps:
    """The known gaps of one backend: the device's and its own."""

    def __init__(self, own: Mapping[str, str]) -> None:
        self._own = dict(own)

    def all(self) -> dict[str, str]:
        """Every gap with its reason."""
        return {**DEVICE_GAPS, **self._own}

    def find(self, unit: AnyUnit, what: str) -> str | None:
        """The key of the gap that covers a failure of a unit, if there is one."""
        name = _name(unit, what)
        return next((key for key in self.all() if _covers(key, name)), None)

    def reason(self, key: str) -> str:
        """The reason of a gap."""
        return self.all()[key]

    def concerns(self, key: str, unit: AnyUnit) -> bool:
        """True for a unit that could show the gap."""
        # Eager compared with itself has no gaps to show.
        return unit.device != "cpu" and _covers(key, _name(unit, _parts(key)[-1]))


def _name(unit: AnyUnit, what: str) -> tuple[str, str, str]:
    return (unit.operator, unit.dtype, what) if isinstance(unit, Unit) else (SEMANTICS, unit.case, what)


def _parts(key: str) -> tuple[str, ...]:
    return (*key.split("/"), "*", "*")[:3]


def _covers(key: str, name: tuple[str, str, str]) -> bool:
    return all(fnmatch.fnmatchcase(part, pattern) for part, pattern in zip(name, _parts(key), strict=True))
