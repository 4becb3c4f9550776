"""The table of semantics cases, and what a case is given to work with.

A case is a function of a `Stage` that gives tensors and numbers. It runs on the CPU and on the device, several rounds
on each, and what it gives must agree: values, dtypes, sizes, strides, and which tensors share memory. What cannot be
said by comparison it says with `Stage.claim`, which counts on the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc import api
from torch_ltc.errors import BackendError
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.tolerance import Tolerance


class SpecError(AssertionError):
    """A case found something untrue on the device."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The device and the round that a case runs in, and the backend under test."""

    device: str
    round: int
    backend: Backend

    @property
    def lazy(self) -> bool:
        """True on the device under test, False in eager."""
        return self.device == "ltc"

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """These values on the device, as data from outside: an input of the program."""
        return torch.tensor(values, dtype=dtype).to(self.device)

    def ramp(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """0.5, 1.5, 2.5 ... in this size, other values in each round, as data from outside."""
        count = torch.Size(size).numel()
        return (torch.arange(count).reshape(size) + 0.5 + self.round).to(dtype).to(self.device)

    def sync(self) -> None:
        """End the program, where there is one."""
        if self.lazy:
            api.sync()

    def claim(self, true: bool, otherwise: str) -> None:
        """Fail on the device with the message `otherwise` unless it is true."""
        if self.lazy and self.backend.computes and not true:
            raise SpecError(otherwise)


Function = Callable[[Stage], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    description: str
    function: Function
    tolerance: Tolerance | None
    """Wider than the default where errors add up."""
    slow: bool
    """Left out of a quick run."""
    compiled: bool
    """All its programs are expected to run in the backend's code."""


class Table:
    """The cases by name, in the order of their definition."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def case(
        self, *, tolerance: Tolerance | None = None, slow: bool = False, compiled: bool = True
    ) -> Callable[[Function], Function]:
        """Add the function that follows, under its own name; its docstring says what it shows."""

        def add(function: Function) -> Function:
            name: str = function.__name__
            description = (function.__doc__ or "").strip()
            if name in self._cases:
                raise BackendError(f"there are two semantics cases named {name!r}", hint="rename one")
            self._cases[name] = Case(name, description, function, tolerance, slow, compiled)
            return function

        return add

    def get(self, name: str) -> Case:
        """The case of this name."""
        return self._cases[name]

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases.values())

    def __len__(self) -> int:
        return len(self._cases)


table = Table()
case = table.case
