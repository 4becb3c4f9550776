"""The vocabulary of a recorded program: operands, returns, instructions, programs.

A program is the list of operator calls as they happened, views and in-place calls included. Its tensors are value
numbers: 0, 1, 2 ... in the order in which inputs were first touched and results were made.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from torch_ltc.program.spec import Spec
from torch_ltc.pytorch.private import OpOverload
from torch_ltc.source import Source


@dataclass(frozen=True, slots=True)
class Value:
    """An operand: the tensor with this value number."""

    number: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """An operand: the run-time Python number in this slot. Its type is part of the program, its value is not."""

    slot: int
    type: type


@dataclass(frozen=True, slots=True)
class Size:
    """An operand, or part of a shape: an integer that differs between the programs that share one compilation.

    `expression` is Python text over the names of the program's `symbols`; `hint` is its value in the program that was
    compiled.
    """

    expression: str
    hint: int

    def __add__(self, other: Integer) -> Size:
        return Size(f"({self.expression}) + ({text_of(other)})", self.hint + hint_of(other))

    def __sub__(self, other: Integer) -> Size:
        return Size(f"({self.expression}) - ({text_of(other)})", self.hint - hint_of(other))

    def __mul__(self, other: Integer) -> Size:
        return Size(f"({self.expression})*({text_of(other)})", self.hint * hint_of(other))

    __rmul__ = __mul__

    def __neg__(self) -> Size:
        return Size(f"-({self.expression})", -self.hint)


Integer = int | Size


def text_of(value: Integer) -> str:
    """The expression, or the integer, as text."""
    return value.expression if isinstance(value, Size) else str(value)


def hint_of(value: Integer) -> int:
    """The integer, or what the expression is in the program that was compiled."""
    return value.hint if isinstance(value, Size) else value


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of an integer that differs. `length` says that it is a length or step of an input: never 0 or 1."""

    name: str
    hint: int
    length: bool


@dataclass(frozen=True, slots=True)
class SymbolicShape:
    """Sizes, strides and offset of a tensor, some of them symbolic."""

    size: tuple[Integer, ...]
    stride: tuple[Integer, ...]
    offset: Integer = 0


@dataclass(frozen=True, slots=True)
class DeviceGenerator:
    """An operand: the device's own random generator, handed in when the program runs."""


@dataclass(frozen=True, slots=True)
class PhysicalDevice:
    """An operand: the device the program really runs on."""


CPU = torch.device("cpu")
DEVICE_GENERATOR = DeviceGenerator()
PHYSICAL_DEVICE = PhysicalDevice()


class ReturnKind(enum.Enum):
    """The relation of a return to the instruction's operands."""

    FRESH = "a new tensor in memory of its own"
    VIEW = "a new tensor in the memory of an operand"
    SAME = "an operand itself, written to"
    NOTHING = "no tensor (None)"
    CONSTANT = "a plain Python value known when recording"


@dataclass(frozen=True, slots=True)
class Return:
    """One returned thing. `operand` is the position in the instruction's tensor operands for VIEW and SAME.

    `group` says which FRESH return of the same instruction owns the memory (itself, nearly always): results that share
    one storage share one buffer.
    """

    kind: ReturnKind
    spec: Spec | None = None
    operand: int = -1
    group: int = -1
    constant: object = None


Returns = tuple["Return | tuple[Return, ...]", ...]


def flatten_returns(returns: Returns) -> list[Return]:
    """Every `Return` in order, lists opened."""
    flat: list[Return] = []
    for item in returns:
        if isinstance(item, tuple):
            flat.extend(item)
        else:
            flat.append(item)
    return flat


@dataclass(frozen=True, slots=True)
class Input:
    """The instruction that brings a buffer of the outside into the program, seen with one spec.

    `buffer` numbers the program's input buffers; two inputs may look at one buffer with different specs.
    """

    buffer: int
    spec: Spec
    number: int
    source: Source


@dataclass(frozen=True, slots=True)
class Number:
    """The instruction that brings a run-time number into a functional program, as a tensor without dimensions.

    `slot` is its place among the numbers of the recorded program.
    """

    slot: int
    spec: Spec
    number: int
    source: Source


@dataclass(slots=True)
class ObservedLayout:
    """Learnt in the first run of a call: positions of fresh returns that the real kernel lays out in another way than
    was recorded, so that they are copied into the recorded layout. None until the call has run once."""

    copied: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One recorded operator call. `operands` are the value numbers of its tensors in order, `numbers` those of its
    returns (-1 where a return makes no value)."""

    # Never changed, though not frozen: one is built per new instruction, and a frozen one takes four times as long.

    op: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    operands: tuple[int, ...]
    returns: Returns
    first: int
    source: Source
    random: bool = False
    numbers: tuple[int, ...] = ()
    layout: ObservedLayout = field(default_factory=ObservedLayout)
    # The number of its autograd node, counted from the beginning of the program; None if it has none.
    sequence: int | None = None

    @property
    def flat_returns(self) -> list[Return]:
        """Every return in order, lists opened."""
        return flatten_returns(self.returns)

    @property
    def mutated(self) -> tuple[int, ...]:
        """Value numbers of the operands this call writes to."""
        written = written_positions(self.op)
        if not written:
            return ()
        found: list[int] = []
        for position, argument in enumerate(self.op._schema.arguments):
            if position in written:
                value = self.args[position] if position < len(self.args) else self.kwargs.get(argument.name)
                found.extend(number for number in value_numbers(value))
        return tuple(found)

    @property
    def name(self) -> str:
        """The operator's full name, as the dispatcher writes it."""
        return str(self.op.name())


