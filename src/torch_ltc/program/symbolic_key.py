"""The symbolic key of a program: everything but the integers in which otherwise equal programs differ.

Owns which integers those are: sizes, strides and offsets of inputs, and the sizes, offsets and indices that calls take.
Each is a slot. `symbolic_key` separates the two, `specialize` puts expressions into its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch_ltc.program.composite_gradients import FORMULAS, layout_choices
from torch_ltc.program.effects import SIZED_BY_SCALARS
from torch_ltc.program.instruction import (
    Call,
    Input,
    Instruction,
    Integer,
    Program,
    Return,
    ReturnKind,
    Scalar,
    Size,
    SymbolicShape,
    Value,
)
from torch_ltc.program.spec import Spec
from torch_ltc.program.specialization import Specialization
from torch_ltc.pytorch.private import OpOverload, SchemaArgument
from torch_ltc.source import UNKNOWN, Source

Key = tuple[Any, ...]
# Calls that address the storage behind a tensor, not the tensor.
STORAGE_CALLS = ("as_strided", "set_", "resize_")
# Such a call too where kernels are called as recorded. In the functional form it is a reshape: the strides that it is
# given, which are those that a view would have, are not looked at.
_STRIDED_VIEW = "_reshape_alias"
_INPUT = "input"
_NUMBERS = (int, float, bool, complex)


class _Plan:
    """The part of each argument of one operator. Held in a table, so that its `code` is its operator for ever."""

    __slots__ = ("code", "op", "abstract", "names", "plain", "chooses", "addresses", "strides")

    def __init__(self, code: int, op: OpOverload) -> None:
        self.code = code
        self.op = op
        arguments = op._schema.arguments
        sized = op._schema.name in SIZED_BY_SCALARS
        # Per schema argument, whether its integers are slots.
        self.abstract = tuple(_is_symbolic(a) or (sized and str(a.type) == "number") for a in arguments)
        self.names = tuple(a.name for a in arguments if a.kwarg_only)
        self.plain = not any(self.abstract)
        # Whether what it runs depends on the layout of its operands.
        self.chooses = op in FORMULAS
        name = op._schema.name.partition("::")[2]
        self.addresses = name.startswith(STORAGE_CALLS)
        self.strides = name.startswith(_STRIDED_VIEW)


def _is_symbolic(argument: SchemaArgument) -> bool:
    """True for a SymInt, an optional one, or a list of them."""
    declared: Any = argument.real_type
    while hasattr(declared, "getElementType"):
        declared = declared.getElementType()
    return bool(declared.kind() == "SymIntType")


_plans: dict[int, _Plan] = {}


def _plan(op: OpOverload) -> _Plan:
    # By identity, which the table keeps: the hash of an operator is a Python function.
    plan = _plans.get(id(op))
    if plan is None:
        plan = _plans[id(op)] = _Plan(len(_plans), op)
    return plan


def symbolic_key(program: Program) -> tuple[Key, tuple[int, ...]]:
    """The key, a tuple that is equal for programs that differ in their slots alone, and what is in the slots."""
    return _taken(program, named=False)


def symbolic_key_text(program: Program) -> str:
    """The symbolic key as text that is the same in every process."""
    key, _ = _taken(program, named=True)
    return "\n".join(map(repr, key))


def _taken(program: Program, named: bool) -> tuple[Key, tuple[int, ...]]:
    """The symbolic key and the slots, operators by name or by a number of this process."""
    key: list[Any] = [program.outputs, program.device, program.scalars]
    values: list[int] = []
    specs: dict[int, Spec] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Call):
            _take_call(instruction, key, values, named)
            if _plan(instruction.op).chooses:
                specs = specs or program.specs()
                key.append(layout_choices(instruction.op, [specs[number] for number in instruction.operands]))
        elif isinstance(instruction, Input):
            spec = instruction.spec
            key += (_INPUT, instruction.buffer, spec.dtype, len(spec.size), spec.conj, spec.neg)
            values += spec.size
            values += spec.stride
            values.append(spec.offset)
        else:
            key += (instruction.slot, instruction.spec)
    return tuple(key), tuple(values)


def _take_call(call: Call, key: list[Any], values: list[int], named: bool) -> None:
    plan = _plan(call.op)
    key.append(call.name if named else plan.code)
    given = (*call.args, *call.kwargs.values()) if call.kwargs else call.args
    for operand, abstract in zip(given, plan.abstract):
        kind = type(operand)
        if kind is Value:
            key.append(operand.number)  # type: ignore[attr-defined]
        elif abstract:
            _take_integers(operand, key, values)
        elif kind is Scalar:
            key.append(operand.type)  # type: ignore[attr-defined]
        elif kind is tuple:
            key.append(_part(operand))
        elif kind in _NUMBERS:
            # With its type: 1, 1.0 and True are equal.
            key.append((kind, operand))
        else:
            key.append(operand)
    for item in call.returns:
        if type(item) is Return:
            if item.kind is ReturnKind.FRESH:
                key.append(item.group)
            else:
                key.append((item.kind.name, item.operand, repr(item.constant)))
        else:
            key.append(tuple([(part.kind.name, part.operand, part.group) for part in item]))  # type: ignore[union-attr]


def _take_integers(operand: object, key: list[Any], values: list[int]) -> None:
    if type(operand) is int:
        key.append(int)
        values.append(operand)
    elif isinstance(operand, tuple):
        # A list of sizes holds integers alone; its length is part of the key.
        key.append(len(operand))
        values += operand
    else:
        # None, or for arange another number than an integer.
        key.append((type(operand), repr(operand)))


def _part(operand: Any) -> object:
    """The key part of a list that holds no slots."""
    parts: list[Any] = []
    for item in operand:
        kind = type(item)
        if kind is Value:
            parts.append(item.number)
        elif kind is Scalar:
            parts.append(item.type)
        elif kind in _NUMBERS:
            parts.append((kind, item))
        elif kind is tuple:
            parts.append(_part(item))
        else:
            parts.append(item)
    return tuple(parts)


def input_slots(program: Program) -> list[bool]:
    """For each slot whether it belongs to an input, not to a call."""
    return [isinstance(instruction, Input) for instruction, _, _ in _places(program)]


def length_slots(program: Program) -> list[bool]:
    """For each slot whether it is a size or stride of an input."""
    return [isinstance(i, Input) and what != "offset" for i, what, _ in _places(program)]


def slot_texts(program: Program, slots: Sequence[int]) -> list[str]:
    """Slots in the user's terms, with the lines that they come from."""
    places = list(_places(program))
    users = program.first_users()
    positions = {instruction.number: place for place, instruction in enumerate(program.inputs)}
    texts = []
    for instruction, what, position in (places[slot] for slot in slots):
        if isinstance(instruction, Input):
            user = users.get(instruction.number)
            where = f" (used by {user.name} at {user.source})" if user is not None else ""
            what = what if what == "offset" else f"{what} {position}"
            texts.append(f"{what} of input {positions[instruction.number]}{where}")
        else:
            assert isinstance(instruction, Call)
            at = "" if position < 0 else f"[{position}]"
            texts.append(f"{what}{at} of {instruction.name} at {instruction.source}")
    return texts


