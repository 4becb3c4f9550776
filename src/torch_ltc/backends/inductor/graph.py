"""The FX graph of a functional program, which Inductor compiles.

One node per call. Inputs that the program updates are written to by `copy_` at the end of the graph, so that Inductor
updates them where they are. Nothing is written when the data does not meet the preconditions of the calls: then the
graph says so in its last output.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_ltc.backends.inductor.channels_last import ChannelsLast
from torch_ltc.backends.inductor.flex_attention import FlexAttention
from torch_ltc.backends.inductor.partial_updates import keep_where
from torch_ltc.backends.inductor.preconditions import (
    Divides,
    Precondition,
    Probability,
    Shape,
    Shapes,
    Within,
    preconditions,
)
from torch_ltc.errors import CompileError
from torch_ltc.lowering.symbolic import SYMBOLIC_FUNCTIONS, SymbolicSizes
from torch_ltc.program.instruction import Call, Integer, Program, Size, SymbolicShape, Value, hint_of
from torch_ltc.program.spec import Spec
from torch_ltc.program.specialization import evaluated

aten = torch.ops.aten

_CONTIGUOUS = torch.contiguous_format
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)


@dataclass(frozen=True, slots=True)
class Built:
    """A graph and how to read its outputs: `returned` are the value numbers that it returns, each once; with
    `checked` one more output follows, a bool that is true when the data did not meet the preconditions of the calls."""

    module: fx.GraphModule
    returned: tuple[int, ...]
    checked: bool


def build(program: Program, by_kernel: bool = True) -> Built:
    """The graph of `program`. Its placeholders are the inputs, then the numbers, then the symbols. With `by_kernel`
    attention is left to Inductor's kernel for it, where it has one."""
    return _Builder(program, by_kernel).build()


