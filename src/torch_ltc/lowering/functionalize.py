"""From a recorded program to a functional one: no writes, no views that matter, numbers as tensors, small operators.

PyTorch does the work: the recorded calls run once on fake tensors under its own functionalization, and a dispatch mode
below it takes operators apart with PyTorch's decompositions and writes down the pure calls that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ltc.errors import CompileError, LtcError
from torch_ltc.lowering.calls import flatten_results
from torch_ltc.lowering.numbers import NUMBER_SPECS, tensor_form
from torch_ltc.program.instruction import (
    DEVICE_GENERATOR,
    Call,
    DeviceGenerator,
    Input,
    Instruction,
    Number,
    PhysicalDevice,
    Program,
    Return,
    ReturnKind,
    Returns,
    Scalar,
    Update,
    Value,
    flatten_returns,
    written_positions,
)
from torch_ltc.program.source import UNKNOWN, Source
from torch_ltc.program.spec import Spec, make_spec, spec_of

aten = torch.ops.aten
Table = Mapping[OpOverload, Callable[..., Any]]
# Calls that address the storage behind a tensor, not the tensor.
_REFUSED = ("resize_", "set_", "batch_norm_update_stats")
_STORAGE_CALLS = ("as_strided", "_reshape_alias", "set_", "resize_")


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
    constants, by slot: with any other value of these the program is another."""

    program: Program
    parameters: tuple[Parameter, ...]
    fixed: tuple[tuple[int, object], ...]


def functionalize(program: Program, numbers: Sequence[object], varying: set[int], table: Table) -> Functional:
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
    storage = any(call.op._schema.name.split("::")[1].startswith(_STORAGE_CALLS) for call in program.calls)
    return tuple(_parameter(seen, storage) for seen in by_buffer.values())


def _parameter(seen: list[tuple[int, Spec]], storage: bool) -> Parameter:
    position, spec = seen[0]
    plain = not (spec.conj or spec.neg or spec.overlaps_itself())
    if len(seen) == 1 and plain and (spec.covers_storage() or not storage):
        return Parameter(position, spec, False)
    if len({item.dtype for _, item in seen}) > 1:
        raise CompileError("inputs that see one memory with several dtypes have no functional form")
    extent = max(item.extent() for _, item in seen)
    return Parameter(position, make_spec(spec.dtype, (extent,), (1,)), True)


