"""Runs a functional program: the backend's functions for its parts, PyTorch's kernels for the calls in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_ltc.errors import CompileError, LtcError
from torch_ltc.lowering.backend_data import BackendData, alias_physical
from torch_ltc.lowering.functionalize import Functional, Parameter, plan_parameters
from torch_ltc.lowering.interface import Arguments, Backend, Computation, Held, Outcome, ProgramFunction
from torch_ltc.lowering.kernel_call import plain_call, run_call
from torch_ltc.lowering.number_ranges import all_hold, number_ranges
from torch_ltc.lowering.partition import Part
from torch_ltc.lowering.result_checks import check_count, check_result, fitted
from torch_ltc.program.effects import may_fail
from torch_ltc.program.instruction import Call, Program, Update, Value
from torch_ltc.program.spec import Spec
from torch_ltc.program.text import call_text


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """A part and what the backend made of it; no function for a call that PyTorch runs."""

    part: Part
    function: ProgramFunction | None
    text: str
    # Value numbers of what the function takes and returns.
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()

    def bound(self, symbols: Mapping[str, int]) -> CompiledPart:
        """The part with these values of the symbols."""
        if not symbols:
            return self
        if self.part.direct is not None:
            return replace(self, part=replace(self.part, direct=plain_call(self.part.direct, symbols)))
        bind: Any = getattr(self.function, "bind", None)
        return self if bind is None else replace(self, function=bind(symbols))


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a computation of one function alone finds what: positions among the program's inputs, those among the
    function's, and, among its results, those of outputs and of updated inputs."""

    inputs: list[int]
    takes: list[int]
    outputs: list[int]
    updates: list[tuple[int, int]]
    count: int

    @classmethod
    def of(cls, functional: Functional, parts: list[CompiledPart]) -> _Places | None:
        """None for a computation that is more than that."""
        pure = functional.program
        if len(parts) != 1 or parts[0].function is None or pure.numbers or any(p.flat for p in functional.parameters):
            return None
        given = {instruction.number: place for place, instruction in enumerate(pure.inputs)}
        made = {number: place for place, number in enumerate(parts[0].gives)}
        updates = [(update.input, update.number) for update in pure.updates]
        if not made.keys() >= {*pure.outputs, *[number for _, number in updates]}:
            return None
        return cls(
            [parameter.position for parameter in functional.parameters],
            [given[number] for number in parts[0].takes],
            [made[number] for number in pure.outputs],
            [(place, made[number]) for place, number in updates],
            len(made),
        )

    def fit(self, given: list[Any], results: Any) -> bool:
        """True when these results are to be passed on as they are."""
        if type(results) is not list or len(results) != self.count:
            return False
        return all(results[place] is given[position] for position, place in self.updates)


@dataclass(frozen=True, slots=True)
class DirectCall:
    """A computation that is one call of a function: the positions of what it takes among the program's inputs, and
    among its results those of the outputs, and of updated inputs with what they were given as."""

    function: ProgramFunction
    takes: list[int]
    outputs: list[int]
    updates: list[tuple[int, int]]
    count: int


