"""Programs as text: the listing, and the dot graph."""

from __future__ import annotations

import os

from torch_ltc.program.instruction import (
    Call,
    DeviceGenerator,
    Input,
    Instruction,
    Number,
    PhysicalDevice,
    Program,
    Return,
    ReturnKind,
    Scalar,
    Size,
    Value,
    value_numbers,
)

_LABEL_LENGTH = 64


def operand_text(operand: object) -> str:
    """One argument of a call."""
    if isinstance(operand, Value):
        return f"%{operand.number}"
    if isinstance(operand, Scalar):
        return f"${operand.slot}:{operand.type.__name__}"
    if isinstance(operand, Size):
        return operand.expression
    if isinstance(operand, DeviceGenerator):
        return "generator"
    if isinstance(operand, PhysicalDevice):
        return "device"
    if isinstance(operand, (tuple, list)):
        return "[" + ", ".join(operand_text(item) for item in operand) + "]"
    return str(operand)


def call_text(call: Call) -> str:
    """The call without its results: name and arguments, defaults left out."""
    given = [operand_text(a) for a in call.args]
    for name, value in call.kwargs.items():
        if value is not None:
            given.append(f"{name}={operand_text(value)}")
    return f"{call.name}({', '.join(given)})"


def _result_text(item: Return, number: int) -> str:
    mark = " view" if item.kind is ReturnKind.VIEW else ""
    return f"%{number}: {item.spec!r}{mark}"


def instruction_text(instruction: Instruction, roots: dict[int, int]) -> str:
    """One line of the listing."""
    if isinstance(instruction, Input):
        return f"%{instruction.number}: {instruction.spec!r} = input(buffer={instruction.buffer})"
    if isinstance(instruction, Number):
        return f"%{instruction.number}: {instruction.spec!r} = number(slot={instruction.slot})"
    results = [
        _result_text(item, n) + (f" ROOT={roots[n]}" if n in roots else "")
        for item, n in zip(instruction.flat_returns, instruction.numbers, strict=False)
        if n >= 0
    ]
    left = ", ".join(results) + " = " if results else ""
    source = instruction.source
    where = f"  # {os.path.basename(source.file)}:{source.line}" if source.file else ""
    return f"{left}{call_text(instruction)}{where}"


def program_text(program: Program) -> str:
    """The whole listing; outputs carry ROOT=<position>."""
    roots = {number: position for position, number in enumerate(program.outputs)}
    lines = [f"  {instruction_text(i, roots)}" for i in program.instructions]
    lines += [f"  input {update.input} becomes %{update.number}" for update in program.updates]
    return "IR {\n" + "\n".join(lines) + "\n}\n"


def program_dot(program: Program) -> str:
    """The program as a dot graph: a node per instruction, an edge per operand."""
    roots = {number: position for position, number in enumerate(program.outputs)}
    producer: dict[int, int] = {}
    nodes: list[str] = []
    edges: list[str] = []
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Input):
            producer[instruction.number] = index
            nodes.append(f'  node{index} [label="input {instruction.buffer}\\n{instruction.spec!r}"]')
            continue
        if isinstance(instruction, Number):
            producer[instruction.number] = index
            nodes.append(f'  node{index} [label="number {instruction.slot}\\n{instruction.spec!r}"]')
            continue
        label = [instruction.name]
        for item, number in zip(instruction.flat_returns, instruction.numbers, strict=True):
            if number >= 0:
                producer[number] = index
                label.append(repr(item.spec)[:_LABEL_LENGTH])
                if number in roots:
                    label.append(f"ROOT={roots[number]}")
        text = "\\n".join(label)
        nodes.append(f'  node{index} [label="{text}"]')
        operands = [*instruction.args, *instruction.kwargs.values()]
        numbers = [n for operand in operands for n in value_numbers(operand)]
        for position, number in enumerate(numbers):
            edges.append(f'  node{producer[number]} -> node{index} [label="i={position}"]')
    return "digraph G {\n" + "\n".join(nodes + edges) + "\n}\n"