class _Builder:
    """Holds the graph while it grows."""

    def __init__(self, program: Program, by_kernel: bool) -> None:
        self._program = program
        self._specs = program.specs()
        self._shapes = _shapes(program, self._specs)
        # Nodes of symbols and of expressions over them, by text.
        self._sizes: dict[str, Any] = {}
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        # For each value the inputs in whose memory it may lie.
        self._roots: dict[int, frozenset[int]] = {}
        self._fixed: dict[tuple[int, object], fx.Node] = {}
        self._wrong: list[fx.Node] = []
        # A device that runs asynchronously reports wrong data as eager does there, and does not end the process.
        self._checks = program.device.type == "cpu"
        # Positions that a call of the program has found: those of the largest elements, for the backward of pooling.
        self._found = {call.numbers[1] for call in program.calls if call.op is aten.max_pool2d_with_indices.default}
        self._layout = ChannelsLast(program, self._specs)
        self._attention = FlexAttention(program, by_kernel)

    def build(self) -> Built:
        """The finished graph."""
        given = [i.number for i in self._program.inputs] + [i.number for i in self._program.numbers]
        for number in given:
            self._nodes[number] = self._graph.placeholder(f"v{number}")
            self._roots[number] = frozenset({number})
        for symbol in self._program.symbols:
            self._sizes[symbol.name] = self._graph.placeholder(symbol.name)
        for call in self._program.calls:
            self._add_call(call)
        return self._finish()

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.call_function(op, args, kwargs)

    def _integer(self, value: object) -> Any:
        """The node of an expression over symbols; anything else as it is."""
        if not isinstance(value, Size):
            return value
        if value.expression not in self._sizes:
            tracer = fx.proxy.GraphAppendingTracer(self._graph)
            symbols = {s.name: fx.Proxy(self._sizes[s.name], tracer) for s in self._program.symbols}
            made = evaluated(value.expression, {**SYMBOLIC_FUNCTIONS, **symbols})
            self._sizes[value.expression] = made.node if isinstance(made, fx.Proxy) else made
        return self._sizes[value.expression]

    # ---- calls

    def _add_call(self, call: Call) -> None:
        replaced = {(d.argument, d.position): self._meet(call, d) for d in self._preconditions(call)}
        replaced |= {(name, None): self._channels_last(number) for name, number in self._layout.images(call)}
        names = [argument.name for argument in call.op._schema.arguments]
        args = [self._argument(name, operand, replaced) for name, operand in zip(names, call.args)]
        kwargs = {name: self._argument(name, operand, replaced) for name, operand in call.kwargs.items()}
        if call.op in _RESHAPES:
            # Inductor may lay an intermediate out in another way than was recorded, and a view of that be illegal.
            node = self._call(aten.reshape.default, *args[:2])
        else:
            node = self._call(self._attention.function(call), *(_kept_zeros(call, args)), **kwargs)
        self._bind(call, node)
        for number in self._layout.follow(call):
            self._nodes[number] = self._call(aten.clone.default, self._nodes[number], memory_format=_CONTIGUOUS)
        roots = self._roots_of(call)
        self._roots.update((number, roots) for number in call.numbers if number >= 0)

    def _argument(self, name: str, operand: object, replaced: dict[tuple[str, int | None], fx.Node]) -> Any:
        if isinstance(operand, tuple):
            return [replaced.get((name, i)) or self._argument(name, item, {}) for i, item in enumerate(operand)]
        if (name, None) in replaced:
            return replaced[name, None]
        return self._nodes[operand.number] if isinstance(operand, Value) else self._integer(operand)

    def _channels_last(self, number: int) -> fx.Node:
        """The value with its channels last in memory."""
        key = (number, torch.channels_last)
        if key not in self._fixed:
            self._fixed[key] = self._call(aten.clone.default, self._nodes[number], memory_format=torch.channels_last)
        return self._fixed[key]

    def _bind(self, call: Call, node: fx.Node) -> None:
        """Say which part of what the call returns each of its values is."""
        numbers = iter(call.numbers)
        for position, declared in enumerate(call.returns):
            part = node if len(call.returns) == 1 else None
            if not isinstance(declared, tuple):
                self._bind_one(next(numbers), node, part, position)
                continue
            for index in range(len(declared)):
                number = next(numbers)
                if number >= 0:
                    part = part or self._call(operator.getitem, node, position)
                    self._nodes[number] = self._call(operator.getitem, part, index)

    def _bind_one(self, number: int, node: fx.Node, single: fx.Node | None, position: int) -> None:
        if number >= 0:
            self._nodes[number] = single or self._call(operator.getitem, node, position)

    def _roots_of(self, call: Call) -> frozenset[int]:
        """The inputs in whose memory the results of a call may lie."""
        schema = call.op._schema
        if all(returned.alias_info is None for returned in schema.returns):
            return frozenset()
        return frozenset().union(*(self._roots[number] for number in call.operands))

    # ---- preconditions

    def _preconditions(self, call: Call) -> list[Precondition]:
        demanded = preconditions(call, self._shapes) if self._checks else []
        return [item for item in demanded if item.number not in self._found]

    def _meet(self, call: Call, precondition: Precondition) -> fx.Node:
        """The operand with harmless values where it does not meet the precondition, which is noted."""
        condition = precondition.condition
        node = self._nodes[precondition.number]
        if isinstance(condition, Divides):
            return self._meet_division(call, condition, precondition.number)
        key = (precondition.number, condition)
        if key not in self._fixed:
            if isinstance(condition, Probability):
                wrong = self._call(aten.logical_not.default, self._between(node, 0, 1))
                self._fixed[key] = self._call(aten.masked_fill.Scalar, node, wrong, 0.5)
            else:
                wrong, self._fixed[key] = self._meet_range(call, condition, node)
            self._note(wrong)
        return self._fixed[key]

    def _between(self, node: fx.Node, low: Integer, high: Integer) -> fx.Node:
        least = self._call(aten.ge.Scalar, node, self._integer(low))
        most = self._call(aten.le.Scalar, node, self._integer(high))
        return self._call(aten.logical_and.default, least, most)

    def _meet_range(self, call: Call, within: Within, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        if hint_of(within.low) >= hint_of(within.high):
            raise CompileError(f"{call.name} has indices into nothing", source=str(call.source))
        wrong = self._call(aten.logical_not.default, self._between(node, within.low, within.high - 1))
        if within.ignored is None:
            low, high = self._integer(within.low), self._integer(within.high - 1)
            return wrong, self._call(aten.clamp.default, node, low, high)
        wrong = self._call(aten.logical_and.default, wrong, self._call(aten.ne.Scalar, node, within.ignored))
        return wrong, self._call(aten.masked_fill.Scalar, node, wrong, max(hint_of(within.low), 0))

    def _meet_division(self, call: Call, condition: Divides, number: int) -> fx.Node:
        """Division by zero, and of the least integer by -1, which processors do not divide either."""
        divisor, dividend = self._nodes[number], condition.dividend
        spec = call.flat_returns[0].spec
        assert spec is not None
        wrong = self._call(aten.eq.Scalar, divisor, 0)
        if isinstance(dividend, Value) and spec.dtype.is_signed:
            least = self._call(aten.eq.Scalar, self._nodes[dividend.number], torch.iinfo(spec.dtype).min)
            negated = self._call(aten.eq.Scalar, divisor, -1)
            wrong = self._call(aten.logical_or.default, wrong, self._call(aten.logical_and.default, least, negated))
        self._note(wrong)
        one = self._call(aten.full.default, [], 1, dtype=self._specs[number].dtype, device=self._program.device)
        return self._call(aten.where.self, wrong, one, divisor)

    def _note(self, wrong: fx.Node) -> None:
        self._wrong.append(self._call(aten.any.default, wrong))

    # ---- the end

    def _finish(self) -> Built:
        inputs = [instruction.number for instruction in self._program.inputs]
        written = {inputs[update.input] for update in self._program.updates}
        wrong = self._combined()
        returned = tuple(dict.fromkeys(n for n in self._program.outputs if n not in inputs or n in written))
        # In memory of their own, not in that of an input: the code is called without what PyTorch wraps around it to
        # make such results views of the input, and the runtime would copy them.
        outputs = [self._apart(number, self._roots[number]) for number in returned]
        values = [self._apart(update.number, written) for update in self._program.updates]
        for update, value in zip(self._program.updates, values, strict=True):
            target = self._nodes[inputs[update.input]]
            if wrong is not None and not keep_where(wrong, target, value):
                value = self._call(aten.where.self, wrong, target, value)
            self._call(aten.copy_.default, target, value)
        self._graph.output((*outputs, *([] if wrong is None else [wrong])))
        module = fx.GraphModule(torch.nn.Module(), self._graph, "Program")
        return Built(module, returned, wrong is not None)

    def _combined(self) -> fx.Node | None:
        wrong: fx.Node | None = None
        for one in self._wrong:
            wrong = one if wrong is None else self._call(aten.logical_or.default, wrong, one)
        return wrong

    def _apart(self, number: int, written: Set[int]) -> fx.Node:
        """The value in memory that no update writes to, laid out as recorded."""
        node = self._nodes[number]
        if self._layout.differs(number):
            return self._call(aten.clone.default, node, memory_format=_CONTIGUOUS)
        return node if written.isdisjoint(self._roots[number]) else self._call(aten.clone.default, node)


def _kept_zeros(call: Call, args: list[Any]) -> list[Any]:
    """The arguments of a product, an integer zero made a float: by that one Inductor does not multiply at all, not even
    what is infinite."""
    spec = call.flat_returns[0].spec
    if call.op not in (aten.mul.Tensor, aten.mul.Scalar) or spec is None or not spec.dtype.is_floating_point:
        return args
    return [0.0 if isinstance(arg, int) and arg == 0 else arg for arg in args]


def _shapes(program: Program, specs: dict[int, Spec]) -> Shapes:
    """The shape of every value, symbolic where it is."""
    shapes: dict[int, Spec | Shape] = dict(specs)
    for number, shape in program.symbolic_shapes.items():
        if number in specs:
            shapes[number] = Shape(specs[number].dtype, shape.size, specs[number].numel)
    return shapes


def example_inputs(program: Program, symbolic: SymbolicSizes) -> list[Any]:
    """Tensors with the shapes of the inputs and numbers, then the symbols. Inside a fake tensor mode they take no
    memory."""
    made: list[Any] = []
    for instruction in program.inputs:
        shape = program.symbolic_shapes.get(instruction.number)
        if shape is None:
            made.append(_example(instruction.spec, program.device))
        else:
            made.append(_symbolic_example(instruction.spec, shape, symbolic, program.device))
    # On the device: code for a GPU takes what lies on the host when it is launched, but a graph is captured once.
    made += [_example(instruction.spec, program.device) for instruction in program.numbers]
    return made + [symbolic.integers[symbol.name] for symbol in program.symbols]


def _example(spec: Spec, device: torch.device) -> torch.Tensor:
    base = torch.empty(spec.extent(), dtype=spec.dtype, device=device)
    return base.as_strided(spec.size, spec.stride, spec.offset)


def _symbolic_example(spec: Spec, shape: SymbolicShape, symbolic: SymbolicSizes, device: torch.device) -> torch.Tensor:
    size, stride, offset = symbolic.all(shape.size), symbolic.all(shape.stride), symbolic.integer(shape.offset)
    if spec.offset == 0:
        return torch.empty_strided(size, stride, dtype=spec.dtype, device=device)
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return torch.empty(extent, dtype=spec.dtype, device=device).as_strided(size, stride, offset)