class FunctionalComputation(Computation):
    """A program in functional form. Nothing is written before every part has run, except by a function that returns the
    very tensor it was given: that one has been written in place."""

    def __init__(self, backend: Backend, recorded: Program, functional: Functional, parts: list[CompiledPart]) -> None:
        self.program = recorded
        self.functional = functional
        self.takes_handles = True
        self.checks_results = True
        self.restored = inputs_at_risk(backend, functional, parts)
        self.keeps_inputs = backend.keeps_inputs and not self.restored
        # True after a run whose results were right as the functions returned them, if they will be at every run.
        self.settled = False
        self._repeats = backend.repeats_layouts and all(compiled.part.direct is None for compiled in parts)
        self._updates = [(update.input, update.number) for update in functional.program.updates]
        self._backend = backend.name
        # The classes of the handles that its functions have returned: data behind any other handle comes as a tensor.
        self._handles = handles_of(backend)
        self._parts = parts
        self._pure = functional.program
        self._inputs = [i.number for i in functional.program.inputs]
        self._expected = _expected(recorded)
        # Value numbers, slots and dtypes of the run-time numbers that its functions take, and where these lie.
        self.numbers = [(i.number, i.slot, i.spec.dtype) for i in self._pure.numbers]
        self.number_device = recorded.device if backend.numbers_on_device else torch.device("cpu")
        self._places = _Places.of(functional, parts)
        fixed, ranges = dict(functional.fixed), number_ranges(recorded)
        self._sound = all(item.holds(fixed[item.slot]) for item in ranges if item.slot in fixed)
        self._ranges = [item for item in ranges if item.slot not in fixed]

    def accepts(self, numbers: Sequence[object]) -> bool:
        """True when every number is one that the dtypes of its calls can hold."""
        return self._sound and all_hold(self._ranges, numbers)

    def bind(self, program: Program, symbols: tuple[int, ...]) -> FunctionalComputation:
        """The same parts for another program, told its sizes."""
        parameters = plan_parameters(program)
        if [(p.position, p.flat) for p in parameters] != [(p.position, p.flat) for p in self.functional.parameters]:
            raise CompileError(f"inputs of program {program.identity} share their memory in another way")
        bound = copy(self)
        bound.program = program
        bound.settled = False
        bound.functional = replace(self.functional, parameters=parameters)
        bound._expected = _expected(program)
        named = {symbol.name: value for symbol, value in zip(self._pure.symbols, symbols, strict=True)}
        bound._parts = [part.bound(named) for part in self._parts]
        return bound

    @property
    def functions(self) -> list[ProgramFunction]:
        """The backend's functions, in the order in which they run."""
        return [part.function for part in self._parts if part.function is not None]

    def to_string(self) -> str:
        """The backend's text for each part, and the calls in between."""
        return "\n".join(part.text for part in self._parts)

    @property
    def direct(self) -> DirectCall | None:
        """The one call that it is, when its results have been right as they were returned; else None."""
        places, function = self._places, self._parts[0].function
        if not self.settled or places is None or function is None:
            return None
        if not set(places.takes) >= {position for position, _ in places.updates}:
            return None
        updates = [(places.takes.index(position), place) for position, place in places.updates]
        takes = [places.inputs[place] for place in places.takes]
        return DirectCall(function, takes, places.outputs, updates, places.count)

    def finish(self, arguments: Arguments, results: Any) -> Outcome:
        """The outcome of a `direct` call with these results, which are not as they were."""
        assert self._places is not None
        given = [arguments.held[position] for position in self._places.inputs]
        values: dict[int, Any] = dict(zip(self._inputs, given, strict=True))
        self._take_results(self._parts[0], results, values)
        return self._finish(given, values, arguments)

    def run(self, arguments: Arguments) -> Outcome:
        """Run the parts, then give outputs and updated inputs their data."""
        if self.settled and self._places is not None and arguments.plain:
            held: Sequence[Any] = arguments.held
            given = [held[position] for position in self._places.inputs]
            function = self._parts[0].function
            assert function is not None
            results = function(*[given[place] for place in self._places.takes])
            if self._places.fit(given, results):
                return Outcome([results[place] for place in self._places.outputs])
            return self.finish(arguments, results)
        given = [self._given(parameter, arguments) for parameter in self.functional.parameters]
        values: dict[int, Any] = dict(zip(self._inputs, given, strict=True))
        if arguments.numbers is not None:
            values.update(arguments.numbers)
        elif self.numbers:
            values.update(_number_tensors(self.numbers, arguments.scalars, self.number_device))
        for compiled in self._parts:
            self._run_part(compiled, values, arguments)
        if self.settled and all(values[number] is given[position] for position, number in self._updates):
            return Outcome([values[number] for number in self._pure.outputs])
        return self._finish(given, values, arguments)

    def _finish(self, given: list[Any], values: dict[int, Any], arguments: Arguments) -> Outcome:
        """Check the results, and give outputs and updated inputs their data."""
        self._check(given, values)
        outcome = self._install(given, values, arguments)
        self.settled = self._repeats and self._passes_on(given, values, outcome)
        return outcome

    def _passes_on(self, given: list[Any], values: dict[int, Any], outcome: Outcome) -> bool:
        """True when the results were what the functions returned, as it was, and nothing was copied."""
        results = zip(outcome.results, self._pure.outputs, strict=True)
        return all(result is values[number] for result, number in results) and all(
            values[number] is given[position] for position, number in self._updates
        )

    def _given(self, parameter: Parameter, arguments: Arguments) -> torch.Tensor | BackendData:
        held = arguments.held[parameter.position]
        assert not isinstance(held, LtcError)
        if not parameter.flat:
            return held if type(held) in self._handles else _tensor(held)
        return alias_physical(_tensor(held), parameter.spec)

    def _run_part(self, compiled: CompiledPart, values: dict[int, Any], arguments: Arguments) -> None:
        part = compiled.part
        if part.direct is not None:
            values.update(run_call(part.direct, lambda number: _tensor(values[number]), arguments))
        elif compiled.function is not None:
            given = [values[number] for number in compiled.takes]
            self._take_results(compiled, compiled.function(*given), values)
        for number in part.dead:
            del values[number]

    def _take_results(self, compiled: CompiledPart, returned: Any, values: dict[int, Any]) -> None:
        """Add what a function returned to the values."""
        results = check_count(self._backend, compiled.part.program, returned, len(compiled.gives))
        for result in results:
            if isinstance(result, BackendData):
                self._handles.add(type(result))
        values.update(zip(compiled.gives, results, strict=True))

    def _check(self, given: list[Any], values: dict[int, Any]) -> None:
        """Raise unless every result is what was recorded; nothing has been written yet."""
        for update in self._pure.updates:
            if values[update.number] is not given[update.input]:
                spec = self.functional.parameters[update.input].spec
                check_result(self._backend, self._pure, update.number, values[update.number], spec)
        for (recorded, spec), number in zip(self._expected, self._pure.outputs, strict=True):
            check_result(self._backend, self.program, recorded, values[number], spec)

    def _install(self, given: list[Any], values: dict[int, Any], arguments: Arguments) -> Outcome:
        """Give outputs their data and inputs their new values: other memory where that is allowed, else a copy into
        their own, after everything that is read from their old memory has been read."""
        # Memory that is spoken for: an output must not share it.
        taken = Memory(given)
        outcome = Outcome([], [], {})
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for update in self._pure.updates:
            old, new = given[update.input], values[update.number]
            if new is old:
                continue
            parameter = self.functional.parameters[update.input]
            if arguments.replaceable and not parameter.flat and _is_whole(old, parameter.spec):
                outcome.replaced[parameter.position] = taken.own(fitted(new, parameter.spec), parameter.spec)
            else:
                copies.append((_tensor(old), _tensor(taken.apart(new))))
        for (_, spec), number in zip(self._expected, self._pure.outputs, strict=True):
            outcome.results.append(taken.own(fitted(values[number], spec), spec))
        for target, value in copies:
            target.copy_(value)
        return outcome


