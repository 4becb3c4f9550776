"""Checks that a program is well formed. Tests run it after every pass; a backend author may run it on anything."""

from __future__ import annotations

from torch_ltc.errors import VerifyError
from torch_ltc.program.instruction import (
    Call,
    DeviceGenerator,
    Input,
    Number,
    Program,
    ReturnKind,
    Scalar,
    value_numbers,
)
from torch_ltc.program.text import instruction_text


def verify(program: Program) -> Program:
    """The program itself. Raises `VerifyError` at the first instruction that is not well formed."""
    defined: set[int] = set()
    for index, instruction in enumerate(program.instructions):
        problem = _problem(program, instruction, defined)
        if problem:
            raise VerifyError(
                f"instruction {index} of program {program.identity} {problem}:\n  {instruction_text(instruction, {})}",
                source=str(instruction.source),
            )
    problem = _problem_of_ends(program, defined)
    if problem:
        raise VerifyError(f"program {program.identity} {problem}")
    return program


def _problem(program: Program, instruction: Input | Number | Call, defined: set[int]) -> str:
    if isinstance(instruction, Call):
        return _problem_of_call(program, instruction, defined)
    if isinstance(instruction, Number):
        if not program.functional:
            return "is a number in a program that is not functional"
        if not 0 <= instruction.slot < program.scalars:
            return f"names slot {instruction.slot} of {program.scalars}"
    return _define(program, instruction.number, defined)


def _define(program: Program, number: int, defined: set[int]) -> str:
    if not 0 <= number < program.values:
        return f"defines value %{number} of {program.values}"
    if number in defined:
        return f"defines value %{number} again"
    defined.add(number)
    return ""


def _problem_of_call(program: Program, call: Call, defined: set[int]) -> str:
    given = (*call.args, *call.kwargs.values())
    schema = call.op._schema
    if len(given) != len(schema.arguments):
        return f"has {len(given)} arguments where its schema has {len(schema.arguments)}"
    used = [number for operand in given for number in value_numbers(operand)]
    if tuple(used) != call.operands:
        return f"lists the operands {call.operands} but takes {tuple(used)}"
    for number in used:
        if number not in defined:
            return f"uses %{number} before it is defined"
    for operand in given:
        for item in operand if isinstance(operand, tuple) else (operand,):
            if isinstance(item, Scalar) and not 0 <= item.slot < program.scalars:
                return f"names slot {item.slot} of {program.scalars}"
            if isinstance(item, DeviceGenerator) and not call.random:
                return "takes the generator but is not marked as random"
    return _problem_of_returns(program, call, defined)


def _problem_of_returns(program: Program, call: Call, defined: set[int]) -> str:
    if len(call.returns) != len(call.op._schema.returns):
        return f"has {len(call.returns)} returns where its schema has {len(call.op._schema.returns)}"
    if len(call.flat_returns) != len(call.numbers):
        return f"has {len(call.numbers)} value numbers for {len(call.flat_returns)} returns"
    if program.functional and call.mutated and not call.random:
        return "writes to an operand in a functional program"
    for item, number in zip(call.flat_returns, call.numbers, strict=True):
        makes = item.kind in (ReturnKind.FRESH, ReturnKind.VIEW)
        if number >= 0 and (not makes or item.spec is None):
            return f"defines %{number} by a return that makes no value"
        if program.functional and item.kind in (ReturnKind.VIEW, ReturnKind.SAME):
            return "returns a view or an operand in a functional program"
        if makes and item.kind is ReturnKind.VIEW and not 0 <= item.operand < len(call.operands):
            return f"returns a view of operand {item.operand} of {len(call.operands)}"
        if number >= 0:
            problem = _define(program, number, defined)
            if problem:
                return problem
    return ""


def _problem_of_ends(program: Program, defined: set[int]) -> str:
    for number in program.results:
        if number not in defined:
            return f"returns %{number}, which nothing defines"
    positions = [update.input for update in program.updates]
    if positions and not program.functional:
        return "has updates but is not functional"
    if len(set(positions)) != len(positions) or any(not 0 <= p < len(program.inputs) for p in positions):
        return f"updates the inputs {positions} of {len(program.inputs)}"
    specs = program.specs()
    inputs = program.inputs
    for update in program.updates:
        old, new = inputs[update.input].spec, specs[update.number]
        if old.size != new.size or old.dtype is not new.dtype:
            return f"updates an input of {old} with {new}"
    return ""