class _Tracer:
    """Runs the recorded calls once, on fake tensors."""

    def __init__(self, program: Program, numbers: Sequence[object], varying: set[int], table: Table) -> None:
        self._program = program
        self._numbers = numbers
        self._varying = varying
        self._values: list[Any] = [None] * program.values
        self._slots: dict[int, torch.Tensor] = {}
        self._fixed: dict[int, object] = {}
        self._parameters = plan_parameters(program)
        self._writer = _Writer(table, program.device)
        self.current: Call | None = None

    def trace(self) -> Functional:
        """The functional program."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.no_grad(), fake:
            given = [self._writer.add_input(i, p.spec) for i, p in enumerate(self._parameters)]
            wrapped = [torch._to_functional_tensor(tensor) for tensor in given]
            slots = {slot: self._writer.add_number(slot, type(self._numbers[slot])) for slot in self._tensor_slots()}
            self._slots = {slot: torch._to_functional_tensor(tensor) for slot, tensor in slots.items()}
            with self._writer:
                torch._enable_functionalization(reapply_views=True)
                try:
                    self._bind_inputs(wrapped)
                    for call in self._program.calls:
                        self.current = call
                        self._writer.source = call.source
                        self._run(call)
                    self.current = None
                finally:
                    torch._disable_functionalization()
                outputs = [self._final(self._values[number]) for number in self._program.outputs]
                ended = [self._final(tensor) for tensor in wrapped]
        updates = [Update(i, number) for i, number in enumerate(ended) if number != i]
        program = self._writer.program(self._program, outputs, updates)
        return Functional(program, self._parameters, tuple(sorted(self._fixed.items())))

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
                tensor = aten.as_strided.default(tensor, spec.size, spec.stride, spec.offset)
                tensor = aten._conj.default(tensor) if spec.conj else tensor
                tensor = aten._neg_view.default(tensor) if spec.neg else tensor
            self._values[instruction.number] = tensor

    def _final(self, tensor: torch.Tensor) -> int:
        torch._sync(tensor)
        return self._writer.number_of(torch._from_functional_tensor(tensor))

    def _run(self, call: Call) -> None:
        args = [self._fill(operand) for operand in call.args]
        kwargs = {name: self._fill(operand) for name, operand in call.kwargs.items()}
        if call.random and call.mutated == call.operands[:1] and call.op._schema.name.endswith("_"):
            self._draw(call, args, kwargs)
            return
        run = _declared(call)
        if any(slot in self._slots for slot in scalar_slots(call)):
            form = tensor_form(call.op)
            assert form is not None
            run = form
        mark = self._writer.mark()
        results = flatten_results(run(*args, **kwargs), call)
        numbered = any(slot in self._slots for slot in scalar_slots(call))
        if not call.mutated and not numbered and not all(map(_fits, call.flat_returns, results)):
            # Fake kernels that do not know the real one's sizes: the record does.
            self._writer.roll_back(mark)
            results = self._opaque(call, args, kwargs)
        for item, number, result in zip(call.flat_returns, call.numbers, results, strict=True):
            if number >= 0:
                self._values[number] = self._laid_out(call, item, result)

    def _draw(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> None:
        """A random call that fills its first argument: it fills memory of its own, laid out in the same way, because
        the order of the draws depends on the layout; the target then becomes a copy."""
        target = args[0]
        size, stride, options = target.size(), target.stride(), {"dtype": target.dtype, "device": target.device}
        rest = [self._plain(value) for value in args[1:]]
        with _outside_functionalization():
            memory = aten.empty_strided.default(size, stride, **options)
            [filled] = self._writer.write_opaque(call, [memory, *rest], kwargs, [spec_of(memory)])
        assert filled is not None
        aten.copy_.default(target, torch._to_functional_tensor(filled))
        for number in call.numbers:
            if number >= 0:
                self._values[number] = target

    def _opaque(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Write the call down as it is, with results as they were recorded."""
        given = [self._plain(value) for value in args]
        named = {name: self._plain(value) for name, value in kwargs.items()}
        with _outside_functionalization():
            made = self._writer.write_opaque(call, given, named, [item.spec for item in call.flat_returns])
        return [None if tensor is None else torch._to_functional_tensor(tensor) for tensor in made]

    def _plain(self, value: Any) -> Any:
        """The fake tensor that a functional one stands for now."""
        if isinstance(value, torch.Tensor):
            torch._sync(value)
            return torch._from_functional_tensor(value)
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
        if item.kind is ReturnKind.VIEW or result.stride() == spec.stride:
            return result
        # Other strides than the real kernel's would make later views legal or illegal that are not.
        if spec.covers_storage():
            order = sorted(range(len(spec.size)), key=lambda d: (-spec.stride[d], d))
            dense = aten.clone.default(aten.permute.default(result, order), memory_format=torch.contiguous_format)
            return aten.permute.default(dense, sorted(range(len(order)), key=order.__getitem__))
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
        if isinstance(operand, DeviceGenerator):
            return None
        if isinstance(operand, PhysicalDevice):
            return self._program.device
        return operand


def _fits(item: Return, result: Any) -> bool:
    spec = item.spec
    if item.kind not in (ReturnKind.FRESH, ReturnKind.VIEW) or spec is None:
        return True
    return tuple(result.size()) == spec.size and result.dtype is spec.dtype


