"""Programs as text: the listing, and the dot graph."""

from __future__ import annotations

import os
from typing import Literal

import torch

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
from torch_ltc.source import UNKNOWN, Source

# How much of the user's lines a listing shows: whole paths, file names, or nothing.
Sources = Literal["full", "short", "none"]
# What prints as the same text in every process.
_PLAIN = (bool, int, float, complex, torch.dtype, torch.layout, torch.memory_format, torch.device, torch.Size)


def operand_text(operand: object) -> str:
    """One argument of a call: the same text in every process, on one line."""
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
    if operand is None or isinstance(operand, _PLAIN):
        return str(operand)
    # Anything else might print its address.
    return repr(operand) if isinstance(operand, str) else f"<{type(operand).__name__}>"


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


def source_text(source: Source, sources: Sources = "short") -> str:
    """The source line, as "train.py:12 forward [Net.fc1]"; for a call of a backward pass, the line that asked
    for the pass, and the forward line if it is known."""
    if not source.file or sources == "none":
        return ""
    file = source.file if sources == "full" else os.path.basename(source.file)
    text = f"{file}:{source.line}"
    if source.function != "<module>":
        text = f"{text} {source.function}"
    # The forward line says which module it was.
    if source.module and source.forward is None:
        text = f"{text} [{source.module}]"
    if source.forward is not None:
        return f"{text}, backward of {source_text(source.forward, sources)}"
    return f"{text}, backward" if source.backward else text


def bare_text(instruction: Instruction, roots: dict[int, int]) -> str:
    """One line of the listing without its source: results, call, and what it writes to."""
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
    written = ", ".join(f"%{number}" for number in instruction.mutated)
    return f"{left}{call_text(instruction)}{f' writes {written}' if written else ''}"


def instruction_text(instruction: Instruction, roots: dict[int, int], sources: Sources = "short") -> str:
    """One line of the listing."""
    where = source_text(instruction.source, sources) if isinstance(instruction, Call) else ""
    text = bare_text(instruction, roots)
    return f"{text}  # {where}" if where else text


def _updates_text(program: Program) -> list[str]:
    return [f"input {update.input} becomes %{update.number}" for update in program.updates]


def program_lines(program: Program) -> list[tuple[str, Source]]:
    """The listing line by line, each without and with its source, that of an input being the line of the first call
    that takes it; outputs carry ROOT=<position>."""
    roots = {number: position for position, number in enumerate(program.outputs)}
    users = program.first_users()
    lines: list[tuple[str, Source]] = []
    for instruction in program.instructions:
        call = instruction if isinstance(instruction, Call) else users.get(instruction.number)
        lines.append((bare_text(instruction, roots), UNKNOWN if call is None else call.source))
    return lines + [(text, UNKNOWN) for text in _updates_text(program)]


def program_text(program: Program, sources: Sources = "short") -> str:
    """The whole listing; outputs carry ROOT=<position>. The same in every process that records the program; with
    `sources` "none" also wherever the user wrote it."""
    roots = {number: position for position, number in enumerate(program.outputs)}
    lines = [f"  {instruction_text(i, roots, sources)}" for i in program.instructions]
    lines += [f"  {text}" for text in _updates_text(program)]
    return "IR {\n" + "\n".join(lines) + "\n}\n"


# ---- the dot graph --------------------------------------------------------------------------------------------------

# Fill colours of nodes by kind; what an output is has a thick border.
_INPUT, _NUMBER, _VIEW, _WRITE, _OTHER = "#cfe2f3", "#fff2cc", "#eeeeee", "#f4cccc", "#ffffff"


