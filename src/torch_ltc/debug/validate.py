"""Validation of a backend against the interpreter, run by run, and the first call that it gets wrong.

The compiled run happens as always. Then the interpreter runs the program on copies of the inputs, from the same random
state; what differs beyond the tolerance is an error, and the interpreter's results are the ones that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_ltc.backends.interpreter import Interpretation
from torch_ltc.compile.hooks import Failure, Run, backend_failed
from torch_ltc.compile.specialization_cache import specializations
from torch_ltc.debug.compare_runs import Difference, Ended, compared
from torch_ltc.debug.messages import message
from torch_ltc.debug.replay import Operand, Replay, SavedInputs, operands, perturb, source_of
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcWarning, ValidationError
from torch_ltc.events import RefusalEvent, emit
from torch_ltc.lowering.backend_data import put_back
from torch_ltc.lowering.interface import Backend, Outcome
from torch_ltc.lowering.lower import lower
from torch_ltc.lowering.result_checks import check_count
from torch_ltc.program.instruction import Call, Program, ReturnKind
from torch_ltc.source import Source

_WRONG = message(
    "LTC303",
    "wrong-results",
    "A backend computed something else than the interpreter, beyond the tolerance for the dtype.",
    "Report it with the script that `torch_ltc.debug.dump_repro` writes, or run with another backend.",
)


@contextmanager
def watch(run: Run) -> Iterator[None]:
    """Around each run, if the setting says so and the backend is to be held to the interpreter's numbers."""
    program, backend = run.entry.program, run.backend
    drawn_otherwise = program.random and not backend.eager_random
    if run.check not in ("validate", "all") or run.executable is None or not backend.computes or drawn_otherwise:
        yield
        return
    handles = list(run.arguments.held)
    saved = SavedInputs(program, run.arguments, range(len(program.inputs)))
    yield
    assert run.outcome is not None
    if run.outcome.failures or run.entry.status(backend).error is not None:
        # The interpreter has run it already.
        return
    try:
        _validate(run, saved, handles)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        deferred.add_warning(f"the validation of program {program.identity} failed: {what}", LtcWarning)


def _validate(run: Run, saved: SavedInputs, handles: Sequence[object]) -> None:
    assert run.outcome is not None
    program = run.entry.program
    arguments = saved.arguments()
    expected = Interpretation(program).run(arguments)
    # What is drawn next follows the interpreter's run, whatever the search below draws.
    state = run.arguments.generator.get_state() if program.random else None
    ends = (expected, arguments.inputs), (run.outcome, run.arguments.held)
    try:
        found = compared(program, run.backend, *ends, lambda: perturbed_run(program, saved))
        if found or expected.failures:
            error = _unfailed(run, expected) if expected.failures else _error(run, saved, found)
            _install(run, expected, arguments.inputs, handles)
            _refuse(run, error)
    finally:
        if state is not None:
            run.arguments.generator.set_state(state)


def _install(run: Run, expected: Outcome, inputs: Sequence[object], handles: Sequence[object]) -> None:
    """Let the outcome of the run be the interpreter's: results, and inputs that it wrote to."""
    assert run.outcome is not None
    run.outcome.results, run.outcome.failures = expected.results, expected.failures
    run.outcome.replaced = {}
    for position, (held, given) in enumerate(zip(handles, inputs, strict=True)):
        if not isinstance(given, torch.Tensor):
            continue
        if isinstance(held, torch.Tensor):
            put_back(held.untyped_storage(), given.untyped_storage())
        elif position in run.entry.written_positions:
            run.outcome.replaced[position] = given


def _refuse(run: Run, error: ValidationError) -> None:
    """The backend's form of the program is not used again."""
    entry, backend = run.entry, run.backend
    specializations.fail_run(entry, backend)
    entry.compiled = None
    entry.status(backend).refuse(error)
    backend_failed(Failure(entry, backend, "validate", error))
    emit(RefusalEvent(entry.program.identity, backend.name, "validate", str(error)))
    deferred.add_error(error)


