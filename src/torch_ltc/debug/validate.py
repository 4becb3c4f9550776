"""Comparing what a backend computed with the interpreter, run by run, and finding the first call that it gets wrong.

The compiled run happens as always. Then the interpreter runs the program on copies of the inputs, from the same random
state; what differs beyond the tolerance is an error, and the interpreter's results are the ones that stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_ltc.backends.interpreter import Interpretation
from torch_ltc.compile.hooks import Failure, Run, backend_failed
from torch_ltc.compile.specialization_cache import specializations
from torch_ltc.debug.bisect import bad_call, shaken_run
from torch_ltc.debug.compare_runs import Difference, compared
from torch_ltc.debug.messages import message
from torch_ltc.debug.replay import Kept
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcWarning, ValidationError
from torch_ltc.events import RefusalEvent, emit
from torch_ltc.lowering.interface import Outcome

__all__ = ["watch"]

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
    kept = Kept(program, run.arguments, range(len(program.inputs)))
    yield
    assert run.outcome is not None
    if run.outcome.failures or run.entry.status(backend).error is not None:
        # The interpreter has run it already.
        return
    try:
        _validate(run, kept, handles)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        deferred.add_warning(f"the validation of program {program.identity} failed: {what}", LtcWarning)


def _validate(run: Run, kept: Kept, handles: Sequence[object]) -> None:
    assert run.outcome is not None
    program = run.entry.program
    arguments = kept.arguments()
    expected = Interpretation(program).run(arguments)
    # What is drawn next follows the interpreter's run, whatever the search below draws.
    state = run.arguments.generator.get_state() if program.random else None
    ends = (expected, arguments.inputs), (run.outcome, run.arguments.held)
    found = compared(program, run.backend, *ends)
    try:
        if found:
            found = compared(program, run.backend, *ends, shaken=shaken_run(program, kept))
        if found or expected.failures:
            error = _unfailed(run, expected) if expected.failures else _error(run, kept, found)
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
            held.untyped_storage().copy_(given.untyped_storage())
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


def _error(run: Run, kept: Kept, found: list[Difference]) -> ValidationError:
    program, name = run.entry.program, run.backend.name
    worst = max(found, key=lambda difference: difference.excess)
    bad = bad_call(program, run.backend, kept)
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
