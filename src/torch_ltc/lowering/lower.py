"""Lowers a program for a backend: the form it asks for, the parts it can take, and the functions it makes of them."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import replace

from torch_ltc.errors import CompileError, UnsupportedCallError
from torch_ltc.lowering.backend_data import BackendDevice
from torch_ltc.lowering.decomposition_tables import core_aten
from torch_ltc.lowering.functional_computation import CompiledPart, FunctionalComputation, direct_text
from torch_ltc.lowering.functionalize import Functional, functionalize
from torch_ltc.lowering.interface import Backend, Computation, Form, FunctionComputation, ProgramFunction
from torch_ltc.lowering.partition import Part, partition
from torch_ltc.lowering.passes import Observer, run_passes
from torch_ltc.program.collectives import is_ordered
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.specialization import Specialization, evaluator
from torch_ltc.program.symbolic_key import specialize
from torch_ltc.program.text import program_text

# How many operators a message names.
_MOST_NAMED = 5


class Executable:
    """A computation, the numbers it was specialised on by slot, what the user should know, and whether it has run once
    without a failure.

    With a `specialization` it serves every program of one symbolic key whose integers `takes` accepts, after `bind`.
    """

    __slots__ = ("computation", "fixed", "note", "proven", "specialization", "guards", "origin", "dropped")

    def __init__(
        self,
        computation: Computation,
        fixed: tuple[tuple[int, object], ...] = (),
        note: str = "",
        specialization: Specialization | None = None,
        guards: tuple[str, ...] = (),
    ) -> None:
        self.computation = computation
        self.fixed = fixed
        self.note = note
        self.proven = False
        self.specialization = specialization
        # What must hold of the symbols, as Python text.
        self.guards = guards
        # What this one was bound from: itself, or the one that several programs share.
        self.origin: Executable = self
        # True once it is no longer kept.
        self.dropped = False

    @property
    def remark(self) -> str:
        """What the backend says of its code."""
        remarks = [getattr(function, "remark", "") for function in self.computation.functions]
        return "; ".join(dict.fromkeys(filter(None, remarks)))

    def fits(self, numbers: Sequence[object]) -> bool:
        """True when these run-time numbers are those it was made for."""
        return all(same_number(numbers[slot], value) for slot, value in self.fixed)

    def mismatches(self, numbers: Sequence[object]) -> set[int]:
        """The slots of the numbers that are not."""
        return {slot for slot, value in self.fixed if not same_number(numbers[slot], value)}

    def takes(self, values: tuple[int, ...]) -> bool:
        """True when it is right for a program of its symbolic key with these integers."""
        chosen = self.specialization
        return chosen is not None and not chosen.mismatches(values) and self.broken_guard(values) is None

    def broken_guard(self, values: tuple[int, ...]) -> str | None:
        """A guard that does not hold for these integers, with them."""
        chosen = self.specialization
        if chosen is None or not self.guards:
            return None
        symbols = chosen.values_of(values)
        held = evaluator(chosen.names, self.guards)(*symbols)
        if all(held):
            return None
        guard = self.guards[[bool(item) for item in held].index(False)]
        named = zip(chosen.names, symbols, strict=True)
        shown = ", ".join(f"{name} = {value}" for name, value in named if re.search(rf"\b{name}\b", guard))
        return f"{guard} does not hold for {shown}"

    def bind(self, program: Program, values: tuple[int, ...]) -> Executable:
        """The executable of this program of the same symbolic key, which has these integers."""
        if self.specialization is None or program is self.computation.program:
            return self
        computation = self.computation.bind(program, self.specialization.values_of(values))
        bound = Executable(computation, self.fixed, specialization=self.specialization, guards=self.guards)
        bound.origin = self
        return bound


def same_number(first: object, second: object) -> bool:
    """True for numbers of one type with one value; NaN is itself, and 0.0 is not -0.0."""
    if type(first) is not type(second):
        return False
    if first != first:
        return second != second
    return first == second and (first != 0 or repr(first) == repr(second))


def functional_form(
    backend: Backend, program: Program, numbers: Sequence[object], varying: Set[int], observe: Observer | None = None
) -> Functional:
    """The functional program after all passes, as the backend asks for it."""
    table = backend.decompositions()
    functional = functionalize(program, numbers, varying, core_aten() if table is None else table)
    if observe is not None:
        observe("functionalize", functional.program)
    return replace(functional, program=run_passes(functional.program, observe=observe))


def lower(
    backend: Backend,
    program: Program,
    numbers: Sequence[object],
    varying: Set[int],
    strict: bool,
    specialization: Specialization | None = None,
) -> Executable:
    """Compile `program`. With `strict`, calls that the backend has no rule for are an error. With a
    `specialization`, for all programs of its symbolic key that fit it and the guards found on the way."""
    if specialization is not None:
        program = specialize(program, specialization)
    if backend.form is Form.RECORDED:
        return Executable(_compiled(backend, program), specialization=specialization)
    functional = functional_form(backend, program, numbers, varying)
    parts = partition(functional.program, backend.supports)
    apart = [part.direct for part in parts if part.direct is not None]
    missing = [call for call in apart if call.numbers and not is_ordered(call) and not backend.supports(call)]
    if missing and strict:
        raise UnsupportedCallError(_missing_text(backend, missing), source=str(missing[0].source))
    compiled = [_compiled_part(backend, part) for part in parts]
    computation = FunctionalComputation(backend, program, functional, compiled)
    note = f"{_missing_text(backend, missing)}\n  PyTorch's kernels run them instead" if missing else ""
    guards = [*functional.guards]
    for part in compiled:
        guards += getattr(part.function, "guards", ())
    return Executable(computation, functional.fixed, note, specialization, tuple(dict.fromkeys(guards)))


def _missing_text(backend: Backend, missing: list[Call]) -> str:
    first_lines: dict[str, str] = {}
    for call in missing:
        first_lines.setdefault(call.name, str(call.source))
    named = [f"{name} ({line})" for name, line in list(first_lines.items())[:_MOST_NAMED]]
    more = f" and {len(first_lines) - _MOST_NAMED} more" if len(first_lines) > _MOST_NAMED else ""
    return f"{backend.name} has no rule for {', '.join(named)}{more}"


def _compiled_part(backend: Backend, part: Part) -> CompiledPart:
    if part.direct is not None:
        return CompiledPart(part, None, direct_text(part.direct))
    function = _built(backend, part.program)
    if isinstance(function, Computation):
        raise CompileError(f"{backend.name} returned a Computation for a functional program; it must return a function")
    text = getattr(function, "text", None)
    program = part.program
    takes = (*(i.number for i in program.inputs), *(i.number for i in program.numbers))
    shown = text() if callable(text) else program_text(program)
    return CompiledPart(part, function, shown, takes, program.results)


def _compiled(backend: Backend, program: Program) -> Computation:
    built = _built(backend, program)
    if isinstance(built, Computation):
        return built
    text = getattr(built, "text", None)
    return FunctionComputation(program, built, text() if callable(text) else "")


def _built(backend: Backend, program: Program) -> ProgramFunction | Computation:
    device = BackendDevice.of(program.device)
    context = backend.create_lowering_context(f"program{program.identity}", device, program)
    [built] = backend.compile_instances([context])
    if isinstance(built, CompileError):
        raise built
    if not isinstance(built, Computation) and not callable(built):
        raise CompileError(
            f"{backend.name} compiled program {program.identity} to {type(built).__name__}",
            hint="return a function from compile()",
        )
    return built