def slot_source(program: Program, slot: int) -> tuple[str, Source]:
    """The kind of integer in a slot ("size", "layout" or "argument"), and the line that it comes from."""
    instruction, what, _ = list(_places(program))[slot]
    if isinstance(instruction, Input):
        user = program.first_users().get(instruction.number)
        return "size" if what == "size" else "layout", instruction.source if user is None else user.source
    return "size" if what == "size" else "argument", instruction.source


def number_texts(program: Program, slots: Sequence[int]) -> list[str]:
    """Run-time numbers in the user's terms, with the lines that they come from."""
    users = _number_users(program)
    return [
        f"the number '{users[slot][1]}' of {users[slot][0].name} at {users[slot][0].source}"
        if slot in users
        else f"run-time number {slot}"
        for slot in slots
    ]


def number_source(program: Program, slot: int) -> Source:
    """The line that a run-time number comes from."""
    users = _number_users(program)
    return users[slot][0].source if slot in users else UNKNOWN


def _number_users(program: Program) -> dict[int, tuple[Call, str]]:
    """The first call that takes each run-time number, and the name of the argument."""
    found: dict[int, tuple[Call, str]] = {}
    for call in program.calls:
        given = (*call.args, *call.kwargs.values())
        for operand, argument in zip(given, call.op._schema.arguments):
            for item in operand if isinstance(operand, tuple) else (operand,):
                if isinstance(item, Scalar):
                    found.setdefault(item.slot, (call, argument.name))
    return found


