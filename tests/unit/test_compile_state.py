"""The compile state machine: which transitions there are, and the way of a program through them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import torch_ltc
from tests.support.backends import FunctionalBackend, registered
from torch_ltc import events
from torch_ltc.compile.state import TRANSITIONS, CompileStatus, State
from torch_ltc.config import settings
from torch_ltc.errors import CompileError
from torch_ltc.lowering.interface import Backend
from torch_ltc.program.instruction import Program


@pytest.fixture
def seen() -> Iterator[list[events.StateEvent]]:
    found: list[events.StateEvent] = []
    subscription = events.subscribe(found.append, events.StateEvent)
    yield found
    subscription()


def step(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).relu() + 1


def states(found: list[events.StateEvent]) -> list[str]:
    return [event.state for event in found]


def test_every_state_has_its_transitions_and_a_refusal_is_final() -> None:
    assert set(TRANSITIONS) == set(State)
    assert not TRANSITIONS[State.REFUSED]
    status = CompileStatus(1, "any")
    status.refuse(CompileError("never"))
    status.move(State.COMPILED, "")
    assert status.state is State.REFUSED
    assert str(status.error) == "never"


def test_a_program_is_not_compiled_before_it_was_queued() -> None:
    status = CompileStatus(1, "any")
    status.move(State.COMPILING, "")
    assert status.state is State.INTERPRETED


def test_a_hot_program_is_queued_compiled_and_then_run_by_its_executable(seen: list[events.StateEvent]) -> None:
    with registered(FunctionalBackend), torch_ltc.use_backend("functional"):
        x = torch.arange(-3.0, 3.0).to("ltc")
        for _ in range(3):
            step(x).cpu()
    assert states(seen) == ["queued", "compiling", "compiled"]
    assert len({event.program for event in seen}) == 1


def test_in_the_background_the_interpreter_runs_it_until_the_job_is_done(seen: list[events.StateEvent]) -> None:
    with settings.scope(tiers="background"), registered(FunctionalBackend), torch_ltc.use_backend("functional"):
        x = torch.arange(-3.0, 3.0).to("ltc")
        for _ in range(2):
            step(x).cpu()
        deadline = time.monotonic() + 60
        while states(seen)[-1:] != ["compiled"] and time.monotonic() < deadline:
            time.sleep(0.01)
        step(x).cpu()
        torch_ltc.wait_for_compiles()
    assert states(seen) == ["queued", "compiling", "compiled"]


class RefusingBackend(Backend):
    """Compiles nothing."""

    name = "refusing"

    def compile(self, program: Program) -> object:
        raise CompileError("not this one")


def test_a_program_that_the_backend_cannot_compile_is_refused_for_good(seen: list[events.StateEvent]) -> None:
    with (
        registered(RefusingBackend),
        torch_ltc.use_backend("refusing"),
        pytest.warns(torch_ltc.errors.BackendWarning, match="not this one"),
    ):
        x = torch.arange(-3.0, 3.0).to("ltc")
        for _ in range(4):
            step(x).cpu()
    assert states(seen)[-1] == "refused"
    assert states(seen).count("refused") == 1
    assert "not this one" in seen[-1].reason


def test_an_evicted_program_is_interpreted_again(seen: list[events.StateEvent]) -> None:
    with settings.scope(executables_bound=1), registered(FunctionalBackend), torch_ltc.use_backend("functional"):
        x = torch.arange(-3.0, 3.0).to("ltc")
        for function in (step, lambda x: (x.sin() * 3).cos()):
            for _ in range(3):
                function(x).cpu()
    first = seen[0].program
    assert [event.state for event in seen if event.program == first][-1] == "interpreted"
    assert "evicted" in [event.reason for event in seen if event.program == first][-1]
