"""Passes over functional programs. Each takes a program and returns a new one; the old one is not touched.

Values are numbers that are defined once, so that a pass may drop a call, or let later calls use another value of the
same spec, without looking at memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from torch_ltc.program.collectives import is_ordered
from torch_ltc.program.instruction import Call, Instruction, Program, ReturnKind, Update, Value
from torch_ltc.program.spec import Spec

aten = torch.ops.aten
Pass = Callable[[Program], Program]
Observer = Callable[[str, Program], None]

# Calls whose single result has the values of the first operand if it has its spec.
_COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
    aten.slice.Tensor,
}
# Calls that make memory for a draw to fill: two draws must not share it.
_MEMORY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default}
_MOST_FOLDED_NUMBER = 1e300


def dce(program: Program) -> Program:
    """Dead code elimination. Random calls stay, because they move the generator on, collectives, because other
    processes wait for them, and checks, calls that return nothing."""
    needed = set(program.results)
    kept: list[Instruction] = []
    for instruction in reversed(program.instructions):
        if isinstance(instruction, Call):
            checks = not instruction.numbers
            if not is_ordered(instruction) and not checks and needed.isdisjoint(instruction.numbers):
                continue
            needed.update(instruction.operands)
        kept.append(instruction)
    return replace(program, instructions=tuple(reversed(kept)))


def cse(program: Program) -> Program:
    """Common subexpression elimination: equal calls on equal operands become one."""
    known: dict[object, Call] = {}
    renamed: dict[int, int] = {}
    kept: list[Instruction] = []
    for instruction in program.instructions:
        if isinstance(instruction, Call):
            call = _with_operands(instruction, renamed)
            if not is_ordered(call) and call.numbers and call.op not in _MEMORY:
                key = (call.op, _key(call.args), _key(tuple(call.kwargs.items())))
                first = known.setdefault(key, call)
                if first is not call and _same_returns(first, call):
                    renamed.update(zip(call.numbers, first.numbers, strict=True))
                    continue
            instruction = call
        kept.append(instruction)
    return _renamed_ends(replace(program, instructions=tuple(kept)), renamed)


def propagate_copies(program: Program) -> Program:
    """Copy propagation: users of a copy use the original, where the two have one spec."""
    specs = program.specs()
    renamed: dict[int, int] = {}
    permuted: dict[int, tuple[int, tuple[int, ...]]] = {}
    kept: list[Instruction] = []
    for instruction in program.instructions:
        if isinstance(instruction, Call):
            instruction = _with_operands(instruction, renamed)
            original = _original(instruction, permuted)
            if original is not None and _alike(program, specs, original, instruction.numbers[0]):
                renamed[instruction.numbers[0]] = original
                continue
        kept.append(instruction)
    return _renamed_ends(replace(program, instructions=tuple(kept)), renamed)


def _original(call: Call, permuted: dict[int, tuple[int, tuple[int, ...]]]) -> int | None:
    """The value that the call's result is a copy of, if the two have one spec."""
    if len(call.numbers) != 1:
        return None
    if call.op in _COPIES and len(call.operands) == 1:
        return call.operands[0]
    if call.op is aten.copy.default:
        return call.operands[1]
    if call.op is aten.permute.default:
        source, order = permuted.get(call.operands[0], (call.operands[0], None))
        given: Any = call.args[1]
        dims = tuple(d % len(given) for d in given)
        composed = dims if order is None else tuple(order[d] for d in dims)
        permuted[call.numbers[0]] = (source, composed)
        return source if composed == tuple(range(len(composed))) else None
    return None


def fold_constants(program: Program) -> Program:
    """Constant folding: tensors all of whose elements are one known number, and multiplication by one."""
    specs = program.specs()
    numbers: dict[int, float] = {}
    renamed: dict[int, int] = {}
    kept: list[Instruction] = []
    for instruction in program.instructions:
        if isinstance(instruction, Call) and not is_ordered(instruction):
            call = _with_operands(instruction, renamed)
            instruction = call
            number = _uniform_number(call, numbers, specs)
            if number is not None:
                numbers[call.numbers[0]] = number
                instruction = _full(call, number, program)
            elif call.op is aten.mul.Tensor:
                factor = _factor_of_one(call, numbers, program, specs)
                if factor is not None:
                    renamed[call.numbers[0]] = factor
                    continue
        kept.append(instruction)
    return _renamed_ends(replace(program, instructions=tuple(kept)), renamed)


PASSES: tuple[tuple[str, Pass], ...] = (
    ("dce", dce),
    ("fold_constants", fold_constants),
    ("propagate_copies", propagate_copies),
    ("cse", cse),
    ("final_dce", dce),
)


