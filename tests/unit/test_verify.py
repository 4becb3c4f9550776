"""The verifier takes well-formed programs and refuses each kind of broken one, naming the instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_ltc
from tests.support.backends import record
from torch_ltc.errors import VerifyError
from torch_ltc.lowering.decomposition_tables import core_aten
from torch_ltc.lowering.functionalize import functionalize
from torch_ltc.program.instruction import (
    DEVICE_GENERATOR,
    Call,
    Number,
    Program,
    Return,
    ReturnKind,
    Scalar,
    Update,
    Value,
)
from torch_ltc.program.spec import make_spec
from torch_ltc.program.verify import verify
from torch_ltc.source import UNKNOWN


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """%0, %1 the inputs, %2 = mm, an in-place call, %3 = relu."""
    hidden = x @ y
    x.add_(0.5)
    return hidden.relu()


@pytest.fixture
def recorded() -> Program:
    return record(step, torch.zeros(2, 2), torch.zeros(2, 2))[0]


@pytest.fixture
def functional() -> Program:
    program, numbers = record(step, torch.zeros(2, 2), torch.zeros(2, 2))
    return functionalize(program, numbers, {0}, core_aten()).program


def with_call(program: Program, position: int, **changes: Any) -> Program:
    """The program with its call at `position` changed."""
    call = program.calls[position]
    changed = tuple(replace(i, **changes) if i is call else i for i in program.instructions)
    return replace(program, instructions=changed)


def refused(program: Program, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(program)


def test_a_program_as_recorded_and_its_functional_form_are_well_formed(recorded: Program, functional: Program) -> None:
    assert verify(recorded) is recorded
    assert verify(functional) is functional
    assert len(functional.updates) == 1
    assert len(functional.numbers) == 1


def test_the_error_shows_the_instruction_and_its_line(recorded: Program) -> None:
    relu = next(i for i, c in enumerate(recorded.calls) if c.name == "aten::relu")
    broken = with_call(recorded, relu, args=(Value(9),), operands=(9,))
    with pytest.raises(VerifyError) as caught:
        verify(broken)
    lines = str(caught.value).splitlines()
    index = broken.instructions.index(broken.calls[relu])
    assert lines[0] == f"instruction {index} of program {recorded.identity} uses %9 before it is defined:"
    assert "aten::relu(%9)" in lines[1]
    assert lines[2].startswith(f"  recorded at {__file__}:")


def test_use_before_definition(recorded: Program) -> None:
    instructions = (*recorded.instructions[2:3], *recorded.instructions[:2], *recorded.instructions[3:])
    refused(replace(recorded, instructions=instructions), "instruction 0 .* uses %0 before it is defined")


def test_two_definitions_of_a_value(recorded: Program) -> None:
    refused(with_call(recorded, 2, numbers=(2,)), "defines value %2 again")
    twice = (recorded.instructions[0], *recorded.instructions)
    refused(replace(recorded, instructions=twice), "instruction 1 .* defines value %0 again")


@pytest.mark.parametrize("number", [4, 99])
def test_a_value_number_past_the_count(recorded: Program, number: int) -> None:
    refused(with_call(recorded, 2, numbers=(number,)), f"defines value %{number} of {recorded.values}")


def test_operands_that_are_not_those_of_the_arguments(recorded: Program) -> None:
    refused(with_call(recorded, 0, operands=(1, 0)), r"lists the operands \(1, 0\) but takes \(0, 1\)")
    refused(with_call(recorded, 0, operands=(0,)), r"lists the operands \(0,\) but takes \(0, 1\)")


def test_arguments_that_do_not_fit_the_schema(recorded: Program) -> None:
    refused(with_call(recorded, 0, args=(Value(0),), operands=(0,)), "has 1 arguments where its schema has 2")


def test_returns_that_do_not_fit_the_schema(recorded: Program) -> None:
    call = recorded.calls[0]
    refused(with_call(recorded, 0, returns=call.returns * 2), "has 2 returns where its schema has 1")
    refused(with_call(recorded, 0, numbers=(2, -1)), "has 2 value numbers for 1 returns")


@pytest.mark.parametrize(
    "item", [Return(ReturnKind.NOTHING), Return(ReturnKind.CONSTANT, constant=3), Return(ReturnKind.FRESH)]
)
def test_a_value_made_by_a_return_that_makes_none(recorded: Program, item: Return) -> None:
    refused(with_call(recorded, 0, returns=(item,)), "defines %2 by a return that makes no value")


def test_a_view_of_an_operand_that_is_not_there(recorded: Program) -> None:
    spec = make_spec(torch.float32, (2, 2), (2, 1))
    item = Return(ReturnKind.VIEW, spec, operand=5)
    refused(with_call(recorded, 0, returns=(item,)), "returns a view of operand 5 of 2")


def test_a_slot_past_the_run_time_numbers(recorded: Program, functional: Program) -> None:
    add = recorded.calls[1]
    args = (add.args[0], Scalar(3, float), *add.args[2:])
    refused(with_call(recorded, 1, args=args), "names slot 3 of 1")
    number = functional.numbers[0]
    moved = tuple(replace(i, slot=7) if i is number else i for i in functional.instructions)
    refused(replace(functional, instructions=moved), "names slot 7 of 1")


def test_a_slot_inside_a_list(recorded: Program) -> None:
    program, _ = record(lambda x: torch._foreach_mul([x, x], [2.0, 3.0])[0], torch.zeros(2))
    call = program.calls[0]
    refused(with_call(program, 0, args=(call.args[0], (Scalar(0, float), Scalar(8, float)))), "names slot 8 of 2")


def test_the_generator_without_the_mark_of_random_calls() -> None:
    program, _ = record(lambda: torch.empty(2, device="ltc").normal_())
    position = next(i for i, call in enumerate(program.calls) if call.random)
    assert DEVICE_GENERATOR in program.calls[position].kwargs.values()
    refused(with_call(program, position, random=False), "takes the generator but is not marked as random")


def test_numbers_and_updates_belong_to_functional_programs(recorded: Program) -> None:
    number = Number(0, make_spec(torch.float64, (), ()), recorded.values, UNKNOWN)
    wider = replace(recorded, values=recorded.values + 1, instructions=(*recorded.instructions, number))
    refused(wider, "is a number in a program that is not functional")
    refused(replace(recorded, updates=(Update(0, 2),)), "has updates but is not functional")


def test_writes_and_views_do_not_belong_to_functional_programs(recorded: Program, functional: Program) -> None:
    refused(replace(recorded, functional=True), "writes to an operand in a functional program")
    views, _ = record(lambda x: x.t() + 1, torch.zeros(2, 2))
    refused(replace(views, functional=True), "instruction 1 .* returns a view or an operand in a functional program")


def test_results_that_nothing_defines(recorded: Program, functional: Program) -> None:
    refused(replace(recorded, outputs=(77,)), "returns %77, which nothing defines")
    refused(replace(functional, updates=(Update(0, 77),)), "returns %77, which nothing defines")


def test_updates_of_inputs_that_are_not_there_or_twice(functional: Program) -> None:
    (update,) = functional.updates
    refused(replace(functional, updates=(update, update)), r"updates the inputs \[0, 0\] of 2")
    refused(replace(functional, updates=(Update(2, update.number),)), r"updates the inputs \[2\] of 2")
    refused(replace(functional, updates=(Update(-1, update.number),)), r"updates the inputs \[-1\] of 2")


def test_an_update_of_another_shape() -> None:
    program, numbers = record(lambda x, y: (x.add_(1), y.sum())[1], torch.zeros(2), torch.zeros(2))
    functional = functionalize(program, numbers, set(), core_aten()).program
    total = functional.outputs[0]
    refused(replace(functional, updates=(Update(0, total),)), r"updates an input of float32\[2\] with float32\[\]")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(4)[1:].mul_(2.0),
        lambda x: torch.nn.functional.dropout(x, 0.5).sort().values,
        lambda x: torch._foreach_add([x, x], 1.0)[1],
        lambda x: x.split(1)[1] + x.unbind(1)[0],
        lambda x: x.new_zeros(0, 3).t(),
    ],
)
def test_programs_of_all_kinds_are_well_formed(function: Callable[..., Any]) -> None:
    program, numbers = record(function, torch.rand(2, 2))
    verify(program)
    verify(functionalize(program, numbers, set(range(len(numbers))), core_aten()).program)


def test_calls_are_compared_by_identity() -> None:
    program, _ = record(lambda x: (x + 1, x + 1), torch.zeros(2))
    first, second = program.calls
    assert isinstance(first, Call)
    assert first != second