@contextmanager
def _outside_functionalization() -> Iterator[None]:
    torch._disable_functionalization()
    try:
        yield
    finally:
        torch._enable_functionalization(reapply_views=True)


def _declared(call: Call) -> Callable[..., Any]:
    """The operator, or the one that does the same and says what it writes to."""
    name = call.op._schema.name.removeprefix("aten::")
    if call.op is aten.polygamma_.default:
        return _polygamma_
    if call.op is aten.native_batch_norm.default:
        plain = isinstance(call.args[3], Value)
        return _batch_norm if plain else _batch_norm_without_statistics
    undeclared = len(written_positions(call.op)) > sum(map(_is_written, call.op._schema.arguments))
    if call.mutated and (name.startswith(_REFUSED) or undeclared):
        raise CompileError(f"{call.name} has no functional form", source=str(call.source))
    return call.op


def _is_written(argument: torch._C.Argument) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _declares_writes(op: OpOverload) -> bool:
    return any(map(_is_written, op._schema.arguments))


def _polygamma_(self: Any, n: int) -> Any:
    # PyTorch's functionalization does not know it: its functional form has the arguments in another order.
    return aten.copy_.default(self, aten.polygamma.default(n, self))


def _batch_norm(*args: Any) -> Any:
    return aten._native_batch_norm_legit.default(*args)


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


class _WritesError(CompileError):
    """A composite operator writes to memory of its own."""


