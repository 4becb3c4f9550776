"""The text of a script that runs one program again: its calls as plain lines of PyTorch, and what compares two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_ltc.program.instruction import Call, DeviceGenerator, Input, PhysicalDevice, Program, Scalar, Value
from torch_ltc.program.spec import Spec


@dataclass(frozen=True, slots=True)
class Case:
    """The program that a script repeats. `saved` are the input buffers with data beside it, as a tensor of its own
    where `is_whole` says so, else as flat memory; the others are made up. `settings` are those to run with."""

    program: Program
    numbers: Sequence[object]
    backend: str
    saved: frozenset[int]
    header: Sequence[str]
    settings: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    backend_class: str = ""


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


def _program_lines(case: Case) -> list[str]:
    program = case.program
    names = [f"v{instruction.number}" for instruction in program.inputs]
    lines = [f"{', '.join(names)} = inputs" if len(names) > 1 else f"[{''.join(names)}] = inputs"]
    before = ""
    for call in program.calls:
        where = call.source.describe()
        if where != before:
            lines.append(f"# {where}")
        before = where
        lines += [_call_line(call, case.numbers), *_layout_lines(call)]
    return [*lines, f"return [{', '.join(f'v{number}' for number in program.outputs)}]"]


# ---- inputs ---------------------------------------------------------------------------------------------------------


def _shape(spec: Spec) -> str:
    return f"{spec.dtype}, {spec.size}, {spec.stride}"


def _buffer_lines(case: Case) -> list[str]:
    lines = []
    for place, (buffer, views) in enumerate(buffers_of(case.program).items()):
        if buffer in case.saved:
            lines.append(f"SAVED[{place}].clone(),")
        elif is_whole(views):
            lines.append(f"made({_shape(views[0].spec)}, random),")
        else:
            dtype = views[0].spec.dtype
            nbytes = max(view.spec.extent() * view.spec.dtype.itemsize for view in views)
            lines.append(f"made({dtype}, ({-(-nbytes // dtype.itemsize)},), (1,), random),")
    return lines


def _input_lines(case: Case) -> list[str]:
    grouped = buffers_of(case.program)
    places = {buffer: place for place, buffer in enumerate(grouped)}
    lines = []
    for instruction in case.program.inputs:
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


def script_text(case: Case) -> str:
    """The whole script."""
    header = "\n".join(case.header).replace("\\", "\\\\").replace('"""', "'''")
    notes = _foreign(case.program)
    if case.backend_class:
        notes.append(f"# Register the backend here: {case.backend_class}")
    return _SCRIPT.format(
        header=header,
        notes="".join(f"{line}\n" for line in notes),
        backend=case.backend,
        device=case.program.device,
        settings=dict(case.settings),
        seed=case.seed,
        program=_indented(_program_lines(case), 1),
        buffers=_indented(_buffer_lines(case), 2),
        inputs=_indented(_input_lines(case), 2),
    )


_SCRIPT = '''"""{header}
"""

import sys
import warnings
from pathlib import Path

import torch

import torch_ltc
from torch_ltc.debug.compare_runs import difference
from torch_ltc.lowering.tolerance import program_tolerance

{notes}BACKEND = "{backend}"
DEVICE = torch.device("{device}")
SETTINGS = {settings!r}
SAVED, RANDOM_STATE = torch.load(Path(__file__).with_suffix(".pt"))


def program(inputs, generator, device):
    """The calls as they were recorded."""
{program}


def buffers():
    """The memory behind the inputs, made anew."""
    random = torch.Generator().manual_seed({seed})
    return [
{buffers}
    ]


def inputs_on(memory):
    """The inputs as they see the memory."""
    return [
{inputs}
    ]


def made(dtype, size, stride, random):
    """A tensor of made-up numbers: from 0 and 1 where they may be indices."""
    value = torch.empty_strided(size, stride, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return value.copy_(torch.randn(size, dtype=kind, generator=random))
    return value.copy_(torch.randint(0, 2, size, generator=random))


def laid_out(value, size, stride):
    """The value in memory as the device lays it out, where PyTorch's kernel has another way."""
    if value.device.type == "ltc":
        return value
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device).copy_(value)


def in_eager():
    """Results and memory after a run in eager PyTorch."""
    memory = [each.to(DEVICE) for each in buffers()]
    generator = torch.Generator(DEVICE)
    if RANDOM_STATE is not None:
        generator.set_state(RANDOM_STATE)
    results = program(inputs_on(memory), generator, DEVICE)
    return [each.cpu() for each in results], [each.cpu() for each in memory]


def on_ltc():
    """Results and memory after a run on the device."""
    memory = [each.to("ltc") for each in buffers()]
    inputs = inputs_on(memory)
    if RANDOM_STATE is not None:
        torch.ltc.set_rng_state(RANDOM_STATE)
    torch_ltc.sync(wait=True)
    results = program(inputs, None, torch.device("ltc"))
    torch_ltc.sync(wait=True)
    return [each.cpu() for each in results], [each.cpu() for each in memory]


def attempt(name, run):
    """What a run gives, or None if it fails."""
    try:
        return run()
    except Exception as error:
        print(f"{{name}} fails: {{type(error).__name__}}: {{error}}")
        return None


def compare(backend, wanted, got):
    """Print what differs; how many tensors do."""
    wrong = 0
    for what, left, right in zip(("result", "memory"), wanted, got):
        for place, (expected, actual) in enumerate(zip(left, right)):
            found = difference(f"{{what}} {{place}}", expected, actual, program_tolerance(expected.dtype, {{}}))
            wrong += found is not None
            if found is not None:
                print(found)
    print(f"eager and {{backend}} differ" if wrong else f"eager and {{backend}} agree")
    return wrong


def main(backend=BACKEND):
    """Run in eager and on the backend; 0 if they agree."""
    refusals = []
    stop = torch_ltc.events.subscribe(refusals.append, torch_ltc.events.RefusalEvent)
    once = dict(tiers="off", cache_dir="off", check="off", repro_dir="")
    try:
        with torch_ltc.config.settings.scope(**SETTINGS, **once, backend=backend), warnings.catch_warnings():
            warnings.simplefilter("ignore", torch_ltc.errors.BackendWarning)
            wanted, got = attempt("eager", in_eager), attempt(backend, on_ltc)
    finally:
        stop()
    for event in refusals:
        print(f"{{backend}} refuses to {{event.stage}} it: {{event.reason}}")
    if wanted is None or got is None:
        return 1
    return 1 if compare(backend, wanted, got) or refusals else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
'''
