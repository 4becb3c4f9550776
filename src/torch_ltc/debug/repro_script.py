"""The text of a script that runs one program again: its calls as plain lines of PyTorch, and what compares two runs."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from functools import cache
from importlib import resources
from string import Template

import torch

from torch_ltc.program.instruction import Call, DeviceGenerator, Input, PhysicalDevice, Program, Scalar, Value
from torch_ltc.program.spec import Spec


def is_whole(views: Sequence[Input]) -> bool:
    """True for a buffer that the program sees once and as a whole: its tensor is made as it is, not as a view."""
    spec = views[0].spec
    return len(views) == 1 and spec.covers_storage() and not (spec.conj or spec.neg)


def buffers_of(program: Program) -> dict[int, list[Input]]:
    """The inputs that see each buffer."""
    found: dict[int, list[Input]] = {}
    for instruction in program.inputs:
        found.setdefault(instruction.buffer, []).append(instruction)
    return dict(sorted(found.items()))


# ---- calls ----------------------------------------------------------------------------------------------------------


def _literal(operand: object, numbers: Sequence[object]) -> str:
    """One argument as Python text."""
    if isinstance(operand, Value):
        return f"v{operand.number}"
    if isinstance(operand, Scalar):
        return _literal(numbers[operand.slot], numbers)
    if isinstance(operand, DeviceGenerator):
        return "generator"
    if isinstance(operand, PhysicalDevice):
        return "device"
    if isinstance(operand, (tuple, list)):
        return "[" + ", ".join(_literal(item, numbers) for item in operand) + "]"
    if isinstance(operand, float) and not math.isfinite(operand):
        return f'float("{operand}")'
    if isinstance(operand, complex):
        return f"complex({_literal(operand.real, numbers)}, {_literal(operand.imag, numbers)})"
    if isinstance(operand, (torch.dtype, torch.layout, torch.memory_format)):
        return str(operand)
    if isinstance(operand, torch.device):
        return f'torch.device("{operand}")'
    return repr(operand)


def _call_line(call: Call, numbers: Sequence[object]) -> str:
    defaults = {a.name: a.default_value for a in call.op._schema.arguments if a.has_default_value()}
    given = [_literal(operand, numbers) for operand in call.args]
    for name, operand in call.kwargs.items():
        if operand is not None or defaults.get(name, operand) is not None:
            given.append(f"{name}={_literal(operand, numbers)}")
    name = f"torch.ops.{call.op.namespace}.{call.op._schema.name.partition('::')[2]}.{call.op._overloadname}"
    return f"{_left_side(call)}{name}({', '.join(given)})"


def _left_side(call: Call) -> str:
    """The names that the results get; nothing where none is a new tensor."""
    if all(number < 0 for number in call.numbers):
        return ""
    rest = list(call.numbers)
    parts: list[str] = []
    for declared in call.returns:
        count = len(declared) if isinstance(declared, tuple) else 1
        names = [f"v{number}" if number >= 0 else "_" for number in rest[:count]]
        del rest[:count]
        parts.append(f"[{', '.join(names)}]" if isinstance(declared, tuple) else names[0])
    return f"{', '.join(parts)} = "


def _layout_lines(call: Call) -> list[str]:
    """Lines for results that PyTorch's kernel lays out in another way than the device does."""
    lines = []
    for position in call.layout.copied or ():
        spec, number = call.flat_returns[position].spec, call.numbers[position]
        if spec is not None and number >= 0:
            lines.append(f"v{number} = laid_out(v{number}, {spec.size}, {spec.stride})")
    return lines


def _program_lines(program: Program, numbers: Sequence[object]) -> list[str]:
    names = [f"v{instruction.number}" for instruction in program.inputs]
    lines = [f"{', '.join(names)} = inputs" if len(names) > 1 else f"[{''.join(names)}] = inputs"]
    before = ""
    for call in program.calls:
        where = call.source.describe()
        if where != before:
            lines.append(f"# {where}")
        before = where
        lines += [_call_line(call, numbers), *_layout_lines(call)]
    return [*lines, f"return [{', '.join(f'v{number}' for number in program.outputs)}]"]


# ---- inputs ---------------------------------------------------------------------------------------------------------


def _shape(spec: Spec) -> str:
    return f"{spec.dtype}, {spec.size}, {spec.stride}"


def _buffer_lines(program: Program, saved: Container[int]) -> list[str]:
    lines = []
    for place, (buffer, views) in enumerate(buffers_of(program).items()):
        if buffer in saved:
            lines.append(f"SAVED[{place}].clone(),")
        elif is_whole(views):
            lines.append(f"made({_shape(views[0].spec)}, random),")
        else:
            dtype = views[0].spec.dtype
            nbytes = max(view.spec.extent() * view.spec.dtype.itemsize for view in views)
            lines.append(f"made({dtype}, ({-(-nbytes // dtype.itemsize)},), (1,), random),")
    return lines


def _input_lines(program: Program) -> list[str]:
    grouped = buffers_of(program)
    places = {buffer: place for place, buffer in enumerate(grouped)}
    lines = []
    for instruction in program.inputs:
        spec, memory = instruction.spec, f"memory[{places[instruction.buffer]}]"
        text = memory
        if not is_whole(grouped[instruction.buffer]):
            view = "" if grouped[instruction.buffer][0].spec.dtype is spec.dtype else f".view({spec.dtype})"
            text = f"{memory}{view}.as_strided({spec.size}, {spec.stride}, {spec.offset})"
            text = f"torch._conj({text})" if spec.conj else text
            text = f"torch._neg_view({text})" if spec.neg else text
        lines.append(f"{text},  # v{instruction.number}: {spec!r}")
    return lines


# ---- the whole ------------------------------------------------------------------------------------------------------


def _indented(lines: Sequence[str], depth: int) -> str:
    return "\n".join(f"{'    ' * depth}{line}" if line else "" for line in lines)


def _foreign(program: Program) -> list[str]:
    """Comment lines on operators that do not come with PyTorch."""
    known = {"aten", "prims", "prim"}
    names = sorted({call.op.namespace for call in program.calls} - known)
    return [f"# Import here what defines the operators of torch.ops.{name}." for name in names]


@cache
def _template() -> Template:
    return Template(resources.files(__package__).joinpath("repro_script.txt").read_text(encoding="utf-8"))


def script_text(
    program: Program,
    numbers: Sequence[object],
    saved: Container[int],
    *,
    header: Sequence[str],
    backend: str,
    backend_class: str,
    settings: Mapping[str, object],
    seed: int,
) -> str:
    """A script that runs a program with these run-time numbers. `saved` are the input buffers with data beside it, as a
    tensor of its own where `is_whole` says so, else as flat memory; the others are made up."""
    notes = _foreign(program)
    if backend_class:
        notes.append(f"# Register the backend here: {backend_class}")
    return _template().substitute(
        header="\n".join(header).replace("\\", "\\\\").replace('"""', "'''"),
        notes="".join(f"{line}\n" for line in notes),
        backend=backend,
        device=program.device,
        settings=repr(dict(settings)),
        seed=seed,
        program=_indented(_program_lines(program, numbers), 1),
        buffers=_indented(_buffer_lines(program, saved), 2),
        inputs=_indented(_input_lines(program), 2),
    )