def run_passes(
    program: Program, passes: Iterable[tuple[str, Pass]] = PASSES, observe: Observer | None = None
) -> Program:
    """The program after all passes; `observe(name, program)` sees the result of each."""
    for name, run in passes:
        program = run(program)
        if observe is not None:
            observe(name, program)
    return program


def _uniform_number(call: Call, numbers: dict[int, float], specs: dict[int, Spec]) -> float | None:
    """The number that every element of the call's result is, when that is known without running it."""
    if len(call.numbers) != 1 or call.flat_returns[0].kind is not ReturnKind.FRESH:
        return None
    spec = specs[call.numbers[0]]
    if not spec.contiguous or not (spec.dtype.is_floating_point or spec.dtype in (torch.int64, torch.int32)):
        return None
    if call.op is aten.full.default:
        return _exact(call.args[1], spec.dtype)
    if call.op is aten.scalar_tensor.default:
        return _exact(call.args[0], spec.dtype)
    operands = [numbers.get(number) for number in call.operands]
    if not operands or any(number is None for number in operands):
        return None
    if call.op in _COPIES and specs[call.operands[0]].dtype is spec.dtype:
        return operands[0]
    return None


def _exact(value: object, dtype: torch.dtype) -> float | None:
    """The number as a tensor of this dtype holds it, if that is worth knowing."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value) or abs(value) > _MOST_FOLDED_NUMBER:
        return None
    held = torch.tensor(value, dtype=dtype).item() if dtype.is_floating_point else int(value)
    return held if isinstance(held, (int, float)) else None


def _alike(program: Program, specs: dict[int, Spec], first: int, second: int) -> bool:
    """True when two values have one shape, whatever the symbols are."""
    shapes = program.symbolic_shapes
    return specs[first] is specs[second] and shapes.get(first) == shapes.get(second)


def _full(call: Call, number: float, program: Program) -> Call:
    if call.op in (aten.full.default, aten.scalar_tensor.default):
        return call
    spec = call.flat_returns[0].spec
    assert spec is not None
    options: dict[str, object] = {"dtype": spec.dtype, "layout": None, "device": program.device, "pin_memory": False}
    shape = program.symbolic_shapes.get(call.numbers[0])
    size = spec.size if shape is None else shape.size
    return replace(call, op=aten.full.default, args=(size, number), kwargs=options, operands=())


def _factor_of_one(call: Call, numbers: dict[int, float], program: Program, specs: dict[int, Spec]) -> int | None:
    """Of a product with a tensor of ones: the other factor, if it has the shape of the product."""
    result = call.numbers[0]
    if len(call.operands) == 2:
        for one, other in (call.operands, call.operands[::-1]):
            if numbers.get(one) == 1 and _alike(program, specs, other, result):
                return other
    elif len(call.operands) == 1 and call.args[1] == 1 and not isinstance(call.args[1], Value):
        return call.operands[0] if _alike(program, specs, call.operands[0], result) else None
    return None


def _key(operand: Any) -> object:
    """Equal for operands that are the same in every bit: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(operand, (tuple, list)):
        return tuple(_key(item) for item in operand)
    if isinstance(operand, (bool, int, float, complex)):
        return (type(operand), repr(operand))
    return operand


def _same_returns(first: Call, second: Call) -> bool:
    pairs = zip(first.flat_returns, second.flat_returns, strict=True)
    return all(a.kind is b.kind and a.spec is b.spec for a, b in pairs) and all(
        (a < 0) == (b < 0) for a, b in zip(first.numbers, second.numbers, strict=True)
    )


def _with_operands(call: Call, renamed: dict[int, int]) -> Call:
    if not any(number in renamed for number in call.operands):
        return call

    def rename(operand: object) -> object:
        if isinstance(operand, Value):
            return Value(renamed.get(operand.number, operand.number))
        return tuple(rename(item) for item in operand) if isinstance(operand, tuple) else operand

    return replace(
        call,
        args=tuple(rename(operand) for operand in call.args),
        kwargs={name: rename(operand) for name, operand in call.kwargs.items()},
        operands=tuple(renamed.get(number, number) for number in call.operands),
    )


def _renamed_ends(program: Program, renamed: dict[int, int]) -> Program:
    inputs = [instruction.number for instruction in program.inputs]
    updates = [Update(u.input, renamed.get(u.number, u.number)) for u in program.updates]
    return replace(
        program,
        outputs=tuple(renamed.get(number, number) for number in program.outputs),
        # An input that ends up as it was is not updated.
        updates=tuple(u for u in updates if inputs[u.input] != u.number),
    )
