"""The reference backend: runs a program call by call with PyTorch's own kernels.

A call that fails loses its own results and whatever depends on them; the rest of the program still runs. On a call's
first run its results are compared with the recorded specs: results that lie in memory in another way are
copied into the recorded layout, then and in every later run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ltc.errors import InferenceError, LtcError
from torch_ltc.events import MismatchEvent, emit
from torch_ltc.lowering.interface import Arguments, Backend, Computation, Outcome
from torch_ltc.lowering.kernel_call import fill, flatten_results, laid_out
from torch_ltc.lowering.kernel_errors import execution_error_class
from torch_ltc.lowering.native_calls import NativeCalls, native_calls
from torch_ltc.lowering.out_of_memory import make_room
from torch_ltc.program.instruction import (
    Call,
    Input,
    Program,
    Return,
    ReturnKind,
    Value,
)
from torch_ltc.program.spec import spec_of
from torch_ltc.program.text import program_text
from torch_ltc.pytorch.kernel_calls import call_kernel
from torch_ltc.source import Source


class InterpreterBackend(Backend):
    """Compiles nothing."""

    name = "interpreter"
    exact_values = True

    def compile(self, program: Program) -> Computation:
        """A computation that walks the program."""
        return Interpretation(program)


# What an argument may be besides an operand, and what a list of them may hold.
_NUMBERS = frozenset({int, float, bool})
_CONSTANT = frozenset({int, float, bool, complex, str, type(None), torch.dtype})


class _Lost(Exception):
    """An operand of the call was lost to an earlier failure."""

    def __init__(self, error: LtcError) -> None:
        self.error = error


class Interpretation(Computation):
    """A program, run as it is: most programs of a new kind are seen once, so that little is prepared."""

    def __init__(self, program: Program) -> None:
        self.program = self._program = program
        self._inputs = program.inputs
        self._calls = program.calls
        self._dead = _last_uses(program, self._inputs, self._calls)
        self._roots: list[int] = []
        # The calls in C++, made at the second run; None where there are none.
        self._native: NativeCalls | None = None
        self._runs = 0
        # A replay that looks at each call puts its own here.
        self._run_call: Callable[[Call, list[Any], Arguments], None] = run_recorded_call

    def to_string(self) -> str:
        """The program's text: there is no other form."""
        return program_text(self._program)

    def run(self, arguments: Arguments) -> Outcome:
        """Run every call once, in order."""
        values: list[Any] = [None] * self._program.values
        inputs = arguments.inputs
        for instruction, tensor in zip(self._inputs, inputs, strict=True):
            values[instruction.number] = tensor
        lost = any(isinstance(tensor, LtcError) for tensor in inputs)
        return self._run_from(0, values, arguments, self._native_calls(arguments), lost)

    def resume(self, index: int, values: list[Any], arguments: Arguments, error: Exception | None = None) -> Outcome:
        """Run the calls from this one on, with the values of those before it; the first has failed already if there is
        an error."""
        return self._run_from(index, values, arguments, None, False, error)

    def _run_from(
        self,
        index: int,
        values: list[Any],
        arguments: Arguments,
        native: NativeCalls | None,
        lost: bool,
        error: Exception | None = None,
    ) -> Outcome:
        failures: list[LtcError] = []
        run_call, calls, dead = self._run_call, self._calls, self._dead
        count = len(calls)
        while index < count:
            if native is not None and not lost:
                index, error = native.run(values, arguments, index)
                if index == count:
                    break
            call = calls[index]
            try:
                if error is not None:
                    raise error
                if lost:
                    _check_operands(call, values)
                run_call(call, values, arguments)
            except _Lost as reason:
                self._lose(call, values, reason.error)
            except Exception as raised:
                error = self._run_again(call, values, arguments, raised)
                if error is not None:
                    source = arguments.sources.get(id(call), call.source)
                    failure = _failure(call, values, error, source)
                    failures.append(failure)
                    self._lose(call, values, failure)
                    lost = True
            for number in dead[index]:
                values[number] = None
            index += 1
            error = None
        return Outcome([values[n] for n in self._program.outputs], failures)

    def _native_calls(self, arguments: Arguments) -> NativeCalls | None:
        """The calls in C++, from the second run on: how results lie in memory is known then."""
        self._runs += 1
        if self._runs == 2 and self._run_call is _RUN_CALL:
            self._native = native_calls(self._program, self._dead)
        return self._native if arguments.plain else None

    def _run_again(self, call: Call, values: list[Any], arguments: Arguments, error: Exception) -> Exception | None:
        """After a failure: run the call once more if memory was given back for it, and it writes to nothing. The error
        that remains, or None."""
        if call.mutated or not make_room(error):
            return error
        try:
            self._run_call(call, values, arguments)
        except Exception as again:
            return again
        return None

    def _lose(self, call: Call, values: list[Any], error: LtcError) -> None:
        """The call did not happen. What it would have made or written to is lost for the rest of the program. Memory
        from outside (parameters, optimizer state) keeps the value it has, as when eager stops at the error."""
        for number in call.numbers:
            if number >= 0:
                values[number] = error
        if not self._roots:
            self._roots = memory_roots(self._program)
        lost = {self._roots[n] for n in call.mutated}
        if lost:
            for number, root in enumerate(self._roots):
                if root in lost:
                    values[number] = error


