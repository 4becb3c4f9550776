"""Captured programs: graphs, the slots and addresses that they read, and the memory that their outputs lie in.

What a graph reads and writes lies at fixed addresses. Inputs that stay where they are are used there; one that moves is
copied into a slot before each replay. Outputs lie in memory of the graph: one that someone still holds when the graph
is replayed again is moved out first. Calls that need a number which changes, or that cannot be captured, run between
the graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torch_ltc.execute.buffer_passes import Addresses
from torch_ltc.execute.kernel_warnings import KeptWarning, keep_again, noted_warnings
from torch_ltc.lowering.functional_computation import FunctionalComputation
from torch_ltc.lowering.interface import Arguments, Computation, Outcome
from torch_ltc.lowering.kernel_call import Lookup, fill, run_call, run_filled
from torch_ltc.lowering.lower import same_number
from torch_ltc.lowering.out_of_memory import is_out_of_memory, make_room
from torch_ltc.lowering.registry import registry
from torch_ltc.program.collectives import is_collective
from torch_ltc.program.instruction import Call, Program, ReturnKind, Scalar
from torch_ltc.pytorch.private import conj_view, neg_view
from torch_ltc.record.buffer import Buffer

__all__ = ["CapturedCalls", "CapturedFunction", "CapturedProgram", "Graph", "Graphs", "segments_of", "users_of"]

# Where there would be more graphs than this, calls that take fewer tensors together than that are not worth one.
_MANY_GRAPHS = 16
_LEAST_OPERANDS = 32
# Operators that see more of the memory of a tensor than its elements.
_BEYOND = ("aten::as_strided", "aten::set_")


class Graph(Protocol):
    """Launches that the device has taken down."""

    def replay(self) -> None:
        """Launch them again."""


class Graphs(Protocol):
    """The device's way to take launches down."""

    # How often a failed capture has left the generators with another state: graphs from before draw from one that
    # nobody else does.
    lost_states: int

    def pool(self) -> Any:
        """Memory for graphs that are replayed one after the other: what only one of them needs, the next may use."""

    def capture(self, launch: Callable[[], None], generator: torch.Generator | None, pool: Any) -> Graph:
        """Take down what `launch` launches; nothing is computed. What it draws comes from `generator` at each
        replay."""

    def size_bytes(self, pool: Any) -> int:
        """Bytes that the pool holds."""

    def total_bytes(self) -> int:
        """Bytes that the device has."""


