"""Builds the TorchScript graph of one segment, call by call."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_ltc.backends.torchscript.private import (
    GENERATOR,
    NUMBER,
    SCALAR_TYPES,
    TENSOR,
    Graph,
    ListType,
    OptionalType,
    TupleType,
    parse_schema,
)
from torch_ltc.backends.torchscript.segments import Segment
from torch_ltc.backends.torchscript.source_ranges import lines
from torch_ltc.lowering.gil import yield_gil
from torch_ltc.program.instruction import (
    Call,
    DeviceGenerator,
    PhysicalDevice,
    Return,
    ReturnKind,
    Scalar,
    Size,
    Value,
)
from torch_ltc.program.spec import Spec

_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_NO_SCHEMA = "(no schema)"
# With a number, TorchScript takes an overload that multiplies the number by the tensor: on the CPU these are rounded
# otherwise than the tensor by the number.
_SWAPPED = frozenset({"aten::mul_", "aten::multiply_"})
_SWAPPED_DTYPES = frozenset({torch.float16, torch.bfloat16})


class NotTaken(Exception):
    """TorchScript has no operator for this call."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.name)
        self.call = call


class GraphLowering:
    """Builds the graph of one segment. `current` is the call at which it stands."""

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self._segment = segment
        self._device = device
        self._graph: Any = Graph()
        self._values: dict[int, Any] = {}
        self._scalars: dict[int, Any] = {}
        # The values of symbols by name.
        self._symbols: dict[str, Any] = {}
        self._generator: Any = None
        # Those of all values, once they are asked for.
        self._specs: dict[int, Spec] | None = None
        # The node that has the line of the current call, or None.
        self._line: Any = None
        self.current: Call | None = None

    def lower(self) -> Any:
        """The finished graph. Raises `NotTaken` at a call that TorchScript lacks."""
        calls = self._segment.calls
        places = lines.of(call.source for call in calls)
        self._line = places.get((calls[0].source.file, calls[0].source.line)) if calls else None
        self._add_parameters()
        for call in calls:
            self.current = call
            self._line = places.get((call.source.file, call.source.line))
            self._lower_call(call)
            yield_gil()
        self.current = self._line = None
        outputs = [self._values[n] for n in self._segment.gives]
        self._graph.registerOutput(self._insert("prim::TupleConstruct", outputs, _tuple_type(len(outputs))))
        return self._graph

    def _add_parameters(self) -> None:
        given = {instruction.number for instruction in self._segment.program.inputs}
        for number in self._segment.kept:
            self._values[number] = self._parameter(f"{'p' if number in given else 'v'}{number}", TENSOR)
        if self._segment.moved:
            self._take_over(self._segment.moved)
        types = self._scalar_types()
        for slot in self._segment.scalars:
            self._scalars[slot] = self._parameter(f"s{slot}", types[slot])
        for place in self._segment.symbols:
            name = self._segment.program.symbols[place].name
            self._symbols[name] = self._parameter(f"size_{name}", SCALAR_TYPES[int])
        if self._segment.random:
            self._generator = self._parameter("generator", GENERATOR)

    def _take_over(self, moved: tuple[int, ...]) -> None:
        """Values in a list that is emptied at once: an argument would live until the function returns."""
        values = self._parameter("moved", ListType(TENSOR))
        node = self._node("prim::ListUnpack", [values], len(moved))
        for number, value in zip(moved, _typed_outputs(node, [TENSOR] * len(moved)), strict=True):
            value.setDebugName(f"v{number}")
            self._values[number] = value
        self._node("aten::clear", [values], 0)

    def _parameter(self, name: str, declared: Any) -> Any:
        value = self._graph.addInput(name)
        value.setType(declared)
        return value

    def _scalar_types(self) -> dict[int, Any]:
        types: dict[int, Any] = {}
        for call in self._segment.calls:
            for operand, declared in zip(_given(call), call.op._schema.arguments, strict=True):
                for item in operand if isinstance(operand, tuple) else (operand,):
                    if isinstance(item, Scalar):
                        # A bool fits no number type of TorchScript but the general one.
                        general = item.type is bool and str(declared.type) not in ("bool", "Optional[bool]")
                        types[item.slot] = NUMBER if general else SCALAR_TYPES[item.type]
        return types

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _lower_call(self, call: Call) -> None:
        schema = call.op._schema
        numbers_for_tensors = _has_number_for_tensor(call)
        inputs = [
            self._operand(value, declared, typed=not numbers_for_tensors)
            for value, declared in zip(_given(call), schema.arguments, strict=True)
        ]
        if numbers_for_tensors and self._is_swapped(call):
            product = self._insert(schema.name.removesuffix("_"), inputs)
            self._bind(call, 0, call.flat_returns[0], self._copy(inputs[0], product))
            return
        node = self._node(schema.name, inputs, len(schema.returns))
        if _is_recorded_overload(call, node.schema()):
            outputs = _typed_outputs(node, [declared.type for declared in schema.returns])
        else:
            node.destroy()
            outputs = [self._by_copy(call, inputs)]
        position = 0
        for declared, value in zip(call.returns, outputs, strict=True):
            if isinstance(declared, tuple):
                node = self._node("prim::ListUnpack", [value], len(declared))
                for item, part in zip(declared, _typed_outputs(node, [TENSOR] * len(declared)), strict=True):
                    self._bind(call, position, item, part)
                    position += 1
            else:
                self._bind(call, position, declared, value)
                position += 1

    def _node(self, kind: str, inputs: list[Any], outputs: int = 1) -> Any:
        """A new node at the end of the graph, on the line of the current call."""
        node = self._graph.create(kind, inputs, outputs)
        self._graph.insertNode(node)
        if self._line is not None:
            node.copyMetadata(self._line)
        return node

    def _insert(self, kind: str, inputs: list[Any], declared: Any = TENSOR) -> Any:
        """The one value of a new node."""
        value = self._node(kind, inputs).output()
        value.setType(declared)
        return value

    def _by_copy(self, call: Call, inputs: list[Any]) -> Any:
        """An `out=` call that TorchScript takes for another overload: the plain call, copied into the target."""
        schema = call.op._schema
        if schema.arguments[-1].name != "out" or len(schema.returns) != 1:
            raise NotTaken(call)
        node = self._node(schema.name, inputs[:-1])
        if node.schema() == _NO_SCHEMA:
            raise NotTaken(call)
        [result] = _typed_outputs(node, [TENSOR])
        return self._copy(inputs[-1], result)

    def _copy(self, target: Any, source: Any) -> Any:
        return self._insert("aten::copy_", [target, source, self._constant(False)])

    def _is_swapped(self, call: Call) -> bool:
        if call.op._schema.name not in _SWAPPED or self._device.type != "cpu":
            return False
        if self._specs is None:
            self._specs = self._segment.program.specs()
        return self._specs[call.operands[0]].dtype in _SWAPPED_DTYPES

    def _bind(self, call: Call, position: int, item: Return, value: Any) -> None:
        number = call.numbers[position]
        if number < 0:
            return
        if item.kind is ReturnKind.FRESH and position in (call.layout.copied or ()):
            value = self._laid_out(item, value)
        value.setDebugName(f"v{number}")
        self._values[number] = value

    def _laid_out(self, item: Return, value: Any) -> Any:
        """A copy of the value in the layout that was recorded for it."""
        spec = item.spec
        assert spec is not None
        constants = [[spec.extent()], spec.dtype, None, self._device, None, None]
        base = self._insert("aten::empty", [self._constant(c) for c in constants])
        layout = [self._constant(c) for c in (list(spec.size), list(spec.stride), spec.offset)]
        view = self._insert("aten::as_strided", [base, *layout])
        return self._insert("aten::copy_", [view, value, self._constant(False)])

    # ---- arguments ------------------------------------------------------------------------------------------------

    def _operand(self, operand: Any, declared: Any, *, typed: bool) -> Any:
        """The value for one argument. With `typed`, None has the type of the parameter that it is given for."""
        if isinstance(operand, Value):
            return self._values[operand.number]
        if isinstance(operand, Scalar):
            # In a tensor's place too: TorchScript has overloads that take a number there.
            return self._scalars[operand.slot]
        if isinstance(operand, Size):
            return self._symbols[operand.expression]
        if isinstance(operand, DeviceGenerator):
            return self._generator
        if isinstance(operand, PhysicalDevice):
            return self._constant(self._device)
        if isinstance(operand, tuple):
            return self._sequence(operand, declared)
        if isinstance(operand, bool) and "number" in str(declared.type):
            return self._constant(int(operand))
        value = self._constant(operand)
        if operand is None and typed and isinstance(declared.type, OptionalType):
            # Overloads that differ only in what may be None are told apart by it.
            value.setType(declared.type)
        return value

    def _sequence(self, operand: tuple[Any, ...], declared: Any) -> Any:
        kind = str(declared.type)
        if any(isinstance(item, (Value, Scalar, Size)) for item in operand) or "Tensor" in kind:
            element: Any = OptionalType.ofTensor() if "Optional[Tensor]" in kind else TENSOR
            if any(isinstance(item, Scalar) for item in operand):
                element = NUMBER
            elif any(isinstance(item, Size) for item in operand):
                element = SCALAR_TYPES[int]
            items = [self._operand(item, declared, typed=False) for item in operand]
            return self._insert("prim::ListConstruct", items, ListType(element))
        if not operand:
            empty = declared.type
            while isinstance(empty, OptionalType):
                empty = empty.getElementType()
            return self._insert("prim::ListConstruct", [], empty)
        if isinstance(operand[0], bool):
            # PyTorch reads a constant list of these, in the text of a graph, as integers.
            items = [self._constant(item) for item in operand]
            return self._insert("prim::ListConstruct", items, ListType(SCALAR_TYPES[bool]))
        return self._constant(list(operand))

    def _constant(self, value: object) -> Any:
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        constant = self._graph.insertConstant(value)
        if self._line is not None:
            constant.node().copyMetadata(self._line)
        return constant