class _Writer(TorchDispatchMode):
    """Takes operators apart and writes down the calls that are left."""

    def __init__(self, table: Table, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        self._table = table
        self._device = device
        # True while fake tensors are made that no call of the program makes.
        self._silent = False
        # How many composite operators are being taken apart, one inside the other.
        self._composites = 0
        self._instructions: list[Instruction] = []
        # Fake tensors are kept alive: their identity stands for their value number.
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self.source: Source = UNKNOWN
        self._random = False

    def add_input(self, buffer: int, spec: Spec) -> torch.Tensor:
        """A fake tensor that stands for an input."""
        tensor = self._empty(spec)
        self._instructions.append(Input(buffer, spec, self._keep(tensor), UNKNOWN))
        return tensor

    def add_number(self, slot: int, kind: type) -> torch.Tensor:
        """A fake tensor that stands for a run-time number."""
        spec = NUMBER_SPECS[kind]
        tensor = torch.empty((), dtype=spec.dtype)
        self._instructions.append(Number(slot, spec, self._keep(tensor), UNKNOWN))
        return tensor

    def _empty(self, spec: Spec) -> torch.Tensor:
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=self._device)

    def _keep(self, tensor: torch.Tensor) -> int:
        number = len(self._kept)
        self._kept.append(tensor)
        self._numbers[id(tensor)] = number
        return number

    def number_of(self, tensor: torch.Tensor) -> int:
        """The value number of a fake tensor; a real one is a constant of some decomposition, and is written down."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            return number
        if tensor.dim() == 0 and type(tensor) is torch.Tensor:
            return self._constant(tensor)
        raise CompileError("a tensor appears that no call of the program made", source=str(self.source))

    def _constant(self, tensor: torch.Tensor) -> int:
        made = aten.scalar_tensor.default(tensor.item(), dtype=tensor.dtype)
        self._write(aten.scalar_tensor.default, (tensor.item(),), {"dtype": tensor.dtype}, made)
        self._numbers[id(tensor)] = self._numbers[id(made)]
        self._kept.append(tensor)
        return self._numbers[id(tensor)]

    def mark(self) -> tuple[int, int]:
        """Where the writing stands."""
        return len(self._instructions), len(self._kept)

    def roll_back(self, mark: tuple[int, int]) -> None:
        """Forget what was written since `mark`."""
        del self._instructions[mark[0] :]
        for tensor in self._kept[mark[1] :]:
            self._numbers.pop(id(tensor), None)
        del self._kept[mark[1] :]

    def write_opaque(
        self, call: Call, args: list[Any], kwargs: dict[str, Any], specs: Sequence[Spec | None]
    ) -> list[torch.Tensor | None]:
        """Write the call down without running it; fake tensors of these geometries for its results."""
        self._silent = True
        try:
            made = [None if spec is None else self._empty(spec) for spec in specs]
        finally:
            self._silent = False
        single = len(call.returns) == 1 and not isinstance(call.returns[0], tuple)
        out: Any = made[0] if single else made
        self._write(call.op, args, kwargs, out)
        return made

    def program(self, recorded: Program, outputs: list[int], updates: list[Update]) -> Program:
        """What was written down."""
        return Program(
            recorded.identity,
            tuple(self._instructions),
            tuple(outputs),
            recorded.scalars,
            len(self._kept),
            self._random,
            recorded.device,
            tuple(updates),
            functional=True,
        )

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return op(*args, **kwargs)
        random = is_random(op, args, kwargs)
        if not random:
            taken_apart = self._table.get(op)
            with self:
                if taken_apart is not None:
                    out = taken_apart(*args, **kwargs)
                    if out is not NotImplemented:
                        return out
                elif op.namespace == "aten" and op._can_decompose():
                    out = self._decomposed(op, args, kwargs)
                    if out is not NotImplemented:
                        return out
        if self._composites and not random and _declares_writes(op):
            raise _WritesError(f"{op} writes to its operand inside a composite operator")
        out = op(*args, **kwargs)
        self._write(op, args, kwargs, out)
        return out

    def _decomposed(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        """What PyTorch makes of a composite operator, unless it writes on the way: nothing would turn that into values
        here, below functionalization."""
        mark = self.mark()
        self._composites += 1
        try:
            return op.decompose(*args, **kwargs)
        except _WritesError:
            self.roll_back(mark)
            return NotImplemented
        finally:
            self._composites -= 1

    def _write(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        operands: list[int] = []
        given, named = self._operands(op, args, kwargs, operands)
        returns, numbers = self._returns(op, out)
        if op._schema.returns and all(number < 0 for number in numbers):
            return
        random = is_random(op, args, kwargs)
        if random and "generator" in named:
            named["generator"] = DEVICE_GENERATOR
        self._random |= random
        first = next((number for number in numbers if number >= 0), -1)
        call = Call(op, given, named, tuple(operands), returns, first, self.source, random, numbers)
        self._instructions.append(call)

    def _operands(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], operands: list[int]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments in full, in schema order, defaults filled in."""

        def template(value: Any) -> object:
            if isinstance(value, torch.Tensor):
                number = self.number_of(value)
                operands.append(number)
                return Value(number)
            return tuple(template(item) for item in value) if isinstance(value, (list, tuple)) else value

        given: list[object] = []
        named: dict[str, object] = {}
        for position, argument in enumerate(op._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            if argument.kwarg_only:
                named[argument.name] = template(value)
            else:
                given.append(template(value))
        return tuple(given), named

    def _returns(self, op: OpOverload, out: Any) -> tuple[Returns, tuple[int, ...]]:
        declared = op._schema.returns
        parts = out if len(declared) > 1 else (out,) if declared else ()
        numbers: list[int] = []

        def one(value: Any) -> Return:
            if not isinstance(value, torch.Tensor):
                numbers.append(-1)
                kind = ReturnKind.NOTHING if value is None else ReturnKind.CONSTANT
                return Return(kind, constant=value)
            position = len(numbers)
            numbers.append(-1 if id(value) in self._numbers else self._keep(value))
            return Return(ReturnKind.FRESH, spec_of(value), group=position)

        returns = tuple(
            tuple(one(item) for item in part) if isinstance(part, (list, tuple)) else one(part) for part in parts
        )
        assert len(flatten_returns(returns)) == len(numbers)
        return returns, tuple(numbers)


def is_random(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for calls that draw random numbers: attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True
