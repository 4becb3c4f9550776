"""The null backend takes every program, looks at all of it and computes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torch_ltc
from tests.support.backends import record
from torch_ltc import events
from torch_ltc.backends.null import NullBackend
from torch_ltc.errors import CompileError, VerifyError
from torch_ltc.lowering.interface import Form
from torch_ltc.lowering.lower import functional_form
from torch_ltc.program.instruction import Program
from torch_ltc.program.spec import spec_of


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def null_program(function: object, *inputs: torch.Tensor) -> Program:
    program, numbers = record(function, *inputs)  # type: ignore[arg-type]
    return functional_form(NullBackend(), program, numbers, set()).program


def test_it_says_that_it_does_not_compute() -> None:
    assert NullBackend.form is Form.FUNCTIONAL
    assert not NullBackend.computes


def test_results_have_the_recorded_shape() -> None:
    program = null_program(lambda x: ((x @ x).t(), x.sum(0), x > 0), torch.rand(3, 3))
    results = NullBackend().compile(program)(torch.rand(3, 3))
    specs = program.specs()
    assert [spec_of(result) for result in results] == [specs[number] for number in program.results]


def test_inputs_are_checked_against_the_program() -> None:
    run = NullBackend().compile(null_program(lambda x: x + 1, torch.rand(3)))
    with pytest.raises(CompileError, match=r"takes float32\[3\], got torch.float32\[4\]"):
        run(torch.rand(4))
    with pytest.raises(CompileError, match=r"takes float32\[3\], got torch.float64\[3\]"):
        run(torch.rand(3, dtype=torch.float64))


def test_a_program_that_is_not_well_formed_is_refused() -> None:
    program = null_program(lambda x: x + 1, torch.rand(3))
    broken = Program(1, program.instructions, (99,), 1, program.values, False, functional=True)
    with pytest.raises(VerifyError, match="%99"):
        NullBackend().compile(broken)


def test_a_training_step_runs_from_end_to_end_on_the_null_backend() -> None:
    runs: list[events.ExecuteEvent] = []
    refusals: list[events.RefusalEvent] = []
    with torch_ltc.use_backend("null"):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).to("ltc")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        stops = [events.subscribe(runs.append, events.ExecuteEvent)]
        stops.append(events.subscribe(refusals.append, events.RefusalEvent))
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.rand(5, 4).to("ltc")).square().mean()
            loss.backward()
            optimizer.step()
        assert isinstance(loss.item(), float)
        torch_ltc.wait_device_ops()
        for stop in stops:
            stop()
    assert refusals == []
    assert [run.backend for run in runs][-2:] == ["null", "null"]
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(8, 4), (8,), (2, 8), (2,)]
