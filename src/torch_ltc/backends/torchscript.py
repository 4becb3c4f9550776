"""The TorchScript backend, the default: the whole program as one TorchScript function.

TorchScript takes views, in-place calls, lists and run-time numbers as they are, and runs them without the interpreter
lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.errors import CompileError
from torch_ltc.lowering.calls import run_call
from torch_ltc.lowering.interface import Arguments, Backend, Computation, Outcome
from torch_ltc.program.instruction import (
    Call,
    DeviceGenerator,
    PhysicalDevice,
    Program,
    Return,
    ReturnKind,
    Scalar,
    Value,
)

# TorchScript's compiler recurses along chains of calls, some 150 bytes of stack for each.
_SEGMENT_CALLS = 1_000
_TENSOR = torch._C.TensorType.get()
_NUMBER = torch._C.NumberType.get()
_SCALAR_TYPES = {
    int: torch._C.IntType.get(),
    float: torch._C.FloatType.get(),
    bool: torch._C.BoolType.get(),
    complex: torch._C.ComplexType.get(),
}


class TorchScriptBackend(Backend):
    """Lowers a program to TorchScript graphs, call by call."""

    name = "torchscript"

    def compile(self, program: Program) -> Computation:
        """TorchScript functions for the program: one, unless it is very long or has calls that TorchScript lacks."""
        direct: set[int] = set()
        while True:
            try:
                parts = [_compile(segment, program.device) for segment in split(program, direct)]
                return ScriptComputation(parts, program)
            except _NotTaken as refusal:
                direct.add(id(refusal.call))


class _NotTaken(Exception):
    """TorchScript has no operator for this call."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.name)
        self.call = call


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of calls that becomes one function, or one call that TorchScript lacks and that is run as it is (`direct`):
    which values and numbers it takes, and which values it gives."""

    program: Program
    calls: tuple[Call, ...]
    takes: tuple[int, ...]
    scalars: tuple[int, ...]
    gives: tuple[int, ...]
    # Values that nothing after this segment needs.
    dead: tuple[int, ...]
    random: bool
    direct: bool


def _chunks(calls: list[Call], direct: set[int]) -> list[list[Call]]:
    chunks: list[list[Call]] = [[]]
    for call in calls:
        alone = id(call) in direct
        if chunks[-1] and (alone or id(chunks[-1][0]) in direct or len(chunks[-1]) >= _SEGMENT_CALLS):
            chunks.append([])
        chunks[-1].append(call)
    return chunks


def split(program: Program, direct: set[int]) -> list[Segment]:
    """The program in segments short enough for TorchScript, which recurses along chains of calls; calls whose identity
    is in `direct` stand alone."""
    chunks = _chunks(program.calls, direct)
    needed = set(program.outputs)
    segments: list[Segment] = []
    for chunk in reversed(chunks):
        made = {n for call in chunk for n in call.numbers if n >= 0}
        used = {n for call in chunk for n in call.operands}
        slots = sorted({s.slot for call in chunk for s in _scalars(call)})
        takes = tuple(sorted(used - made))
        # An output may also be a value that came in from outside.
        gives = tuple(n for n in sorted(needed) if n in made)
        dead = tuple(n for n in takes if n not in needed)
        random = any(call.random for call in chunk)
        alone = bool(chunk) and id(chunk[0]) in direct
        segments.append(Segment(program, tuple(chunk), takes, tuple(slots), gives, dead, random, alone))
        needed = (needed - made) | set(takes)
    segments.reverse()
    return segments


def _scalars(call: Call) -> Iterator[Scalar]:
    for operand in (*call.args, *call.kwargs.values()):
        for item in operand if isinstance(operand, tuple) else (operand,):
            if isinstance(item, Scalar):
                yield item


@dataclass(frozen=True, slots=True)
class _Compiled:
    segment: Segment
    graph: Any
    function: Any


def _compile(segment: Segment, device: torch.device) -> _Compiled:
    if segment.direct:
        return _Compiled(segment, segment.calls[0].name, None)
    lowering = _Lowering(segment, device)
    try:
        graph = lowering.lower()
        graph.lint()
        function = torch._C._create_function_from_graph("program", graph)
    except (RuntimeError, ValueError, TypeError) as error:
        call = lowering.current
        where = f" at {call.name}" if call is not None else ""
        raise CompileError(
            f"TorchScript cannot take program {segment.program.identity}{where}: {str(error).splitlines()[0]}",
            source=str(call.source) if call is not None else None,
        ) from error
    return _Compiled(segment, graph, function)


class ScriptComputation(Computation):
    """Compiled functions, run one after the other."""

    def __init__(self, parts: list[_Compiled], program: Program) -> None:
        self.program = program
        self._parts = parts
        self._inputs = [i.number for i in program.inputs]
        self._outputs = program.outputs

    def run(self, arguments: Arguments) -> Outcome:
        """Call the functions. A failure raises: which calls ran before it is not known."""
        values: dict[int, Any] = dict(zip(self._inputs, arguments.inputs, strict=True))
        # Without this the executor profiles the first runs and then specialises: pauses that the user would see.
        with torch.jit.optimized_execution(False):
            for part in self._parts:
                segment = part.segment
                if segment.direct:
                    made = run_call(segment.calls[0], values.__getitem__, arguments)
                    values.update((number, made[number]) for number in segment.gives)
                    for number in segment.dead:
                        del values[number]
                    continue
                given = [values[n] for n in segment.takes]
                given += [arguments.scalars[slot] for slot in segment.scalars]
                if segment.random:
                    given.append(arguments.generator)
                for number in segment.dead:
                    del values[number]
                values.update(zip(segment.gives, part.function(*given), strict=True))
        return Outcome([values[n] for n in self._outputs])

    def to_string(self) -> str:
        """The graphs' own text."""
        return "\n".join(str(part.graph) for part in self._parts)