def _number_tensors(
    numbers: Sequence[tuple[int, int, torch.dtype]], scalars: Sequence[Any], device: torch.device
) -> dict[int, torch.Tensor]:
    """A tensor for each number, by value number. Equal ones share theirs, which nobody writes to: an optimizer has the
    same few for each of its parameters."""
    made: dict[int, torch.Tensor] = {}
    known: dict[tuple[torch.dtype, Any], torch.Tensor] = {}
    for number, slot, dtype in numbers:
        value = scalars[slot]
        tensor = known.get((dtype, value))
        if tensor is None:
            # A copy to another device would wait for all that is launched there; filling does not.
            on_host = device.type == "cpu"
            tensor = torch.tensor(value, dtype=dtype) if on_host else torch.full((), value, dtype=dtype, device=device)
            # Zeros of both signs are equal.
            if value and not isinstance(value, complex):
                known[dtype, value] = tensor
        made[number] = tensor
    return made


def handles_of(backend: Backend) -> set[type]:
    """The classes of the handles that the backend's functions have returned."""
    found: set[type] = backend.__dict__.setdefault("_handles", set())
    return found


def _expected(program: Program) -> list[tuple[int, Spec]]:
    specs = program.specs()
    return [(number, specs[number]) for number in program.outputs]


def _tensor(held: torch.Tensor | BackendData) -> torch.Tensor:
    return held.tensor() if isinstance(held, BackendData) else held


def _is_whole(held: torch.Tensor | BackendData, spec: Spec) -> bool:
    """True when these are all elements of their memory."""
    if not spec.covers_storage():
        return False
    return isinstance(held, BackendData) or held.untyped_storage().nbytes() == spec.numel * spec.dtype.itemsize


