"""Backends that are wrong on purpose, each in one way, and right ones to compare them with.

All run programs with PyTorch's own kernels, through the reference, and spoil what goes in or comes out.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from torch_ltc.errors import CompileError
from torch_ltc.lowering.interface import Arguments, Backend, Computation, Outcome
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program


class Run(Computation):
    """A program that runs as it should."""

    def __init__(self, program: Program) -> None:
        self.program = program
        reference = registry.reference.compile(program)
        assert isinstance(reference, Computation)
        self.right = reference

    def run(self, arguments: Arguments) -> Outcome:
        return self.right.run(arguments)


def copied(arguments: Arguments) -> Arguments:
    """The same arguments in other memory: nothing that is written to them lasts."""
    held: list[Any] = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments.inputs]
    return Arguments(held, arguments.scalars, arguments.generator, arguments.device, arguments.sources)


class Right(Backend):
    """Takes everything and runs it as it should."""

    name = "right"
    computation: type[Run] = Run

    def compile(self, program: Program) -> Computation:
        return self.computation(program)


class _Float64(Run):
    def run(self, arguments: Arguments) -> Outcome:
        outcome = super().run(arguments)
        outcome.results = [each.double() if isinstance(each, torch.Tensor) else each for each in outcome.results]
        return outcome


class ReturnsFloat64(Right):
    name = "returns_float64"
    computation = _Float64


class _Shape(Run):
    def run(self, arguments: Arguments) -> Outcome:
        outcome = super().run(arguments)
        outcome.results = [each.unsqueeze(0) if isinstance(each, torch.Tensor) else each for each in outcome.results]
        return outcome


class WrongShape(Right):
    name = "wrong_shape"
    computation = _Shape


class _Swapped(Run):
    def run(self, arguments: Arguments) -> Outcome:
        outcome = super().run(arguments)
        first, *rest = outcome.results or [None]
        for place, other in enumerate(rest, 1):
            if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor) and _alike(first, other):
                outcome.results[0], outcome.results[place] = other, first
                break
        return outcome


def _alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)


class SwapsResults(Right):
    """Of results that look the same the first two are swapped: nothing but their values tells."""

    name = "swaps_results"
    computation = _Swapped


class _DrawnTwice(Run):
    def run(self, arguments: Arguments) -> Outcome:
        if self.program.random:
            super().run(copied(arguments))
        return super().run(arguments)


class DrawsTwice(Right):
    name = "draws_twice"
    computation = _DrawnTwice


class _Redrawn(Run):
    state: torch.Tensor | None = None

    def run(self, arguments: Arguments) -> Outcome:
        if self.program.random:
            if self.state is None:
                self.state = arguments.generator.get_state()
            arguments.generator.set_state(self.state)
        return super().run(arguments)


class DrawsTheSame(Right):
    """Each run of a program draws the numbers of its first run; does not claim eager's."""

    name = "draws_the_same"
    computation = _Redrawn
    eager_random = False


class _WithoutWrites(Run):
    def run(self, arguments: Arguments) -> Outcome:
        return super().run(copied(arguments))


class DropsWrites(Right):
    name = "drops_writes"
    computation = _WithoutWrites


class _FirstNumbers(Run):
    numbers: list[object] | None = None

    def run(self, arguments: Arguments) -> Outcome:
        if self.numbers is None:
            self.numbers = list(arguments.scalars)
        arguments.scalars = self.numbers
        return super().run(arguments)


class IgnoresNumbers(Right):
    """Takes the run-time numbers of the first run for constants."""

    name = "ignores_numbers"
    computation = _FirstNumbers


class _FirstResults(Run):
    kept: list[torch.Tensor] | None = None

    def run(self, arguments: Arguments) -> Outcome:
        outcome = super().run(arguments)
        if self.program.inputs or self.program.random:
            return outcome
        if self.kept is None:
            self.kept = [each for each in outcome.results if isinstance(each, torch.Tensor)]
        outcome.results = [*self.kept]
        return outcome


class SharesConstants(Right):
    """A program that depends on nothing is run once, and its results are handed out again and again."""

    name = "shares_constants"
    computation = _FirstResults


class _Merged(Run):
    def run(self, arguments: Arguments) -> Outcome:
        outcome = super().run(arguments)
        for place, each in enumerate(outcome.results):
            for earlier in outcome.results[:place]:
                if isinstance(each, torch.Tensor) and isinstance(earlier, torch.Tensor) and torch.equal(each, earlier):
                    outcome.results[place] = earlier
        return outcome


class MergesResults(Right):
    """Results that are equal are one tensor."""

    name = "merges_results"
    computation = _Merged


class _Inexact(Run):
    def run(self, arguments: Arguments) -> Outcome:
        outcome = super().run(arguments)
        for each in outcome.results:
            if isinstance(each, torch.Tensor) and each.dtype.is_floating_point:
                each.mul_(1.001)
        return outcome


class Inexact(Right):
    name = "inexact"
    computation = _Inexact


class NoProducts(Right):
    """Refuses every program with a matrix product, and says so in its table."""

    name = "no_products"
    known_gaps = {"m*/*/refused": "there are no matrix products"}  # noqa: RUF012 (the table is never changed)

    def compile(self, program: Program) -> Computation:
        for call in program.calls:
            if call.name.removesuffix(".out").rstrip("_") in ("aten::mm", "aten::addmm"):
                raise CompileError(f"no rule for {call.name}")
        return super().compile(program)


class _Fatal(Run):
    def run(self, arguments: Arguments) -> Outcome:
        if any(call.name == "aten::exp" for call in self.program.calls):
            os.abort()
        return super().run(arguments)


class Crashes(Right):
    name = "crashes"
    computation = _Fatal


class _Endless(Run):
    def run(self, arguments: Arguments) -> Outcome:
        while any(call.name == "aten::exp" for call in self.program.calls):
            time.sleep(1)
        return super().run(arguments)


class Hangs(Right):
    name = "hangs"
    computation = _Endless


class _Failing(Run):
    def run(self, arguments: Arguments) -> Outcome:
        raise ValueError("out of order")


class FailsToRun(Right):
    """Takes every program, and fails when it is to run it."""

    name = "fails_to_run"
    computation = _Failing