def _quoted(text: str) -> str:
    """Text as a dot string; its line breaks become the label's."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _dot_node(index: int, instruction: Instruction, roots: dict[int, int]) -> str:
    if isinstance(instruction, Input):
        label = f"input {instruction.buffer}\n%{instruction.number}: {instruction.spec!r}"
        return f"node{index} [label={_quoted(label)}, fillcolor={_quoted(_INPUT)}]"
    if isinstance(instruction, Number):
        label = f"number {instruction.slot}\n%{instruction.number}: {instruction.spec!r}"
        return f"node{index} [label={_quoted(label)}, fillcolor={_quoted(_NUMBER)}]"
    label, colour, border = instruction.name, _OTHER, ""
    for item, number in zip(instruction.flat_returns, instruction.numbers, strict=True):
        if number >= 0:
            label += f"\n{_result_text(item, number)}"
            colour = _VIEW if item.kind is ReturnKind.VIEW else colour
            if number in roots:
                label += f"\nROOT={roots[number]}"
                border = ", penwidth=3"
    if instruction.mutated:
        label += "\nwrites " + ", ".join(f"%{number}" for number in instruction.mutated)
        colour = _WRITE
    where = source_text(instruction.source)
    label += f"\n{where}" if where else ""
    hover = _quoted(call_text(instruction))
    return f"node{index} [label={_quoted(label)}, fillcolor={_quoted(colour)}{border}, tooltip={hover}]"


class _Flow:
    """The node that made each value, and the one that wrote last to its memory."""

    def __init__(self) -> None:
        self.producer: dict[int, int] = {}
        # One of the values in the same memory stands for it.
        self._memory: dict[int, int] = {}
        self._buffers: dict[int, int] = {}
        self._writer: dict[int, int] = {}

    def bring(self, index: int, instruction: Input | Number) -> None:
        """An instruction that brings a value in."""
        number = instruction.number
        self.producer[number] = index
        shared = self._buffers.setdefault(instruction.buffer, number) if isinstance(instruction, Input) else number
        self._memory[number] = shared

    def call(self, index: int, call: Call) -> list[str]:
        """The edges to a call: a line per operand, and a dashed one from a call that wrote to an operand before."""
        operands = [*call.args, *call.kwargs.values()]
        numbers = [number for operand in operands for number in value_numbers(operand)]
        edges = [f'node{self.producer[n]} -> node{index} [label="i={i}"]' for i, n in enumerate(numbers)]
        writers = {self._writer.get(self._memory[n], -1) for n in numbers}
        writers -= {-1, *(self.producer[n] for n in numbers)}
        edges += [f'node{writer} -> node{index} [style="dashed"]' for writer in sorted(writers)]
        for item, number in zip(call.flat_returns, call.numbers, strict=True):
            if number >= 0:
                self.producer[number] = index
                origin = call.operands[item.operand] if item.kind is ReturnKind.VIEW else number
                self._memory[number] = self._memory.get(origin, number)
        for number in call.mutated:
            self._writer[self._memory[number]] = index
        return edges


class _Cluster:
    """The nodes of one module, and the modules inside it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.nodes: list[str] = []
        self.inner: dict[str, _Cluster] = {}

    def add(self, path: str, node: str) -> None:
        """Put a node where its module belongs."""
        place = self
        for name in path.split(".") if path else ():
            inner = f"{place.path}.{name}" if place.path else name
            place = place.inner.setdefault(name, _Cluster(inner))
        place.nodes.append(node)

    def lines(self, depth: int) -> list[str]:
        """The cluster as dot, each level of modules indented further."""
        space = "  " * depth
        found = [f"{space}{node}" for node in self.nodes]
        for cluster in self.inner.values():
            title = _quoted(f"cluster {cluster.path}")
            found += [f"{space}subgraph {title} {{", f"{space}  label={_quoted(cluster.path)}"]
            found += [*cluster.lines(depth + 1), f"{space}}}"]
        return found


def program_dot(program: Program) -> str:
    """The program as a dot graph: a node per instruction, inside of its module; an edge per operand, and a dashed one
    to a call from the one that wrote to its operands before."""
    roots = {number: position for position, number in enumerate(program.outputs)}
    flow, whole, edges = _Flow(), _Cluster(""), list[str]()
    for index, instruction in enumerate(program.instructions):
        node = _dot_node(index, instruction, roots)
        if isinstance(instruction, Call):
            edges += flow.call(index, instruction)
            whole.add(instruction.source.module, node)
        else:
            flow.bring(index, instruction)
            whole.add("", node)
    style = 'node [shape="box", style="rounded,filled", fontname="monospace"]'
    lines = [f"  {style}", *whole.lines(1), *(f"  {edge}" for edge in edges)]
    return "digraph G {\n" + "\n".join(lines) + "\n}\n"