def _places(program: Program) -> Iterator[tuple[Instruction, str, int]]:
    """For each slot its instruction, the name of the part, and the position there (-1 for a single integer)."""
    for instruction in program.instructions:
        if isinstance(instruction, Input):
            rank = len(instruction.spec.size)
            for what in ("size", "stride"):
                for position in range(rank):
                    yield instruction, what, position
            yield instruction, "offset", -1
        elif isinstance(instruction, Call):
            given = (*instruction.args, *instruction.kwargs.values())
            arguments = instruction.op._schema.arguments
            for operand, argument, abstract in zip(given, arguments, _plan(instruction.op).abstract):
                if abstract and type(operand) is int:
                    yield instruction, argument.name, -1
                elif abstract and isinstance(operand, tuple):
                    for position in range(len(operand)):
                        yield instruction, argument.name, position


def specialize(program: Program, specialization: Specialization) -> Program:
    """The program with expressions in its slots: as `Size` in arguments of calls, as `symbolic_shapes` of inputs."""
    if not specialization.symbols:
        return program
    slots = iter(specialization.slots)
    shapes: dict[int, SymbolicShape] = {}

    def filled(value: int) -> Integer:
        slot = next(slots)
        return Size(slot, value) if isinstance(slot, str) else value

    instructions: list[Instruction] = []
    for instruction in program.instructions:
        if isinstance(instruction, Input):
            spec = instruction.spec
            shape = SymbolicShape(tuple(map(filled, spec.size)), tuple(map(filled, spec.stride)), filled(spec.offset))
            if any(isinstance(part, Size) for part in (*shape.size, *shape.stride, shape.offset)):
                shapes[instruction.number] = shape
        elif isinstance(instruction, Call):
            instruction = _filled_call(instruction, filled)
        instructions.append(instruction)
    return replace(program, instructions=tuple(instructions), symbols=specialization.symbols, symbolic_shapes=shapes)


def _filled_call(call: Call, filled: Callable[[int], Integer]) -> Call:
    plan = _plan(call.op)
    if plan.plain:
        return call
    given: list[object] = []
    for operand, abstract in zip((*call.args, *call.kwargs.values()), plan.abstract):
        if abstract and type(operand) is int:
            operand = filled(operand)
        elif abstract and isinstance(operand, tuple):
            operand = tuple([filled(item) for item in operand])
        given.append(operand)
    split = len(call.args)
    return replace(call, args=tuple(given[:split]), kwargs=dict(zip(call.kwargs, given[split:], strict=True)))


def addresses_storage(program: Program, recorded: bool) -> Call | None:
    """A call that looks at the memory of a value that another call made, if there is one: what it finds depends on how
    the kernel of that call lays its result out, which sizes alone need not tell. `recorded` says that kernels are
    called as recorded, not in the functional form."""
    calls = program.calls
    addressing = [plan.addresses or (recorded and plan.strides) for plan in [_plan(call.op) for call in calls]]
    if True not in addressing:
        return None
    outside = {instruction.number for instruction in program.inputs}
    for call, addresses in zip(calls, addressing, strict=True):
        if addresses and not outside.issuperset(call.operands):
            return call
        for item, number in zip(call.flat_returns, call.numbers, strict=True):
            if item.kind is ReturnKind.VIEW and call.operands[item.operand] in outside:
                outside.add(number)
    return None
