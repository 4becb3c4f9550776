"""Finding the first call that a backend gets wrong: by compiling the program up to a call, again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch_ltc.backends.interpreter import Interpretation
from torch_ltc.debug.compare_runs import Difference, Ended, compared
from torch_ltc.debug.replay import Kept, Operand, Replay, operands, shake, source_of
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.lower import lower
from torch_ltc.lowering.result_checks import check_count
from torch_ltc.program.instruction import Call, Program, ReturnKind
from torch_ltc.source import Source

__all__ = ["BadCall", "bad_call", "shaken_run"]


@dataclass(frozen=True, slots=True)
class BadCall:
    """What the search came to, in words, and the line of the call that it found."""

    text: str
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class _Search:
    """One program, one backend, one set of inputs."""

    program: Program
    backend: Backend
    kept: Kept

    def first_bad(self, outputs: Callable[[Program, int], tuple[int, ...]]) -> tuple[int, Difference] | None:
        """How many calls are needed until something is wrong, and what is; None if nothing is wrong with these
        outputs."""
        high = len(self.program.calls)
        worst = self._wrong(high, outputs)
        if worst is None:
            return None
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            found = self._wrong(middle, outputs)
            if found is None:
                low = middle
            else:
                high, worst = middle, found
        return high, worst

    def _wrong(self, calls: int, outputs: Callable[[Program, int], tuple[int, ...]]) -> Difference | None:
        """What the backend gets most wrong in the program of the first calls."""
        program = beginning(self.program, calls, outputs(self.program, calls))
        count = len(program.inputs)
        expected = self.kept.arguments(count)
        wanted = Interpretation(program).run(expected)
        arguments = self.kept.arguments(count)
        executable = lower(self.backend, program, list(arguments.scalars), set(), strict=False)
        got = executable.computation.run(arguments)
        got.results = check_count(self.backend.name, program, got.results, len(program.outputs))
        ends = (wanted, expected.inputs), (got, arguments.inputs)
        found = compared(program, self.backend, *ends)
        if found:
            found = compared(program, self.backend, *ends, shaken=shaken_run(program, self.kept))
        return max(found, key=lambda each: each.excess, default=None)

    def given(self, place: int) -> tuple[Operand, ...]:
        """What the call at this place was given."""
        seen: list[tuple[Operand, ...]] = []
        arguments = self.kept.arguments()

        def observe(at: int, call: Call, values: list[Any], run: Callable[[], None]) -> None:
            if at == place:
                seen.append(operands(call, values, arguments, {}, -1))
            run()

        Replay(self.program, observe).run(arguments)
        return seen[0] if seen else ()


def shaken_run(program: Program, kept: Kept) -> Ended:
    """A run of the interpreter on inputs that are changed a little."""
    arguments = kept.arguments(len(program.inputs))
    shake(arguments)
    return Interpretation(program).run(arguments), arguments.inputs


def beginning(program: Program, calls: int, outputs: tuple[int, ...]) -> Program:
    """The program of the first calls, with these outputs."""
    last = program.calls[calls - 1]
    end = next(place for place, instruction in enumerate(program.instructions) if instruction is last) + 1
    return replace(program, instructions=program.instructions[:end], outputs=outputs)


def _everything(program: Program, calls: int) -> tuple[int, ...]:
    """The value that defines each memory that the first calls make."""
    return tuple(
        number
        for call in program.calls[:calls]
        for place, (item, number) in enumerate(zip(call.flat_returns, call.numbers, strict=True))
        if item.kind is ReturnKind.FRESH and item.group in (place, -1)
    )


def _needed(program: Program, calls: int) -> tuple[int, ...]:
    """Of those, what later calls use or the program returns."""
    used = {number for call in program.calls[calls:] for number in call.operands} | set(program.outputs)
    return tuple(number for number in _everything(program, calls) if number in used)


def bad_call(program: Program, backend: Backend, kept: Kept) -> BadCall:
    """The first call that the backend gets wrong on these inputs, as far as that can be said."""
    search = _Search(program, backend, kept)
    try:
        return _search(search)
    except Exception as error:
        return BadCall(f"the search for the first bad call failed: {type(error).__name__}: {_first_line(error)}")


def _search(search: _Search) -> BadCall:
    calls = search.program.calls
    found = search.first_bad(_everything)
    if found is not None:
        place, worst = found
        call = calls[place - 1]
        lines = [f"first bad call: {call.name}, number {place} of {len(calls)}"]
        lines += [f"  input: {shown}" for shown in search.given(place - 1)]
        return BadCall("\n".join([*lines, f"  {worst}"]), source_of(call, search.kept.arguments(0)))
    found = search.first_bad(_needed)
    if found is None:
        return BadCall("no bad call: compiled once more, for its own sizes alone, the program is right")
    place, worst = found
    call = calls[place - 1]
    return BadCall(
        f"no single bad call: with every value returned all {len(calls)} calls are right, as when the backend merges "
        f"calls wrongly\n  it first shows after {call.name}, number {place} of {len(calls)}: {worst}",
        source_of(call, search.kept.arguments(0)),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