class _Lowering:
    """Builds the graph of one segment."""

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self._segment = segment
        self._device = device
        self._graph: Any = torch._C.Graph()
        self._values: dict[int, Any] = {}
        self._scalars: dict[int, Any] = {}
        self._generator: Any = None
        self._last: Any = None
        self.current: Call | None = None

    def lower(self) -> Any:
        """The finished graph."""
        self._add_parameters()
        for call in self._segment.calls:
            self.current = call
            self._lower_call(call)
        self.current = None
        outputs = [self._values[n] for n in self._segment.gives]
        self._graph.registerOutput(self._insert("prim::TupleConstruct", outputs, _tuple_type(len(outputs))))
        return self._graph

    def _add_parameters(self) -> None:
        for number in self._segment.takes:
            value = self._graph.addInput(f"p{number}")
            value.setType(_TENSOR)
            self._values[number] = value
        types = self._scalar_types()
        for slot in self._segment.scalars:
            value = self._graph.addInput(f"s{slot}")
            value.setType(types[slot])
            self._scalars[slot] = value
        if self._segment.random:
            self._generator = self._graph.addInput("generator")
            self._generator.setType(torch._C._GeneratorType.get())

    def _scalar_types(self) -> dict[int, Any]:
        types: dict[int, Any] = {}
        for call in self._segment.calls:
            given = (*call.args, *call.kwargs.values())
            for operand, declared in zip(given, call.op._schema.arguments, strict=True):
                for item in operand if isinstance(operand, tuple) else (operand,):
                    if isinstance(item, Scalar):
                        # A bool fits no number type of TorchScript but the general one.
                        general = item.type is bool and str(declared.type) not in ("bool", "Optional[bool]")
                        types[item.slot] = _NUMBER if general else _SCALAR_TYPES[item.type]
        return types

    def _insert(self, kind: str, inputs: list[Any], *types: Any) -> Any:
        node = self._graph.create(kind, inputs, len(types))
        self._graph.insertNode(node)
        self._last = node
        if kind.startswith("aten::") and node.schema() == "(no schema)":
            assert self.current is not None
            raise _NotTaken(self.current)
        outputs = list(node.outputs())
        for output, declared in zip(outputs, types, strict=True):
            output.setType(declared)
        return outputs[0] if len(outputs) == 1 else outputs

    def _lower_call(self, call: Call) -> None:
        schema = call.op._schema
        given = [*call.args, *call.kwargs.values()]
        inputs = [self._operand(value, declared) for value, declared in zip(given, schema.arguments, strict=True)]
        types = [declared.type for declared in schema.returns]
        out = self._insert(schema.name, inputs, *types)
        if not self._is_recorded_overload(call):
            out = self._by_copy(call, inputs)
        outputs = [] if not types else [out] if len(types) == 1 else out
        position = 0
        for declared, value in zip(call.returns, outputs, strict=True):
            if isinstance(declared, tuple):
                unpacked = self._insert("prim::ListUnpack", [value], *([_TENSOR] * len(declared)))
                parts = [unpacked] if len(declared) == 1 else unpacked if declared else []
                for item, part in zip(declared, parts, strict=True):
                    self._bind(call, position, item, part)
                    position += 1
            else:
                self._bind(call, position, declared, value)
                position += 1

    def _by_copy(self, call: Call, inputs: list[Any]) -> Any:
        """An `out=` call that TorchScript takes for another overload: the plain call, copied into the target."""
        self._last.destroy()
        schema = call.op._schema
        if schema.arguments[-1].name != "out" or len(schema.returns) != 1:
            raise _NotTaken(call)
        result = self._insert(schema.name, inputs[:-1], _TENSOR)
        return self._insert("aten::copy_", [inputs[-1], result, self._constant(False)], _TENSOR)

    def _is_recorded_overload(self, call: Call) -> bool:
        """TorchScript chooses the overload by argument types alone, and may choose another than the one recorded."""
        chosen = torch._C.parse_schema(self._last.schema()).overload_name
        declared = call.op._schema.arguments
        in_place_of_tensor = any(
            isinstance(value, Scalar) and "Tensor" in str(argument.type)
            for value, argument in zip((*call.args, *call.kwargs.values()), declared, strict=True)
        )
        return bool(chosen == call.op._schema.overload_name) or in_place_of_tensor

    def _bind(self, call: Call, position: int, item: Return, value: Any) -> None:
        number = call.numbers[position]
        if number < 0:
            return
        if item.kind is ReturnKind.FRESH and position in (call.layout.copied or ()):
            value = self._laid_out(item, value)
        self._values[number] = value

    def _laid_out(self, item: Return, value: Any) -> Any:
        spec = item.spec
        assert spec is not None
        constants = [[spec.extent()], spec.dtype, None, self._device, None, None]
        base = self._insert("aten::empty", [self._constant(c) for c in constants], _TENSOR)
        geometry = [self._constant(c) for c in (list(spec.size), list(spec.stride), spec.offset)]
        view = self._insert("aten::as_strided", [base, *geometry], _TENSOR)
        return self._insert("aten::copy_", [view, value, self._constant(False)], _TENSOR)

    def _operand(self, operand: Any, declared: Any) -> Any:
        if isinstance(operand, Value):
            return self._values[operand.number]
        if isinstance(operand, Scalar):
            # In a tensor's place too: TorchScript has overloads that take a number there.
            return self._scalars[operand.slot]
        if isinstance(operand, DeviceGenerator):
            return self._generator
        if isinstance(operand, PhysicalDevice):
            return self._constant(self._device)
        if isinstance(operand, tuple):
            return self._sequence(operand, declared)
        if isinstance(operand, bool) and "number" in str(declared.type):
            return self._constant(int(operand))
        return self._constant(operand)

    def _sequence(self, operand: tuple[Any, ...], declared: Any) -> Any:
        if any(isinstance(item, (Value, Scalar)) for item in operand) or "Tensor" in str(declared.type):
            kind = str(declared.type)
            element: Any = torch._C.OptionalType.ofTensor() if "Optional[Tensor]" in kind else _TENSOR
            if any(isinstance(item, Scalar) for item in operand):
                element = _NUMBER
            items = [self._operand(item, declared) for item in operand]
            return self._insert("prim::ListConstruct", items, torch._C.ListType(element))
        if not operand:
            element = declared.type
            while isinstance(element, torch._C.OptionalType):
                element = element.getElementType()
            return self._insert("prim::ListConstruct", [], element)
        return self._constant(list(operand))

    def _constant(self, value: object) -> Any:
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        return self._graph.insertConstant(value)


def _tuple_type(length: int) -> Any:
    return torch._C.TupleType([_TENSOR] * length)


_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
