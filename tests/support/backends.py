"""Small backends for tests, and the programs that a function records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import torch_ltc
from torch_ltc import events
from torch_ltc.execute.pending import pending_numbers, pending_program
from torch_ltc.lowering.backend_data import BackendData, BackendDevice
from torch_ltc.lowering.interface import Arguments, Backend, Form
from torch_ltc.lowering.kernel_call import plain_call, run_call
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.spec import spec_of
from torch_ltc.program.verify import verify

CPU = torch.device("cpu")


def run_functional(program: Program, given: Sequence[Any]) -> list[Any]:
    """The results of a functional program, each call run with PyTorch's kernel."""
    values = {i.number: _tensor(held) for i, held in zip([*program.inputs, *program.numbers], given, strict=True)}
    arguments = Arguments([], [], torch.default_generator, program.device)
    for call in program.calls:
        values.update(run_call(call, values.__getitem__, arguments))
    return [values[number] for number in program.results]


def run_recorded(program: Program, given: Sequence[Any]) -> list[Tensor]:
    """The outputs of a program as recorded, each call run with PyTorch's kernel, writes in place."""
    count = len(program.inputs)
    scalars = list(given[count : count + program.scalars])
    generator = given[-1] if program.random else torch.default_generator
    values = {i.number: tensor for i, tensor in zip(program.inputs, given[:count], strict=True)}
    arguments = Arguments([], scalars, generator, program.device)
    for call in program.calls:
        values.update(run_call(call, values.__getitem__, arguments))
    return [values[number] for number in program.outputs]


def _tensor(held: Tensor | BackendData) -> Tensor:
    return held.tensor() if isinstance(held, BackendData) else held


class FunctionalBackend(Backend):
    """The functional form, call by call with PyTorch's kernels. Keeps the programs that it was given."""

    name = "functional"
    form = Form.FUNCTIONAL

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.runs = 0
        self.refused_ops: set[str] = set()

    def supports(self, call: Call) -> bool:
        return call.name not in self.refused_ops

    def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
        self.programs.append(verify(program))

        def run(*given: Any) -> Sequence[Any]:
            self.runs += 1
            return run_functional(program, given)

        return run


class SymbolicBackend(FunctionalBackend):
    """The functional form of programs that stand for many, call by call with PyTorch's kernels."""

    name = "symbolic"
    symbolic_sizes = True

    def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
        return _Symbolic(super().compile(program), program)


class _Symbolic:
    def __init__(self, function: Callable[..., Sequence[Any]], program: Program) -> None:
        self._function = function
        self._program = program

    def bind(self, symbols: Mapping[str, int]) -> Callable[..., Sequence[Any]]:
        instructions = [plain_call(i, symbols) if isinstance(i, Call) else i for i in self._program.instructions]
        plain = replace(self._program, instructions=tuple(instructions))
        return lambda *given: run_functional(plain, given)

    def __call__(self, *given: Any) -> Sequence[Any]:
        assert not self._program.symbols
        return self._function(*given)


class RecordedBackend(Backend):
    """The recorded form, call by call with PyTorch's kernels."""

    name = "recorded"

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.runs = 0

    def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
        self.programs.append(verify(program))

        def run(*given: Any) -> Sequence[Any]:
            self.runs += 1
            return run_recorded(program, given)

        return run


class ArrayData(BackendData):
    """A handle on a NumPy array. `made` counts the tensors that were made from such handles."""

    __slots__ = ("array",)
    made = 0

    def __init__(self, array: Any) -> None:
        tensor = torch.from_numpy(array)
        super().__init__(BackendDevice(), spec_of(tensor), tensor)
        self.array = array

    def tensor(self) -> Tensor:
        ArrayData.made += 1
        return torch.from_numpy(self.array.copy())


class ArrayBackend(FunctionalBackend):
    """As `FunctionalBackend`, but with handles on arrays of its own as results. Keeps the kinds of what it is given."""

    name = "arrays"

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[str]] = []

    def compile(self, program: Program) -> Callable[..., Sequence[Any]]:
        run = super().compile(program)

        def handles(*given: Any) -> Sequence[Any]:
            self.given.append([type(held).__name__ for held in given])
            return [ArrayData(tensor.contiguous().numpy()) for tensor in run(*given)]

        return handles


class Misbehaving(Backend):
    """A backend made from one function `run(program, attempt, given)`, called for each run; `attempt` counts from 1."""

    def __init__(self, name: str, form: Form, behaviour: Callable[[Program, int, Sequence[Any]], Any]) -> None:
        self.name = name
        self.form = form
        self.behaviour = behaviour
        self.attempts = 0

    def compile(self, program: Program) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.attempts += 1
            return self.behaviour(program, self.attempts, given)

        return run


@contextmanager
def registered(*backends: Backend | type[Backend]) -> Iterator[None]:
    """These backends are known inside the block."""
    made = [torch_ltc.register_backend(backend) for backend in backends]
    try:
        yield
    finally:
        torch_ltc.wait_device_ops()
        for backend in made:
            registry.unregister(backend.name)


def record(function: Callable[..., Any], *inputs: Tensor) -> tuple[Program, list[object]]:
    """The program that the function records on the device on copies of these inputs, and its run-time numbers."""
    moved = [value.to("ltc") for value in inputs]
    torch_ltc.sync(wait=True)
    out = function(*moved)
    outputs = list(out) if isinstance(out, (tuple, list)) else [out]
    program = pending_program([value for value in outputs if isinstance(value, Tensor)])
    numbers = pending_numbers()
    torch_ltc.sync(wait=True)
    return program, numbers


@contextmanager
def seen_events() -> Iterator[list[Any]]:
    """Compile, load, execute and refusal events of the block."""
    torch_ltc.wait_device_ops()
    seen: list[Any] = []
    kinds = (events.CompileEvent, events.LoadEvent, events.ExecuteEvent, events.RefusalEvent)
    stop = events.subscribe(seen.append, *kinds)
    try:
        yield seen
        torch_ltc.wait_device_ops()
    finally:
        stop()


def used(seen: list[Any]) -> list[str]:
    """The backend of each run."""
    return [event.backend for event in seen if isinstance(event, events.ExecuteEvent)]


def steps(count: int, step: Callable[[], Any]) -> None:
    """Take a step so often, each in a program of its own."""
    for _ in range(count):
        step()
        torch_ltc.sync(wait=True)