class Memory:
    """Memory that has an owner already."""

    def __init__(self, held: list[Any]) -> None:
        self._known = {self._identity(item) for item in held}
        # What is known stays alive: an identity must not be given anew.
        self._kept = list(held)

    @staticmethod
    def _identity(held: torch.Tensor | BackendData) -> int:
        return id(held) if isinstance(held, BackendData) else int(held.untyped_storage()._cdata)

    def apart(self, held: torch.Tensor | BackendData) -> torch.Tensor | BackendData:
        """The data itself, or a copy if its memory has an owner, who may be given another value."""
        return _tensor(held).clone() if self._identity(held) in self._known else held

    def own(self, held: torch.Tensor | BackendData, spec: Spec) -> torch.Tensor | BackendData:
        """The data itself if its memory is nobody's, else a copy."""
        if isinstance(held, BackendData):
            identity, oversized = id(held), False
        else:
            storage = held.untyped_storage()
            identity, oversized = int(storage._cdata), _is_small_part(storage, spec)
        if identity in self._known or oversized:
            # `clone` keeps strides only of dense tensors; a result laid out with holes is rare and copied as it lies.
            tensor = _tensor(held)
            held = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=tensor.device).copy_(tensor)
            identity = self._identity(held)
        self._known.add(identity)
        self._kept.append(held)
        return held


def _is_small_part(storage: torch.UntypedStorage, spec: Spec) -> bool:
    """True for a view into memory that is much larger than itself, which it would keep alive."""
    return int(storage.nbytes()) > 2 * spec.extent() * spec.dtype.itemsize + 1024


def inputs_at_risk(backend: Backend, functional: Functional, parts: list[CompiledPart]) -> tuple[int, ...]:
    """Positions of the inputs that a run may have overwritten when a call fails: those that a part updates before a
    later part fails, or before its own code ends at a call that their new value does not depend on. What no part
    updates by itself is written after everything has run."""
    parameter_of = {i.number: functional.parameters[n] for n, i in enumerate(functional.program.inputs)}
    at_risk: set[int] = set()
    fails_later = False
    for compiled in reversed(parts):
        program, direct = compiled.part.program, compiled.part.direct
        if direct is not None:
            fails_later |= may_fail(direct)
            continue
        for update in _updates_at_risk(program, backend, fails_later):
            at_risk.add(parameter_of[program.inputs[update.input].number].position)
        fails_later |= any(backend.may_fail(call) for call in program.calls)
    return tuple(sorted(at_risk))


def _updates_at_risk(program: Program, backend: Backend, fails_later: bool) -> Sequence[Update]:
    if fails_later:
        return program.updates
    specs = program.specs()
    failing = frozenset(index for index, call in enumerate(program.calls) if backend.fails_midway(call, specs))
    if not failing:
        return ()
    reached: dict[int, frozenset[int]] = {}
    nothing: frozenset[int] = frozenset()
    for index, call in enumerate(program.calls):
        own = failing & {index}
        for number, operands in _dependences(call):
            reached[number] = own.union(*(reached.get(operand, nothing) for operand in operands))
    return [update for update in program.updates if reached.get(update.number, nothing) != failing]


def _dependences(call: Call) -> list[tuple[int, Sequence[int]]]:
    """Each result of the call with the operands that it depends on: in a call on lists, those at its own place."""
    made = [(position, number) for position, number in enumerate(call.numbers) if number >= 0]
    if not call.op._schema.name.startswith("aten::_foreach_"):
        return [(number, call.operands) for _, number in made]
    given = (*call.args, *call.kwargs.values())
    lists = [operand for operand in given if isinstance(operand, tuple) and len(operand) == len(call.numbers)]
    single = [operand.number for operand in given if isinstance(operand, Value)]
    return [
        (number, single + [o[position].number for o in lists if isinstance(o[position], Value)])
        for position, number in made
    ]


def direct_text(call: Call) -> str:
    """The line that stands for a call that PyTorch runs."""
    return f"# PyTorch's kernel: {call_text(call)}  # {call.source}"


__all__ = ["CompiledPart", "FunctionalComputation", "Held", "direct_text", "handles_of", "inputs_at_risk"]