class _CannotCapture(Exception):
    """A call cannot be captured."""

    def __init__(self, call: Call | None, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        self.call = call
        self.out_of_memory = is_out_of_memory(error)


def users_of(program: Program, slots: set[int]) -> set[int]:
    """Indices of the calls that take one of these run-time numbers."""
    return {index for index, call in enumerate(program.calls) if slots & _slots_of(call)}


class _Slot:
    """Fixed memory for an input buffer that moves, and the positions of the inputs that see it. Copied as bytes where
    calls see more of it than the elements of an input."""

    def __init__(self, positions: list[int], tensors: list[Any], specs: list[Any], beyond: bool) -> None:
        self.positions = positions
        storage = tensors[positions[0]].untyped_storage()
        self.size_bytes = int(storage.nbytes())
        device = tensors[positions[0]].device
        self._bytes = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        self.views: dict[int, torch.Tensor] = {}
        for position in positions:
            spec = specs[position]
            view = torch.empty(0, dtype=spec.dtype, device=device)
            view.set_(self._bytes.untyped_storage(), spec.offset, spec.size, spec.stride)
            view = conj_view(view) if spec.conj else view
            self.views[position] = neg_view(view) if spec.neg else view
        # One whose elements share memory is copied as bytes: it cannot be written to.
        single = len(positions) == 1 and not beyond and not specs[positions[0]].overlaps_itself()
        self._single = self.views[positions[0]] if single else None

    def load(self, tensors: Sequence[Any]) -> None:
        """Copy the input into the slot."""
        if self._single is not None:
            self._single.copy_(tensors[self.positions[0]])
        else:
            whole = self._whole(tensors)
            self._bytes[: len(whole)].copy_(whole)

    def store(self, tensors: Sequence[Any]) -> None:
        """Copy the slot, which the program has written to, back."""
        if self._single is not None:
            tensors[self.positions[0]].copy_(self._single)
        else:
            whole = self._whole(tensors)
            whole.copy_(self._bytes[: len(whole)])

    def _whole(self, tensors: Sequence[Any]) -> torch.Tensor:
        storage = tensors[self.positions[0]].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return whole.set_(storage, 0, (min(self.size_bytes, storage.nbytes()),), (1,))


class CapturedProgram:
    """The graphs of a program, its slots, and the memory that its outputs lie in."""

    def __init__(self, program: Program, written: tuple[int, ...], graphs: Graphs, moving: set[int]) -> None:
        self._program = program
        # Input buffers that the program writes to.
        self._written_buffers = written
        self._graphs = graphs
        # Of its own: graphs of other programs run between two replays, when its outputs may be alive.
        self._pool = graphs.pool()
        self._moving = frozenset(moving)
        self._slots: list[_Slot] = []
        self._written: list[_Slot] = []
        self._fixed_positions: list[int] = []
        self._addresses: Addresses | None = None
        self._places: Addresses | None = None
        self._fixed_numbers: list[tuple[int, object]] = []
        # All of them, if they are none whose sign equality hides.
        self._numbers: list[object] | None = None
        self.outputs: list[Any] = []
        self._own: set[int] = set()
        self.graph_count = 0
        self.failure: _CannotCapture | None = None
        self._lost_states = graphs.lost_states
        # What the kernels in the graphs warned of when they were captured: eager's warn at each execution.
        self._warnings: list[KeptWarning] = []

    @property
    def is_stale(self) -> bool:
        """True when its draws no longer come from the generator's state."""
        return self._program.random and self._lost_states != self._graphs.lost_states

    @property
    def size_bytes(self) -> int:
        """Bytes that its graphs and slots hold."""
        return self._graphs.size_bytes(self._pool) + sum(slot.size_bytes for slot in self._slots)

    def describe(self) -> str:
        """A line on the treatment of inputs and calls."""
        slots = sum(len(slot.positions) for slot in self._slots)
        return f"{len(self._fixed_positions)} inputs where they are, {slots} copied"

    def fits(self, tensors: list[Any], numbers: Sequence[object]) -> bool:
        """True when the inputs lie where the graphs look for them, and the numbers are those in the graphs."""
        if self._addresses is None or self.is_stale or not self._addresses.same(tensors):
            return False
        if self._places is None or not self._places.same(self.outputs):
            # Somebody has resized the memory of an output.
            return False
        return numbers == self._numbers or all(same_number(numbers[s], v) for s, v in self._fixed_numbers)

    def move_out(self, previous: Sequence[weakref.ref[Buffer]], inputs: list[Any]) -> None:
        """Copy what someone still holds of the last outputs to memory of its own. Inputs that lie there are from now on
        those of that memory: what is written to them belongs there, and not over the next outputs."""
        for reference in previous:
            buffer = reference()
            data = None if buffer is None else buffer.data
            if buffer is not None and data is not None and id(data) in self._own:
                assert isinstance(data, torch.Tensor)
                buffer.data = copy = _copied(data)
                memory = data.untyped_storage()._cdata
                for position, tensor in enumerate(inputs):
                    if tensor.untyped_storage()._cdata == memory:
                        inputs[position] = _seen_in(data, copy, tensor)

    def first_run(self, arguments: Arguments) -> Outcome | None:
        """Capture, and run the program once on the way. None when nothing has run."""
        tensors: list[Any] = arguments.inputs
        try:
            static = self._prepare(tensors)
        except Exception as error:
            self.failure = _CannotCapture(None, error)
            make_room(error)
            return None
        outcome = None
        try:
            outcome = self._capture(static, arguments)
        finally:
            # What ran before an error has happened; where nothing has run, they hold what they were loaded with.
            for slot in self._written:
                slot.store(tensors)
        if outcome is not None:
            if all(number != 0 for number in arguments.scalars):
                self._numbers = list(arguments.scalars)
            self.outputs = list(outcome.results)
            self._own = {id(result) for result in self.outputs}
            if self.failure is None:
                self._places = Addresses(self.outputs, list(range(len(self.outputs))))
        return outcome

    def _prepare(self, tensors: list[Any]) -> list[Any]:
        """The inputs that the graphs read: where they are, or loaded into slots."""
        program = self._program
        by_buffer: dict[int, list[int]] = {}
        for position, instruction in enumerate(program.inputs):
            by_buffer.setdefault(instruction.buffer, []).append(position)
        static = list(tensors)
        specs = [instruction.spec for instruction in program.inputs]
        beyond = any(call.name.startswith(_BEYOND) for call in program.calls)
        for buffer, positions in by_buffer.items():
            if buffer not in self._moving:
                self._fixed_positions += positions
                continue
            slot = _Slot(positions, tensors, specs, beyond)
            self._slots.append(slot)
            if buffer in self._written_buffers:
                self._written.append(slot)
            for position, view in slot.views.items():
                static[position] = view
        self._fixed_positions.sort()
        self._addresses = Addresses(tensors, self._fixed_positions)
        for slot in self._slots:
            slot.load(tensors)
        return static

    def replay(self, arguments: Arguments) -> Outcome:
        """Run the program once."""
        tensors: list[Any] = arguments.inputs
        for slot in self._slots:
            slot.load(tensors)
        try:
            self._launch(arguments)
        finally:
            for slot in self._written:
                slot.store(tensors)
        if self._warnings:
            keep_again(self._warnings)
        return Outcome(list(self.outputs))

    def _take_down(self, launch: Callable[[], None], arguments: Arguments) -> Graph:
        """A graph of what `launch` launches."""
        with noted_warnings(self._warnings):
            return self._graphs.capture(launch, arguments.generator if self._program.random else None, self._pool)

    def _capture(self, inputs: list[Any], arguments: Arguments) -> Outcome | None:
        raise NotImplementedError

    def _launch(self, arguments: Arguments) -> None:
        raise NotImplementedError


class _NumberTensor:
    """Fixed memory for run-time numbers that are equal, of which an optimizer has one for each parameter."""

    def __init__(self, value: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.slots: list[int] = []
        self._value = value
        self.tensor = torch.full((), value, dtype=dtype, device=device)

    def fits(self, numbers: Sequence[object]) -> bool:
        """True when they are equal in this list, too."""
        first = numbers[self.slots[0]]
        return all(same_number(numbers[slot], first) for slot in self.slots)

    def load(self, numbers: Sequence[Any]) -> None:
        """Give it the value that they have now."""
        value = numbers[self.slots[0]]
        if not same_number(value, self._value):
            self._value = value
            self.tensor.fill_(value)


class CapturedFunction(CapturedProgram):
    """A backend's function for a program, in one graph. Run-time numbers that it takes lie in memory that the graph
    reads."""

    def __init__(
        self,
        program: Program,
        written: tuple[int, ...],
        computation: FunctionalComputation,
        graphs: Graphs,
        moving: set[int],
    ) -> None:
        super().__init__(program, written, graphs, moving)
        self._computation = computation
        self._graph: Graph | None = None
        self._number_tensors: list[_NumberTensor] = []

    def fits(self, tensors: list[Any], numbers: Sequence[object]) -> bool:
        """As for any captured program; and numbers that share memory are equal."""
        return super().fits(tensors, numbers) and all(each.fits(numbers) for each in self._number_tensors)

    def _place_numbers(self, scalars: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Memory for the numbers that the function takes, by value number."""
        made: dict[int, torch.Tensor] = {}
        by_slot: dict[tuple[torch.dtype, int], _NumberTensor] = {}
        by_value: dict[tuple[torch.dtype, Any], _NumberTensor] = {}
        for number, slot, dtype in self._computation.numbers:
            value = scalars[slot]
            found = by_slot.get((dtype, slot))
            # Zeros of both signs are equal, and no NaN is.
            if found is None and value and value == value:
                found = by_value.get((dtype, value))
            if found is None:
                found = _NumberTensor(value, dtype, self._computation.number_device)
                self._number_tensors.append(found)
                by_value[dtype, value] = found
            by_slot[dtype, slot] = found
            found.slots.append(slot)
            made[number] = found.tensor
        return made

    def _capture(self, inputs: list[Any], arguments: Arguments) -> Outcome | None:
        given = Arguments(inputs, arguments.scalars, arguments.generator, arguments.device, arguments.sources)
        given.numbers = self._place_numbers(arguments.scalars)
        made: list[Outcome] = []

        def launch() -> None:
            made.append(self._computation.run(given))

        try:
            self._graph = self._take_down(launch, arguments)
        except Exception as error:
            self.failure = _CannotCapture(None, error)
            make_room(error)
            return None
        taken = {slot for _, slot, _ in self._computation.numbers}
        self._fixed_numbers = [pair for pair in enumerate(arguments.scalars) if pair[0] not in taken]
        self.graph_count = 1
        self._graph.replay()
        return Outcome(made[0].results)

    def _launch(self, arguments: Arguments) -> None:
        assert self._graph is not None
        for each in self._number_tensors:
            each.load(arguments.scalars)
        self._graph.replay()


@dataclass(slots=True)
class _Segment:
    """Calls that are captured together, or one that runs between graphs."""

    calls: list[Call]
    direct: bool
    graph: Graph | None = None
    # Memory for what a call between graphs makes, by value number, and how it is called.
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    run: Callable[[Arguments], dict[int, Any]] | None = None


def segments_of(calls: list[Call], direct: set[int]) -> list[_Segment]:
    """The calls in order: those at the `direct` indices by themselves, and what is between them together, if that is
    worth a graph."""
    runs: list[_Segment] = []
    for index, call in enumerate(calls):
        if index in direct or not runs or runs[-1].direct:
            runs.append(_Segment([], index in direct))
        runs[-1].calls.append(call)
    if sum(not run.direct for run in runs) <= _MANY_GRAPHS:
        return runs
    made: list[_Segment] = []
    for run in runs:
        if run.direct or sum(len(call.operands) for call in run.calls) < _LEAST_OPERANDS:
            made += [_Segment([call], True) for call in run.calls]
        else:
            made.append(run)
    return made


class CapturedCalls(CapturedProgram):
    """The calls of a program as recorded, in graphs, with single calls between them."""

    def __init__(
        self, program: Program, written: tuple[int, ...], graphs: Graphs, moving: set[int], segments: list[_Segment]
    ) -> None:
        super().__init__(program, written, graphs, moving)
        self._segments = segments
        # What calls between graphs take; everything else is in the graphs.
        self._values: dict[int, Any] = {}
        self._last_use = _last_uses(self._program)

    def describe(self) -> str:
        """A line on the treatment of inputs and calls."""
        direct = [segment.calls[0] for segment in self._segments if segment.direct]
        if not direct:
            return super().describe()
        first = f"the first {direct[0].name} at {direct[0].source}"
        talking = sum(is_collective(call.op) for call in direct)
        why = f"; {talking} of them wait for other ranks, which may not capture at the same step" if talking else ""
        return f"{super().describe()}, {len(direct)} calls between graphs, {first}{why}"

    def _capture(self, inputs: list[Any], arguments: Arguments) -> Outcome | None:
        values: dict[int, Any] = {i.number: tensor for i, tensor in zip(self._program.inputs, inputs, strict=True)}
        kept = {
            number for segment in self._segments if segment.direct for call in segment.calls for number in call.operands
        }
        done = 0
        for segment in self._segments:
            if segment.direct:
                try:
                    self._run_direct(segment, values, arguments)
                except Exception as error:
                    self.failure = _CannotCapture(segment.calls[0], error)
                    return self._resume(done, values, arguments, error)
            elif not self._capture_segment(segment, values, kept, arguments):
                return self._resume(done, values, arguments) if done else None
            done += len(segment.calls)
        self._values = {number: values[number] for number in kept}
        used = {slot for s in self._segments if not s.direct for call in s.calls for slot in _slots_of(call)}
        self._fixed_numbers = [(slot, arguments.scalars[slot]) for slot in sorted(used)]
        for segment in self._segments:
            if segment.direct:
                segment.run = _prepared(segment.calls[0], self._values.__getitem__, arguments)
        return Outcome([values[number] for number in self._program.outputs])

    def _resume(
        self, index: int, values: dict[int, Any], arguments: Arguments, error: Exception | None = None
    ) -> Outcome:
        """The calls from this one on, which are not captured: one that fails loses what depends on it alone."""
        reference = registry.reference.compile(self._program)
        assert isinstance(reference, Computation)
        made = [values.get(number) for number in range(self._program.values)]
        return reference.resume(index, made, arguments, error)

    def _run_direct(self, segment: _Segment, values: dict[int, Any], arguments: Arguments) -> None:
        (call,) = segment.calls
        results = run_call(call, values.__getitem__, arguments)
        kinds = dict(zip(call.numbers, call.flat_returns, strict=True))
        segment.made = {n: result for n, result in results.items() if kinds[n].kind is ReturnKind.FRESH}
        values.update(results)

    def _capture_segment(self, segment: _Segment, values: dict[int, Any], kept: set[int], arguments: Arguments) -> bool:
        """Capture calls and run them; False when they could not be captured, and have not run."""
        before = dict(values)
        failed: list[Call] = []

        def launch() -> None:
            for call in segment.calls:
                try:
                    values.update(run_call(call, values.__getitem__, arguments))
                except Exception:
                    failed.append(call)
                    raise
                for number in self._last_use.get(id(call), ()):
                    if number not in kept:
                        values.pop(number, None)

        try:
            segment.graph = self._take_down(launch, arguments)
        except Exception as error:
            self.failure = _CannotCapture(failed[0] if failed else None, error)
            values.clear()
            values.update(before)
            make_room(error)
            return False
        self.graph_count += 1
        segment.graph.replay()
        return True

    def _launch(self, arguments: Arguments) -> None:
        for segment in self._segments:
            if segment.graph is not None:
                segment.graph.replay()
            elif segment.run is not None:
                results = segment.run(arguments)
                for number, memory in segment.made.items():
                    memory.copy_(results[number])


def _copied(data: torch.Tensor) -> torch.Tensor:
    """The same values at the same strides, in memory of their own."""
    if any(size > 1 and stride == 0 for size, stride in zip(data.size(), data.stride(), strict=True)):
        # Elements that share memory cannot be written to one by one.
        storage = data.untyped_storage().clone()
        whole = torch.empty(0, dtype=data.dtype, device=data.device)
        return whole.set_(storage, data.storage_offset(), data.size(), data.stride())
    return torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device=data.device).copy_(data)


def _seen_in(data: torch.Tensor, copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of `data`, in that of its copy."""
    seen = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    shift = copy.storage_offset() * copy.itemsize - data.storage_offset() * data.itemsize
    offset = tensor.storage_offset() + shift // tensor.itemsize
    seen.set_(copy.untyped_storage(), offset, tensor.size(), tensor.stride())
    seen = conj_view(seen) if tensor.is_conj() else seen
    return neg_view(seen) if tensor.is_neg() else seen


def _prepared(call: Call, value_of: Lookup, arguments: Arguments) -> Callable[[Arguments], dict[int, Any]]:
    """A function that runs the call on values that stay where they are, with the run-time numbers that it is given."""
    plain = [fill(operand, value_of, arguments) for operand in call.args]
    named = {name: fill(operand, value_of, arguments) for name, operand in call.kwargs.items()}
    varying = [(i, operand) for i, operand in enumerate(call.args) if _has_number(operand)]
    varying_named = [(name, operand) for name, operand in call.kwargs.items() if _has_number(operand)]

    def run(now: Arguments) -> dict[int, Any]:
        for index, operand in varying:
            plain[index] = fill(operand, value_of, now)
        for name, operand in varying_named:
            named[name] = fill(operand, value_of, now)
        return run_filled(call, plain, named)

    return run


def _has_number(operand: object) -> bool:
    """True for a run-time number, and for a list with one."""
    return isinstance(operand, Scalar) or (isinstance(operand, tuple) and any(_has_number(item) for item in operand))


def _slots_of(call: Call) -> set[int]:
    """The run-time numbers that a call takes."""
    found: set[int] = set()

    def look(operand: object) -> None:
        if isinstance(operand, tuple):
            for item in operand:
                look(item)
        elif isinstance(operand, Scalar):
            found.add(operand.slot)

    for operand in (*call.args, *call.kwargs.values()):
        look(operand)
    return found


def _last_uses(program: Program) -> dict[int, list[int]]:
    """For each call, by identity, the values that nobody needs after it."""
    last: dict[int, Call] = {}
    for call in program.calls:
        for number in (*call.operands, *(number for number in call.numbers if number >= 0)):
            last[number] = call
    for number in (*program.outputs, *(instruction.number for instruction in program.inputs)):
        last.pop(number, None)
    dead: dict[int, list[int]] = {}
    for number, call in last.items():
        dead.setdefault(id(call), []).append(number)
    return dead