def _given(call: Call) -> tuple[object, ...]:
    """The call's arguments in the order of its schema."""
    return (*call.args, *call.kwargs.values())


def _has_number_for_tensor(call: Call) -> bool:
    """True when a run-time number stands where the schema has a tensor."""
    return any(
        isinstance(value, Scalar) and "Tensor" in str(declared.type)
        for value, declared in zip(_given(call), call.op._schema.arguments, strict=True)
    )


def _typed_outputs(node: Any, types: list[Any]) -> list[Any]:
    outputs = list(node.outputs())
    for output, declared in zip(outputs, types, strict=True):
        output.setType(declared)
    return outputs


@functools.lru_cache(maxsize=4_096)
def _parsed(schema: str) -> Any:
    return parse_schema(schema)


def _is_recorded_overload(call: Call, schema: str) -> bool:
    """TorchScript chooses the overload by argument types alone, and may find none or another than the recorded one."""
    if schema == _NO_SCHEMA:
        return False
    chosen, recorded = _parsed(schema), call.op._schema
    if chosen.overload_name == recorded.overload_name:
        return True
    # Right too: the overload that takes a number where a number stands for a tensor.
    return len(chosen.arguments) == len(recorded.arguments) and all(
        (theirs.alias_info is None) == (ours.alias_info is None)
        and (str(theirs.type) == str(ours.type) or value is None or "number" in str(theirs.type))
        for value, theirs, ours in zip(_given(call), chosen.arguments, recorded.arguments, strict=True)
    )


def _tuple_type(length: int) -> Any:
    return TupleType([TENSOR] * length)
