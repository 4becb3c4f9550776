"""Writes down the pure calls of a program while its operators run on fake tensors.

A dispatch mode: operators that a table has a decomposition for are decomposed, the others become calls of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torch_ltc.errors import CompileError
from torch_ltc.lowering.scalar_inputs import NUMBER_SPECS
from torch_ltc.program.collectives import is_collective
from torch_ltc.program.instruction import (
    DEVICE_GENERATOR,
    Call,
    Input,
    Instruction,
    Number,
    Program,
    Return,
    ReturnKind,
    Returns,
    SymbolicShape,
    Update,
    Value,
    flatten_returns,
)
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.pytorch.private import OpOverload, SchemaArgument, TorchDispatchMode, enable_python_dispatcher
from torch_ltc.source import UNKNOWN, Source

aten = torch.ops.aten
Table = Mapping[OpOverload, Callable[..., Any]]
# Size, stride and dtype.
Shape = tuple[Sequence[Any], Sequence[Any], torch.dtype]


def hint_of(value: Any) -> Any:
    """The value of a number in the program that is being compiled, symbolic or not. PyTorch would add a guard."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def hints_of(values: Iterable[Any]) -> tuple[int, ...]:
    """The same for several integers."""
    return tuple([hint_of(value) for value in values])


def _hinted_spec(tensor: torch.Tensor) -> Spec:
    """The spec of a tensor with hints in place of symbols."""
    size, stride, offset = hints_of(tensor.size()), hints_of(tensor.stride()), hint_of(tensor.storage_offset())
    return make_spec(tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())


def is_written(argument: SchemaArgument) -> bool:
    """True for an argument that the schema says is written to."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _declares_writes(op: OpOverload) -> bool:
    return any(map(is_written, op._schema.arguments))


class _WritesError(CompileError):
    """A composite operator writes to memory of its own."""


class Writer(TorchDispatchMode):
    """Decomposes operators and writes down the calls that are left."""

    def __init__(self, table: Table, device: torch.device, symbolic: Any = None) -> None:
        TorchDispatchMode.__init__(self)
        # The `SymbolicSizes` of a program with symbols, and the values whose shape depends on them.
        self._symbolic = symbolic
        self._shapes: dict[int, SymbolicShape] = {}
        self._table = table
        self._device = device
        # True while fake tensors are made that no call of the program makes.
        self._silent = False
        # How many composite operators are being decomposed, one inside the other.
        self._composites = 0
        self._instructions: list[Instruction] = []
        # Fake tensors are kept alive: their identity stands for their value number.
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self.source: Source = UNKNOWN
        self._random = False

    def add_input(self, buffer: int, spec: Spec, size: Sequence[Any], stride: Sequence[Any]) -> torch.Tensor:
        """A fake tensor that stands for an input, of this size and stride, which may be symbolic."""
        tensor = torch.empty_strided(size, stride, dtype=spec.dtype, device=self._device)
        self._instructions.append(Input(buffer, spec, self._keep(tensor), UNKNOWN))
        return tensor

    def add_number(self, slot: int, kind: type) -> torch.Tensor:
        """A fake tensor that stands for a run-time number."""
        spec = NUMBER_SPECS[kind]
        tensor = torch.empty((), dtype=spec.dtype)
        self._instructions.append(Number(slot, spec, self._keep(tensor), UNKNOWN))
        return tensor

    def _keep(self, tensor: torch.Tensor) -> int:
        number = len(self._kept)
        self._kept.append(tensor)
        self._numbers[id(tensor)] = number
        shape = None if self._symbolic is None else self._symbolic.shape(tensor)
        if shape is not None:
            self._shapes[number] = shape
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
        """The present end of the program, for `roll_back`."""
        return len(self._instructions), len(self._kept)

    def roll_back(self, mark: tuple[int, int]) -> None:
        """Forget what was written since `mark`."""
        del self._instructions[mark[0] :]
        for number, tensor in enumerate(self._kept[mark[1] :], mark[1]):
            self._numbers.pop(id(tensor), None)
            self._shapes.pop(number, None)
        del self._kept[mark[1] :]

    def write_opaque(
        self, call: Call, args: list[Any], kwargs: dict[str, Any], shapes: Sequence[Shape | None]
    ) -> list[torch.Tensor | None]:
        """Write the call down without running it; fake tensors of these shapes for its results."""
        self._silent = True
        try:
            made = [
                None if shape is None else torch.empty_strided(*shape[:2], dtype=shape[2], device=self._device)
                for shape in shapes
            ]
        finally:
            self._silent = False
        single = len(call.returns) == 1 and not isinstance(call.returns[0], tuple)
        out: Any = made[0] if single else made
        self._write(call.op, args, kwargs, out)
        return made

    def program(self, recorded: Program, outputs: list[int], updates: list[Update]) -> Program:
        """The program that was written down."""
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
            symbols=recorded.symbols,
            symbolic_shapes=self._shapes,
        )

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return op(*args, **kwargs)
        random = is_random(op, args, kwargs)
        if not random:
            decomposition = self._table.get(op)
            with self:
                if decomposition is not None:
                    out = decomposition(*args, **kwargs)
                    if out is not NotImplemented:
                        return out
                elif op.namespace == "aten" and op._can_decompose():
                    out = self._decomposed(op, args, kwargs)
                    if out is not NotImplemented:
                        return out
        if self._composites and not random and _declares_writes(op):
            raise _WritesError(f"{op} writes to its operand inside a composite operator")
        # Some kernels in C++ know no symbolic sizes: with them, those in Python come first.
        with nullcontext() if self._symbolic is None else enable_python_dispatcher():
            out = op(*args, **kwargs)
        self._write(op, args, kwargs, out)
        return out

    def _decomposed(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run PyTorch's composition of an operator, unless it writes on the way: nothing would turn that into values
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
        random = is_random(op, args, kwargs)
        given, named = self._operands(op, args, kwargs, operands, random)
        returns, numbers = self._returns(op, out)
        if op._schema.returns and all(number < 0 for number in numbers) and not is_collective(op):
            return
        self._random |= random
        first = next((number for number in numbers if number >= 0), -1)
        call = Call(op, given, named, tuple(operands), returns, first, self.source, random, numbers)
        self._instructions.append(call)

    def _operands(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], operands: list[int], random: bool
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments in full, in schema order, defaults filled in. Random calls draw from the device's generator."""

        def template(value: Any) -> object:
            if isinstance(value, torch.Tensor):
                number = self.number_of(value)
                operands.append(number)
                return Value(number)
            if isinstance(value, (list, tuple)):
                return tuple(template(item) for item in value)
            return value if self._symbolic is None else self._symbolic.operand(value)

        given: list[object] = []
        named: dict[str, object] = {}
        for position, argument in enumerate(op._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            operand = DEVICE_GENERATOR if random and argument.name == "generator" else template(value)
            if argument.kwarg_only:
                named[argument.name] = operand
            else:
                given.append(operand)
        return tuple(given), named

    def _returns(self, op: OpOverload, out: Any) -> tuple[Returns, tuple[int, ...]]:
        declared = op._schema.returns
        parts = out if len(declared) > 1 else (out,) if declared else ()
        numbers: list[int] = []

        def one(value: Any) -> Return:
            if not isinstance(value, torch.Tensor):
                numbers.append(-1)
                kind = ReturnKind.NOTHING if value is None else ReturnKind.CONSTANT
                return Return(kind, constant=hint_of(value))
            position = len(numbers)
            numbers.append(-1 if id(value) in self._numbers else self._keep(value))
            return Return(ReturnKind.FRESH, _hinted_spec(value), group=position)

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
