"""The interface between the runtime and a backend.

A backend turns a `Program` into a `Computation`; running a computation gives one physical tensor per program output.
Inputs that the program writes to are written in place.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_ltc.errors import LtcError
from torch_ltc.program.instruction import Program
from torch_ltc.program.source import Source


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a computation runs on: one physical tensor (or the error that lost it) per program input, the run-time
    numbers, the random generator and the device."""

    inputs: Sequence[torch.Tensor | LtcError]
    scalars: Sequence[object]
    generator: torch.Generator
    device: torch.device
    # Where calls that may fail were recorded this time, by the identity of the call.
    sources: Mapping[int, Source] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What a run produced: a tensor, or the error that lost it, per output; and the errors of the calls that failed,
    each to be raised once."""

    results: list[torch.Tensor | LtcError]
    failures: list[LtcError] = field(default_factory=list)


class Computation(abc.ABC):
    """A program made ready to run."""

    @abc.abstractmethod
    def run(self, arguments: Arguments) -> Outcome:
        """Run once. On the executor's thread."""

    @abc.abstractmethod
    def to_string(self) -> str:
        """The backend's own text for the program."""


class Backend(abc.ABC):
    """Turns programs into computations. `name` is what `LTC_BACKEND` and the registry know it by."""

    name: str

    @abc.abstractmethod
    def compile(self, program: Program, device: torch.device) -> Computation:
        """A computation for `program` on the physical `device`. Raises `CompileError` when it cannot."""
