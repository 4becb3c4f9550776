"""The reference backend: runs a program call by call with PyTorch's own kernels.

A call that fails loses its own results and whatever depends on them; the rest of the program still runs. On a call's
first run its results are compared with the geometry that was recorded: results that lie in memory in another way are
copied into the recorded layout, then and in every later run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.errors import ExecutionError, InferenceError, LtcError
from torch_ltc.events import MismatchEvent, emit
from torch_ltc.lowering.calls import fill, flatten_results, laid_out
from torch_ltc.lowering.interface import Arguments, Backend, Computation, Outcome
from torch_ltc.program.instruction import (
    Call,
    DeviceGenerator,
    PhysicalDevice,
    Program,
    ReturnKind,
    Scalar,
    Value,
)
from torch_ltc.program.render import program_text
from torch_ltc.program.source import Source
from torch_ltc.program.spec import spec_of


class InterpreterBackend(Backend):
    """Compiles nothing."""

    name = "interpreter"
    exact_values = True

    def compile(self, program: Program) -> Computation:
        """A computation that walks the program."""
        return Interpretation(program)


class _Step:
    """One call with the places in its arguments that change from run to run, and what is dead after it."""

    # A plain slots class: there is one per call of every program, and the loop below reads it.
    __slots__ = ("call", "args", "kwargs", "fills", "named", "dead", "single")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.args = [_constant(a) for a in call.args]
        self.kwargs = {k: _constant(v) for k, v in call.kwargs.items()}
        self.fills = [(i, a) for i, a in enumerate(call.args) if _changes(a)]
        self.named = [(k, v) for k, v in call.kwargs.items() if _changes(v)]
        self.dead: tuple[int, ...] = ()
        returns = call.returns
        fresh = (ReturnKind.FRESH, ReturnKind.VIEW)
        is_single = len(returns) == 1 and not isinstance(returns[0], tuple) and returns[0].kind in fresh
        self.single = call.numbers[0] if is_single else -1


def _changes(operand: object) -> bool:
    if isinstance(operand, tuple):
        return any(_changes(item) for item in operand)
    return isinstance(operand, (Value, Scalar, DeviceGenerator, PhysicalDevice))


def _constant(operand: object) -> object:
    return None if _changes(operand) else list(operand) if isinstance(operand, tuple) else operand


class _Lost(Exception):
    """An operand of the call was lost to an earlier failure."""

    def __init__(self, error: LtcError) -> None:
        self.error = error


class Interpretation(Computation):
    """A program as a list of steps."""

    def __init__(self, program: Program) -> None:
        self.program = self._program = program
        self._inputs = program.inputs
        self._steps = [_Step(call) for call in program.calls]
        self._roots = memory_roots(program)
        self._mark_last_uses()

    def to_string(self) -> str:
        """The program's text: there is no other form."""
        return program_text(self._program)

    def _mark_last_uses(self) -> None:
        kept = set(self._program.outputs) | {i.number for i in self._inputs}
        seen = set(kept)
        for step in reversed(self._steps):
            touched = [*step.call.operands, *(n for n in step.call.numbers if n >= 0)]
            step.dead = tuple({n for n in touched if n not in seen})
            seen.update(step.dead)

    def run(self, arguments: Arguments) -> Outcome:
        """Run every call once, in order."""
        values: list[Any] = [None] * self._program.values
        for instruction, tensor in zip(self._inputs, arguments.inputs, strict=True):
            values[instruction.number] = tensor
        failures: list[LtcError] = []
        for step in self._steps:
            try:
                self._run_step(step, values, arguments)
            except _Lost as lost:
                self._lose(step.call, values, lost.error)
            except Exception as error:
                source = arguments.sources.get(id(step.call), step.call.source)
                failure = _failure(step.call, values, error, source)
                failures.append(failure)
                self._lose(step.call, values, failure)
            for number in step.dead:
                values[number] = None
        return Outcome([values[n] for n in self._program.outputs], failures)

    def _lose(self, call: Call, values: list[Any], error: LtcError) -> None:
        """The call did not happen. What it would have made or written to is lost for the rest of the program. Memory
        from outside (parameters, optimizer state) keeps the value it has, as when eager stops at the error."""
        for number in call.numbers:
            if number >= 0:
                values[number] = error
        lost = {self._roots[n] for n in call.mutated}
        if lost:
            for number, root in enumerate(self._roots):
                if root in lost:
                    values[number] = error

    def _run_step(self, step: _Step, values: list[Any], arguments: Arguments) -> None:
        def value_of(number: int) -> Any:
            value = values[number]
            if isinstance(value, LtcError):
                raise _Lost(value)
            return value

        args = step.args
        if step.fills:
            args = args.copy()
            for position, operand in step.fills:
                args[position] = fill(operand, value_of, arguments)
        kwargs = step.kwargs
        if step.named:
            kwargs = dict(kwargs)
            for name, operand in step.named:
                kwargs[name] = fill(operand, value_of, arguments)
        call = step.call
        out = call.op(*args, **kwargs)
        copied = call.layout.copied
        if step.single >= 0:
            if copied == ():
                values[step.single] = out
                return
            results: Sequence[Any] = (out,)
        else:
            results = flatten_results(out, call)
        if copied is None:
            results = list(results)
            copied = call.layout.copied = _settle(call, results, [values[n] for n in call.operands])
        for position, (number, result) in enumerate(zip(call.numbers, results, strict=True)):
            if number >= 0:
                values[number] = laid_out(result, call.flat_returns[position].spec) if position in copied else result