def _last_uses(program: Program, inputs: list[Input], calls: list[Call]) -> list[Sequence[int]]:
    """For each call the values that nobody needs after it."""
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        for number in call.operands:
            last[number] = index
        for number in call.numbers:
            if number >= 0:
                last[number] = index
    for number in program.outputs:
        last.pop(number, None)
    for instruction in inputs:
        last.pop(instruction.number, None)
    dead: list[Any] = [()] * len(calls)
    for number, index in last.items():
        if dead[index]:
            dead[index].append(number)
        else:
            dead[index] = [number]
    return dead


def _check_operands(call: Call, values: list[Any]) -> None:
    for number in call.operands:
        if isinstance(values[number], LtcError):
            raise _Lost(values[number])


def _argument(operand: Any, values: list[Any], arguments: Arguments) -> Any:
    """The real argument behind an operand that is neither a value nor constant."""
    if operand.__class__ is tuple and (not operand or operand[0].__class__ in _NUMBERS):
        return list(operand)
    return fill(operand, values.__getitem__, arguments)


def run_recorded_call(call: Call, values: list[Any], arguments: Arguments) -> None:
    """Run the call; its results go where their value numbers say."""
    args = [
        values[operand.number]
        if operand.__class__ is Value
        else operand
        if operand.__class__ in _CONSTANT
        else _argument(operand, values, arguments)
        for operand in call.args
    ]
    if call.kwargs:
        named = {
            name: operand if operand.__class__ in _CONSTANT else fill(operand, values.__getitem__, arguments)
            for name, operand in call.kwargs.items()
        }
        out = call_kernel(call.op, args, named)
    else:
        out = call_kernel(call.op, args)
    layout = call.layout
    numbers = call.numbers
    if len(numbers) == 1 and call.returns[0].__class__ is Return and numbers[0] >= 0:
        if layout.copied is None and _is_as_recorded(call, call.returns[0], out, values):
            layout.copied = ()
        if layout.copied == ():
            values[numbers[0]] = out
            return
    results = flatten_results(out, call)
    if layout.copied is None:
        layout.copied = _settle(call, results, [values[n] for n in call.operands])
    copied = layout.copied
    for position, (number, result) in enumerate(zip(numbers, results, strict=True)):
        if number >= 0:
            values[number] = laid_out(result, call.flat_returns[position].spec) if position in copied else result


_RUN_CALL = run_recorded_call


def _is_as_recorded(call: Call, expected: Return, result: Any, values: list[Any]) -> bool:
    """True when the one result certainly is what was recorded; quicker than `_settle`, which tells what is not."""
    spec = expected.spec
    if spec is None or not isinstance(result, torch.Tensor):
        return False
    if result.dtype is not spec.dtype or result.size() != spec.size:
        return False
    if expected.kind is ReturnKind.VIEW:
        return True
    if spec.conj or spec.neg or spec.offset or spec.dtype.is_complex or expected.group != 0:
        return False
    if result.stride() != spec.stride or result.storage_offset():
        return False
    storage = result.untyped_storage()._cdata
    return not any(values[n].untyped_storage()._cdata == storage for n in call.operands)


def _settle(call: Call, results: list[Any], operands: list[Any]) -> tuple[int, ...]:
    """Compare real results with recorded specs; say which fresh ones must be copied into them."""
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
    failure = execution_error_class(error)(what, op=call.name, input_shapes=shapes, source=str(source))
    failure.__cause__ = error
    return failure