def _error(run: Run, saved: SavedInputs, found: list[Difference]) -> ValidationError:
    program, name = run.entry.program, run.backend.name
    worst = max(found, key=lambda difference: difference.excess)
    bad = bad_call(program, run.backend, saved)
    lines = [
        f"{_WRONG.code}: {name} computed program {program.identity} of {len(program.calls)} calls wrong: "
        f"{len(found)} of its results and inputs differ{'s' if len(found) == 1 else ''} from the interpreter's",
        f"  worst: {worst}",
        *(f"  {line}" for line in bad.text.splitlines()),
        "  the interpreter's results are kept, and it runs this program from now on",
    ]
    hint = f"report it with the script that torch_ltc.debug.dump_repro({program.identity}, FOLDER) writes"
    return ValidationError("\n".join(lines), source=bad.source.describe() if bad.source else None, hint=hint)


def _unfailed(run: Run, expected: Outcome) -> ValidationError:
    program = run.entry.program
    what = f"{_WRONG.code}: {run.backend.name} ran program {program.identity} without an error, but it has one"
    return ValidationError(f"{what}: {expected.failures[0]}", hint="correct the line named; the backend hides it")


# ---- the first bad call ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BadCall:
    """The result of the search as text, and the line of the call that it found."""

    text: str
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class _Search:
    """One program, one backend, one set of inputs."""

    program: Program
    backend: Backend
    saved: SavedInputs

    def first_bad(self, outputs: Callable[[Program, int], tuple[int, ...]]) -> tuple[int, Difference] | None:
        """The number of calls until something is wrong, and the difference; None if these outputs are right."""
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
        """The worst difference of the backend in the program of the first calls."""
        program = beginning(self.program, calls, outputs(self.program, calls))
        count = len(program.inputs)
        expected = self.saved.arguments(count)
        wanted = Interpretation(program).run(expected)
        arguments = self.saved.arguments(count)
        executable = lower(self.backend, program, list(arguments.scalars), set(), strict=False)
        got = executable.computation.run(arguments)
        got.results = check_count(self.backend.name, program, got.results, len(program.outputs))
        ends = (wanted, expected.inputs), (got, arguments.inputs)
        found = compared(program, self.backend, *ends, lambda: perturbed_run(program, self.saved))
        return max(found, key=lambda each: each.excess, default=None)

    def given(self, place: int) -> tuple[Operand, ...]:
        """The operands of the call at this place."""
        seen: list[tuple[Operand, ...]] = []
        arguments = self.saved.arguments()

        def observe(at: int, call: Call, values: list[Any], run: Callable[[], None]) -> None:
            if at == place:
                seen.append(operands(call, values, arguments, {}, -1))
            run()

        Replay(self.program, observe).run(arguments)
        return seen[0] if seen else ()


def perturbed_run(program: Program, saved: SavedInputs) -> Ended:
    """A run of the interpreter on perturbed inputs."""
    arguments = saved.arguments(len(program.inputs))
    perturb(arguments)
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


def bad_call(program: Program, backend: Backend, saved: SavedInputs) -> BadCall:
    """The first call that the backend gets wrong on these inputs, as far as that can be said."""
    search = _Search(program, backend, saved)
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
        return BadCall("\n".join([*lines, f"  {worst}"]), source_of(call, search.saved.arguments(0)))
    found = search.first_bad(_needed)
    if found is None:
        return BadCall("no bad call: compiled once more, for its own sizes alone, the program is right")
    place, worst = found
    call = calls[place - 1]
    return BadCall(
        f"no single bad call: with every value returned all {len(calls)} calls are right, as when the backend merges "
        f"calls wrongly\n  it first shows after {call.name}, number {place} of {len(calls)}: {worst}",
        source_of(call, search.saved.arguments(0)),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