def _settle(call: Call, results: list[Any], operands: list[Any]) -> tuple[int, ...]:
    """Compare real results with recorded geometry; say which fresh ones must be copied into it."""
    copied: list[int] = []
    used = {t.untyped_storage()._cdata for t in operands if isinstance(t, torch.Tensor)}
    for position, (expected, result) in enumerate(zip(call.flat_returns, results, strict=True)):
        if expected.kind not in (ReturnKind.FRESH, ReturnKind.VIEW):
            continue
        spec = expected.spec
        assert spec is not None
        if not isinstance(result, torch.Tensor):
            raise InferenceError(f"{call.name} returned {result!r} where {spec} was recorded", source=str(call.source))
        actual = spec_of(result)
        if actual.size != spec.size or actual.dtype is not spec.dtype:
            raise InferenceError(f"{call.name} returned {actual} where {spec} was recorded", source=str(call.source))
        if expected.kind is ReturnKind.VIEW:
            continue
        storage = result.untyped_storage()._cdata
        if actual is not spec or storage in used:
            copied.append(position)
            if actual is not spec:
                emit(MismatchEvent(call.name, repr(spec), repr(actual)))
        elif expected.group == position:
            used.add(storage)
    return tuple(copied)


def memory_roots(program: Program) -> list[int]:
    """For each value what stands for its memory: the value that defines it, or -1, -2 ... for an input buffer."""
    roots = [0] * program.values
    for instruction in program.inputs:
        roots[instruction.number] = -1 - instruction.buffer
    for call in program.calls:
        for item, number in zip(call.flat_returns, call.numbers, strict=True):
            if item.kind is ReturnKind.FRESH:
                roots[number] = call.numbers[item.group]
            elif item.kind is ReturnKind.VIEW:
                roots[number] = roots[call.operands[item.operand]]
    return roots


def _failure(call: Call, values: list[Any], error: Exception, source: Source) -> LtcError:
    if isinstance(error, LtcError):
        return error
    shapes = [repr(spec_of(values[n])) if isinstance(values[n], torch.Tensor) else "?" for n in call.operands]
    what = f"{call.name} failed when its program ran: {error}"
    failure = ExecutionError(what, op=call.name, input_shapes=shapes, source=str(source))
    failure.__cause__ = error
    return failure
