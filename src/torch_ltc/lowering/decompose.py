"""Decomposes calls that were recorded as composites, for backends that run recorded programs without Python.

The gradients of products are Python formulas: a backend that would call them one by one gets the calls they make.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from torch_ltc.lowering.gil import yield_gil
from torch_ltc.program.composite_gradients import FORMULAS, Shaped, is_folded
from torch_ltc.program.instruction import Call, Instruction, ObservedLayout, Program, Return, Value
from torch_ltc.pytorch.private import OpOverload
from torch_ltc.shapes.inference import OperandIndex, infer

aten = torch.ops.aten


def decompose_composites(program: Program) -> Program:
    """The program with the calls that formulas make in place of calls that stand for them."""
    if not any(call.op in FORMULAS for call in program.calls):
        return program
    writer = _Writer(program)
    instructions: list[Instruction] = []
    for instruction in program.instructions:
        if isinstance(instruction, Call) and instruction.op in FORMULAS and not writer.names_sizes(instruction):
            instructions.extend(writer.expand(instruction))
        else:
            instructions.append(instruction)
        yield_gil()
    return replace(program, instructions=tuple(instructions), values=writer.values)


class _Writer:
    """Writes the calls of formulas down, with value numbers that the program does not use."""

    def __init__(self, program: Program) -> None:
        self.values = program.values
        self._specs = program.specs()

    def names_sizes(self, call: Call) -> bool:
        """True when its formula names sizes, which other programs of the same symbolic key have others of."""
        if call.op is not aten.linear_backward.default:
            return False
        mask: Any = call.args[3]
        return bool(mask[0] and not mask[1] and not is_folded(self._operand(call.args[0])))

    def expand(self, composite: Call) -> Iterator[Call]:
        """The calls that stand for `composite`, the last of which make its values."""
        written: list[Call] = []

        def write(op: OpOverload, *args: Any) -> Shaped:
            written.append(self._call(op, args, composite))
            [number] = written[-1].numbers
            return Shaped(number, self._specs[number])

        given = [self._operand(arg) if isinstance(arg, Value) else arg for arg in composite.args]
        results: list[Shaped | None] = list(FORMULAS[composite.op](*given, call=write))
        made = {r.number: number for r, number in zip(results, composite.numbers, strict=True) if r is not None}
        for call in written:
            yield _renumbered(call, made)

    def _operand(self, value: object) -> Shaped:
        assert isinstance(value, Value)
        return Shaped(value.number, self._specs[value.number])

    def _call(self, op: OpOverload, args: tuple[Any, ...], composite: Call) -> Call:
        operands = [arg for arg in args if isinstance(arg, Shaped)]
        specs = [operand.spec for operand in operands]
        places = iter(range(len(operands)))
        tried = [OperandIndex(next(places)) if isinstance(arg, Shaped) else arg for arg in args]
        statics = tuple([_frozen(a) for a in args if not isinstance(a, Shaped)])
        arguments = op._schema.arguments[len(args) :]
        kwargs = {argument.name: argument.default_value for argument in arguments}
        inferred = infer(op, tried, kwargs, specs, range(len(specs)), (op, *specs, *statics))
        [item] = inferred.returns
        assert isinstance(item, Return)
        number = self.values
        self.values += 1
        assert item.spec is not None
        self._specs[number] = item.spec
        template = [Value(a.number) if isinstance(a, Shaped) else _frozen(a) for a in args]
        positional = [a.default_value for a in arguments if not a.kwarg_only]
        named = {a.name: a.default_value for a in arguments if a.kwarg_only}
        numbers = tuple([operand.number for operand in operands])
        args_ = (*template, *positional)
        return Call(
            op, args_, named, numbers, inferred.returns, number, composite.source, False, (number,), ObservedLayout()
        )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _renumbered(call: Call, made: dict[int, int]) -> Call:
    """The call with the value numbers of the composite call's results in place of its own."""
    [number] = call.numbers
    args = tuple([Value(made.get(a.number, a.number)) if isinstance(a, Value) else a for a in call.args])
    operands = tuple([made.get(operand, operand) for operand in call.operands])
    final = made.get(number, number)
    return replace(call, args=args, operands=operands, first=final, numbers=(final,))


__all__ = ["decompose_composites"]