# Writes that the operator's schema is silent about: running statistics.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}


# By identity, which the table keeps: the hash of an operator is a Python function.
_written: dict[int, tuple[OpOverload, tuple[int, ...]]] = {}


def written_positions(op: OpOverload) -> tuple[int, ...]:
    """Positions of the schema arguments that the operator writes to."""
    found = _written.get(id(op))
    if found is None:
        found = _written[id(op)] = (op, _written_positions(op))
    return found[1]


def _written_positions(op: OpOverload) -> tuple[int, ...]:
    arguments = op._schema.arguments
    declared = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    return (*_UNDECLARED_WRITES.get(op._schema.name, ()), *declared)


def value_numbers(operand: object) -> Iterator[int]:
    """The value numbers inside one operand, lists opened."""
    if isinstance(operand, Value):
        yield operand.number
    elif isinstance(operand, (list, tuple)):
        for item in operand:
            if isinstance(item, Value):
                yield item.number


Instruction = Input | Number | Call


@dataclass(frozen=True, slots=True)
class Update:
    """Of a functional program: the input buffer at position `input` ends up holding the value `number`."""

    input: int
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A program and what the outside wants of it.

    As recorded, calls write to their operands and return views of them, and inputs with one `buffer` share memory.
    `outputs` are the value numbers of the buffers that were alive when the program was cut, each the defining value of
    its buffer. `scalars` counts the run-time numbers. `values` counts value numbers. `device` is the physical device.

    In the functional form no call writes, except that a random call may fill memory made for it: each value is made
    once, each input has a buffer of its own, `updates` says what becomes of the inputs that the recorded program writes
    to, and run-time numbers come in as `Number`.

    A program that stands for many has `symbols`: its specs then hold what was so in the one that was compiled, and
    `symbolic_shapes` has the values whose shape depends on symbols.
    """

    identity: int
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    scalars: int
    values: int
    random: bool
    device: torch.device = CPU
    updates: tuple[Update, ...] = ()
    functional: bool = False
    symbols: tuple[Symbol, ...] = ()
    symbolic_shapes: Mapping[int, SymbolicShape] = field(default_factory=dict)
    # Every run asks for the inputs, and whoever looks at a new program for its calls.
    _inputs: list[Input] = field(default_factory=list, init=False, repr=False)
    _calls: list[Call] = field(default_factory=list, init=False, repr=False)

    @property
    def inputs(self) -> list[Input]:
        """The input instructions, in order."""
        if not self._inputs:
            self._inputs[:] = [i for i in self.instructions if isinstance(i, Input)]
        return self._inputs

    @property
    def numbers(self) -> list[Number]:
        """The instructions that bring run-time numbers in, in order."""
        return [i for i in self.instructions if isinstance(i, Number)]

    @property
    def calls(self) -> list[Call]:
        """The operator calls, in order."""
        if not self._calls:
            self._calls[:] = [i for i in self.instructions if isinstance(i, Call)]
        return self._calls

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of the inputs whose memory the program may reuse: it gives them new values."""
        return tuple(update.input for update in self.updates)

    @property
    def results(self) -> tuple[int, ...]:
        """Value numbers of everything a backend returns: the outputs, then the new values of inputs."""
        return (*self.outputs, *(update.number for update in self.updates))

    def specs(self) -> dict[int, Spec]:
        """The spec of every value."""
        found: dict[int, Spec] = {}
        for instruction in self.instructions:
            if isinstance(instruction, Call):
                for item, number in zip(instruction.flat_returns, instruction.numbers, strict=True):
                    if number >= 0 and item.spec is not None:
                        found[number] = item.spec
            else:
                found[instruction.number] = instruction.spec
        return found

    def first_users(self) -> dict[int, Call]:
        """For each value that a call takes, the first such call."""
        found: dict[int, Call] = {}
        for call in self.calls:
            for number in call.operands:
                found.setdefault(number, call)
        return found

    def maker_of(self, number: int) -> Call | None:
        """The call that makes a value; None when it is an input. Of a recorded program: its values are numbered in
        order."""
        # The last one that is numbered so or lower: a call that makes nothing has the number of what comes next.
        position = bisect_right(self.instructions, number, key=_first_number) - 1
        found = self.instructions[position] if position >= 0 else None
        return found if isinstance(found, Call) else None

    def op_counts(self) -> dict[str, int]:
        """The number of calls of each operator."""
        # By identity: the hash of an operator is a Python function.
        counts = Counter(map(id, [call.op for call in self.calls]))
        ops = {id(call.op): call.op for call in self.calls}
        return {str(ops[identity].name()): count for identity, count in counts.items()}


def _first_number(instruction: Instruction) -> int:
    return instruction.first if isinstance(instruction, Call) else instruction.number
