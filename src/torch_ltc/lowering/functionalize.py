"""Functionalization of recorded programs: no writes, no views that matter, numbers as tensors, small operators.

PyTorch does the work: the recorded calls run once on fake tensors under its own functionalization, and a dispatch mode
below it decomposes operators with PyTorch's tables and writes down the pure calls that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, reduce
from importlib import import_module
from typing import Any

import torch

from torch_ltc.errors import CompileError, LtcError
from torch_ltc.lowering.decomposition_tables import one_by_one
from torch_ltc.lowering.gil import yield_gil
from torch_ltc.lowering.kernel_call import flatten_results
from torch_ltc.lowering.program_builder import Shape, Table, Writer, hints_of, is_written
from torch_ltc.lowering.scalar_inputs import NUMBER_SPECS, tensor_form
from torch_ltc.lowering.shared_elements import may_overlap_itself, reads_what_it_writes
from torch_ltc.program.collectives import functional_name, is_collective
from torch_ltc.program.instruction import (
    Call,
    DeviceGenerator,
    PhysicalDevice,
    Program,
    Return,
    ReturnKind,
    Scalar,
    Size,
    SymbolicShape,
    Update,
    Value,
    written_positions,
)
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.program.symbolic_key import STORAGE_CALLS
from torch_ltc.pytorch.private import (
    FakeTensorMode,
    OpOverload,
    disable_functionalization,
    enable_functionalization,
    from_functional,
    has_kernel_for,
    sync_functional,
    to_functional,
)

aten = torch.ops.aten
# Calls that change the storage behind a tensor.
_REFUSED = ("resize_", "set_", "batch_norm_update_stats")


@dataclass(frozen=True, slots=True)
class Parameter:
    """An input of the functional program: the recorded input at `position`, or with `flat` the whole memory behind it,
    of which the recorded inputs of that buffer are views."""

    position: int
    spec: Spec
    flat: bool


@dataclass(frozen=True, slots=True)
class Functional:
    """A functional program, how its inputs come from those of the recorded one, and the numbers that were taken for
    constants, by slot: with any other value of these the program is another. So it is if a guard does not hold."""

    program: Program
    parameters: tuple[Parameter, ...]
    fixed: tuple[tuple[int, object], ...]
    guards: tuple[str, ...] = ()


def functionalize(program: Program, numbers: Sequence[object], varying: Set[int], table: Table) -> Functional:
    """The functional form of `program`. Numbers in the slots `varying` stay run-time inputs where the operators that
    take them have a form with tensors; all others become constants with the value they have in `numbers`."""
    tracer = _Tracer(program, numbers, varying, table)
    try:
        return tracer.trace()
    except LtcError:
        raise
    except Exception as error:
        call = tracer.current
        where = f" at {call.name}" if call is not None else ""
        raise CompileError(
            f"program {program.identity} has no functional form{where}: {(str(error) or repr(error)).splitlines()[0]}",
            source=str(call.source) if call is not None else None,
        ) from error


def plan_parameters(program: Program) -> tuple[Parameter, ...]:
    """One parameter per input buffer."""
    by_buffer: dict[int, list[tuple[int, Spec]]] = {}
    for position, instruction in enumerate(program.inputs):
        by_buffer.setdefault(instruction.buffer, []).append((position, instruction.spec))
    storage = any(_addresses_storage(call.op) for call in program.calls)
    return tuple(_parameter(seen, storage) for seen in by_buffer.values())


@cache
def _addresses_storage(op: OpOverload) -> bool:
    return op._schema.name.split("::")[1].startswith(STORAGE_CALLS)


def _parameter(seen: list[tuple[int, Spec]], storage: bool) -> Parameter:
    position, spec = seen[0]
    if spec.contiguous and len(seen) == 1:
        return Parameter(position, spec, False)
    plain = not (spec.conj or spec.neg or spec.overlaps_itself())
    if len(seen) == 1 and plain and (spec.covers_storage() or not storage):
        return Parameter(position, spec, False)
    if len({item.dtype for _, item in seen}) > 1:
        raise CompileError("inputs that see one memory with several dtypes have no functional form")
    extent = max(item.extent() for _, item in seen)
    return Parameter(position, make_spec(spec.dtype, (extent,), (1,)), True)


class _Tracer:
    """Runs the recorded calls once, on fake tensors."""

    def __init__(self, program: Program, numbers: Sequence[object], varying: Set[int], table: Table) -> None:
        self._program = program
        self._numbers = numbers
        self._varying = varying
        self._values: list[Any] = [None] * program.values
        # By number of a value: itself and the views that it was made through.
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        # Views that `unfold` made, by `id`; all values are kept.
        self._windows: set[int] = set()
        self._slots: dict[int, torch.Tensor] = {}
        self._fixed: dict[int, object] = {}
        self._parameters = plan_parameters(program)
        self._symbolic = _symbolic_sizes(program)
        self._writer = Writer(table, program.device, self._symbolic)
        self.current: Call | None = None

    def trace(self) -> Functional:
        """The functional program."""
        env = None if self._symbolic is None else self._symbolic.env
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
        with torch.no_grad(), fake:
            given = [self._writer.add_input(i, p.spec, *self._shape_of(p)) for i, p in enumerate(self._parameters)]
            wrapped = [to_functional(tensor) for tensor in given]
            slots = {slot: self._writer.add_number(slot, type(self._numbers[slot])) for slot in self._tensor_slots()}
            self._slots = {slot: to_functional(tensor) for slot, tensor in slots.items()}
            with self._writer:
                enable_functionalization(reapply_views=True)
                try:
                    self._bind_inputs(wrapped)
                    for call in self._program.calls:
                        self.current = call
                        self._writer.source = call.source
                        self._run(call)
                        yield_gil()
                    self.current = None
                finally:
                    disable_functionalization()
                outputs = [self._final(self._values[number]) for number in self._program.outputs]
                ended = [self._final(tensor) for tensor in wrapped]
        updates = [Update(i, number) for i, number in enumerate(ended) if number != i]
        program = self._writer.program(self._program, outputs, updates)
        guards = () if self._symbolic is None else self._symbolic.guards()
        return Functional(program, self._parameters, tuple(sorted(self._fixed.items())), guards)

    def _symbolic_shape(self, number: int, spec: Spec) -> SymbolicShape:
        """Sizes, strides and offset of a recorded input, symbolic where they are."""
        shape = self._program.symbolic_shapes.get(number)
        if shape is None or self._symbolic is None:
            return SymbolicShape(spec.size, spec.stride, spec.offset)
        symbols = self._symbolic
        return SymbolicShape(symbols.all(shape.size), symbols.all(shape.stride), symbols.integer(shape.offset))

    def _shape_of(self, parameter: Parameter) -> tuple[Sequence[Any], Sequence[Any]]:
        inputs = self._program.inputs
        first = inputs[parameter.position]
        if not parameter.flat:
            shape = self._symbolic_shape(first.number, first.spec)
            return shape.size, shape.stride
        if self._symbolic is None:
            return parameter.spec.size, parameter.spec.stride
        seen = [self._symbolic_shape(i.number, i.spec) for i in inputs if i.buffer == first.buffer]
        return (reduce(torch.sym_max, map(_extent, seen)),), (1,)

    def _tensor_slots(self) -> list[int]:
        """Slots that vary and that every call can take as a tensor."""
        wanted = {slot for slot in self._varying if type(self._numbers[slot]) in NUMBER_SPECS}
        for call in self._program.calls:
            for slot in scalar_slots(call):
                if slot in wanted and tensor_form(call.op) is None:
                    wanted.discard(slot)
        return sorted(wanted)

    def _bind_inputs(self, wrapped: list[torch.Tensor]) -> None:
        of_buffer = {self._program.inputs[p.position].buffer: (p, t) for p, t in zip(self._parameters, wrapped)}
        for instruction in self._program.inputs:
            parameter, tensor = of_buffer[instruction.buffer]
            if parameter.flat:
                spec = instruction.spec
                shape = self._symbolic_shape(instruction.number, spec)
                tensor = aten.as_strided.default(tensor, shape.size, shape.stride, shape.offset)
                tensor = aten._conj.default(tensor) if spec.conj else tensor
                tensor = aten._neg_view.default(tensor) if spec.neg else tensor
            self._values[instruction.number] = tensor
            self._views[instruction.number] = (tensor,)

    def _final(self, tensor: torch.Tensor) -> int:
        sync_functional(tensor)
        return self._writer.number_of(from_functional(tensor))

    def _run(self, call: Call) -> None:
        args = [self._fill(operand) for operand in call.args]
        kwargs = {name: self._fill(operand) for name, operand in call.kwargs.items()}
        if is_collective(call.op):
            self._communicate(call, args)
            return
        self._check_writes(call, args, kwargs)
        if call.random and call.mutated == call.operands[:1] and call.op._schema.name.endswith("_"):
            self._draw(call, args, kwargs)
            return
        run = _declared(call)
        numbered = any(slot in self._slots for slot in scalar_slots(call))
        if call.mutated and _depend_on_each_other(call, args):
            if numbered or not has_kernel_for(call.op.name(), "CompositeExplicitAutograd"):
                raise CompileError(f"{call.name} writes to memory that it reads afterwards", source=str(call.source))
            run = one_by_one(call.op)
        elif numbered:
            form = tensor_form(call.op)
            assert form is not None
            run = form
        mark = self._writer.mark()
        results = flatten_results(run(*args, **kwargs), call)
        if not call.mutated and not numbered and not all(map(_fits, call.flat_returns, results)):
            # Fake kernels that do not know the real one's sizes: the record does.
            self._writer.roll_back(mark)
            results = self._opaque(call, args, kwargs)
        for item, number, result in zip(call.flat_returns, call.numbers, results, strict=True):
            if number >= 0:
                self._values[number] = made = self._laid_out(call, item, result)
                if item.kind in (ReturnKind.VIEW, ReturnKind.SAME):
                    known = self._views.get(call.operands[item.operand], ())
                    self._views[number] = known if item.kind is ReturnKind.SAME else (*known, made)
                if call.op is aten.unfold.default:
                    self._windows.add(id(made))

    def _check_writes(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Refuse writes through views of which several elements are one, which PyTorch's functionalization takes for
        elements of their own, and writes whose result depends on the order in which a kernel goes."""
        written = call.mutated
        if not written:
            return
        views = {id(view): view for number in written for view in self._views.get(number, ())}
        if any(map(may_overlap_itself, views.values())):
            raise CompileError(f"{call.name} writes to elements that share memory", source=str(call.source))
        if not self._windows.isdisjoint(views):
            # PyTorch's functionalization puts zeros between them.
            raise CompileError(f"{call.name} writes to windows of aten::unfold", source=str(call.source))
        names = [argument.name for argument in call.op._schema.arguments]
        given = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
        in_order = call.op is aten.copy_.default or torch.Tag.pointwise in call.op.tags
        if reads_what_it_writes(given, written_positions(call.op), in_order):
            raise CompileError(f"{call.name} reads elements that it has written to", source=str(call.source))

    def _draw(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> None:
        """A random call that fills its first argument: it fills memory of its own, laid out in the same way, because
        the order of the draws depends on the layout; the target then becomes a copy."""
        target = args[0]
        size, stride, options = target.size(), target.stride(), {"dtype": target.dtype, "device": target.device}
        rest = [self._plain(value) for value in args[1:]]
        with _outside_functionalization():
            memory = aten.empty_strided.default(size, stride, **options)
            [filled] = self._writer.write_opaque(call, [memory, *rest], kwargs, [(size, stride, target.dtype)])
        assert filled is not None
        aten.copy_.default(target, to_functional(filled))
        for number in call.numbers:
            if number >= 0:
                self._values[number] = target

    def _communicate(self, call: Call, args: list[Any]) -> None:
        """A collective: its functional form as it is, and copies of what that returns in the targets."""
        [position] = written_positions(call.op)
        given = args[position]
        targets = given if isinstance(given, list) else [given]
        if _depends_on_symbols(targets):
            raise CompileError(f"{call.name} takes tensors whose sizes change", source=str(call.source))
        specs = [make_spec(target.dtype, tuple(target.size()), target.stride()) for target in targets]
        packet = getattr(
            getattr(torch.ops, call.op.namespace), functional_name(call.op._schema.name.rpartition("::")[2])
        )
        form = replace(call, op=packet.default, returns=(tuple(Return(ReturnKind.FRESH, spec) for spec in specs),))
        made = self._opaque(form, args, {})
        for target, filled in zip(targets, made, strict=True):
            aten.copy_.default(target, filled)

    def _opaque(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Write the call down as it is, with results as they were recorded."""
        given = [self._plain(value) for value in args]
        named = {name: self._plain(value) for name, value in kwargs.items()}
        if _depends_on_symbols([*given, *named.values()]):
            raise CompileError(f"{call.name} makes sizes that its kernel alone knows", source=str(call.source))
        with _outside_functionalization():
            made = self._writer.write_opaque(call, given, named, [_shape(item.spec) for item in call.flat_returns])
        return [None if tensor is None else to_functional(tensor) for tensor in made]

    def _plain(self, value: Any) -> Any:
        """The fake tensor that a functional one stands for now."""
        if isinstance(value, torch.Tensor):
            sync_functional(value)
            return from_functional(value)
        return [self._plain(item) for item in value] if isinstance(value, list) else value

    def _laid_out(self, call: Call, item: Return, result: Any) -> Any:
        spec = item.spec
        if item.kind not in (ReturnKind.FRESH, ReturnKind.VIEW) or spec is None:
            return result
        if not _fits(item, result):
            raise CompileError(
                f"{call.name} gives {result.dtype}{list(result.size())} on fake tensors where {spec} was recorded",
                source=str(call.source),
            )
        if item.kind is ReturnKind.VIEW or hints_of(result.stride()) == spec.stride:
            return result
        # Other strides than the real kernel's would make later views legal or illegal that are not.
        if spec.covers_storage():
            order = sorted(range(len(spec.size)), key=lambda d: (-spec.stride[d], d))
            dense = aten.clone.default(aten.permute.default(result, order), memory_format=torch.contiguous_format)
            return aten.permute.default(dense, sorted(range(len(order)), key=order.__getitem__))
        if _depends_on_symbols([result]):
            raise CompileError(f"{call.name} lays its result out with holes, {spec}", source=str(call.source))
        base = aten.empty_strided.default(spec.size, spec.stride, dtype=spec.dtype, device=self._program.device)
        return aten.copy.default(base, result)

    def _fill(self, operand: object) -> Any:
        if isinstance(operand, Value):
            return self._values[operand.number]
        if isinstance(operand, Scalar):
            tensor = self._slots.get(operand.slot)
            if tensor is not None:
                return tensor
            self._fixed[operand.slot] = self._numbers[operand.slot]
            return self._numbers[operand.slot]
        if isinstance(operand, tuple):
            return [self._fill(item) for item in operand]
        if isinstance(operand, Size):
            return self._symbolic.integer(operand)
        if isinstance(operand, DeviceGenerator):
            return None
        if isinstance(operand, PhysicalDevice):
            return self._program.device
        return operand


def _fits(item: Return, result: Any) -> bool:
    spec = item.spec
    if item.kind not in (ReturnKind.FRESH, ReturnKind.VIEW) or spec is None:
        return True
    return hints_of(result.size()) == spec.size and result.dtype is spec.dtype


def _shape(spec: Spec | None) -> Shape | None:
    return None if spec is None else (spec.size, spec.stride, spec.dtype)


def _symbolic_sizes(program: Program) -> Any:
    """PyTorch's symbols for those of the program; None if it has none."""
    if not program.symbols:
        return None
    # Its imports take about a second: nobody pays that whose sizes do not change.
    return import_module("torch_ltc.lowering.symbolic").SymbolicSizes(program.symbols)


def _extent(shape: SymbolicShape) -> Any:
    """Number of storage elements that a tensor of this shape reaches. It is not empty."""
    sizes: Any = zip(shape.size, shape.stride, strict=True)
    return shape.offset + 1 + sum((n - 1) * s for n, s in sizes)


def _depends_on_symbols(values: Sequence[Any]) -> bool:
    for value in values:
        parts = (*value.size(), *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        if isinstance(value, (list, tuple)) and _depends_on_symbols(value):
            return True
        if any(isinstance(part, (torch.SymInt, torch.SymFloat)) and part.node.expr.free_symbols for part in parts):
            return True
    return False


@contextmanager
def _outside_functionalization() -> Iterator[None]:
    disable_functionalization()
    try:
        yield
    finally:
        enable_functionalization(reapply_views=True)


def _declared(call: Call) -> Callable[..., Any]:
    """The operator, or the one that does the same and says what it writes to."""
    name = call.op._schema.name.removeprefix("aten::")
    if call.op is aten.polygamma_.default:
        return _polygamma_
    if call.op is aten.native_batch_norm.default:
        plain = isinstance(call.args[3], Value)
        return aten._native_batch_norm_legit.default if plain else _batch_norm_without_statistics
    undeclared = len(written_positions(call.op)) > sum(map(is_written, call.op._schema.arguments))
    if call.mutated and (name.startswith(_REFUSED) or undeclared):
        raise CompileError(f"{call.name} has no functional form", source=str(call.source))
    return call.op


def _depend_on_each_other(call: Call, args: list[Any]) -> bool:
    """True for a call on lists that writes to memory which it takes at another place of a list too: the functional form
    takes all that it reads before it writes."""
    places: dict[int, set[int]] = {}
    written: set[int] = set()
    for position, value in enumerate(args):
        for place, tensor in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(tensor, torch.Tensor):
                memory = tensor.untyped_storage()._cdata
                places.setdefault(memory, set()).add(place if isinstance(value, list) else -1)
                if isinstance(value, list) and position in written_positions(call.op):
                    written.add(memory)
    return any(len(places[memory]) > 1 for memory in written)


def _polygamma_(self: Any, n: int) -> Any:
    # PyTorch's functionalization does not know it: its functional form has the arguments in another order.
    return aten.copy_.default(self, aten.polygamma.default(n, self))


def _batch_norm_without_statistics(input: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Any:
    del mean, variance
    return aten._native_batch_norm_legit.no_stats(input, weight, bias, *rest)


def scalar_slots(call: Call) -> list[int]:
    """The slots of the run-time numbers that a call takes."""
    found: list[int] = []
    for operand in (*call.args, *call.kwargs.values()):
        for item in operand if isinstance(operand, tuple) else (operand,):
            if isinstance(item, Scalar):
                found.append(item.slot)
    return found
