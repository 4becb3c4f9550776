"""What functional programs look like: arguments, numbers, updates, decompositions, failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from tests.support.backends import FunctionalBackend, record, registered, run_functional
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.errors import CompileError
from torch_ltc.lowering.decomposition_tables import core_aten, only_ours
from torch_ltc.lowering.functional_computation import _number_tensors
from torch_ltc.lowering.functionalize import functionalize
from torch_ltc.program.instruction import ReturnKind
from torch_ltc.program.text import program_text
from torch_ltc.program.verify import verify


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


X = torch.arange(12.0).view(3, 4)


def test_calls_have_arguments_in_full_and_sources() -> None:
    program, numbers = record(lambda x: x.sum(1).add_(1), X)
    for table in (core_aten(), only_ours()):
        functional = functionalize(program, numbers, set(), table).program
        for call in functional.calls:
            assert len(call.args) + len(call.kwargs) == len(call.op._schema.arguments)
            assert call.source.file == __file__
            assert all(item.kind is ReturnKind.FRESH for item in call.flat_returns)


def test_constants_and_varying_numbers() -> None:
    program, numbers = record(lambda x: (x * 2.5).add_(4.0, alpha=3), X)
    assert numbers == [2.5, 4.0, 3]
    fixed = functionalize(program, numbers, set(), core_aten())
    assert fixed.fixed == ((0, 2.5), (1, 4.0), (2, 3))
    assert fixed.program.numbers == []
    varying = functionalize(program, numbers, {0, 2}, core_aten())
    assert varying.fixed == ((1, 4.0),)
    assert [(n.slot, repr(n.spec)) for n in varying.program.numbers] == [(0, "float64[]"), (2, "int64[]")]


def test_a_number_that_one_of_its_calls_cannot_take_as_a_tensor_is_a_constant() -> None:
    program, numbers = record(lambda x: F.leaky_relu(x, 0.25), X)
    functional = functionalize(program, numbers, set(range(len(numbers))), only_ours())
    assert functional.program.numbers == []
    assert functional.fixed == tuple(enumerate(numbers))


def test_outputs_and_updates_are_what_the_recorded_program_leaves() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * y

    program, numbers = record(function, X, X)
    functional = functionalize(program, numbers, set(), core_aten()).program
    text = program_text(verify(functional))
    assert [line.strip() for line in text.splitlines()][-2] == f"input 0 becomes %{functional.updates[0].number}"
    assert len(functional.outputs) == len(program.outputs) == 1
    assert functional.donated == (0,)
    assert functional.results == (functional.outputs[0], functional.updates[0].number)


def test_operators_are_taken_apart_as_the_table_says() -> None:
    aten = torch.ops.aten
    program, numbers = record(lambda x: F.gelu(x).addcmul(x, x), X)
    whole = {call.op for call in functionalize(program, numbers, set(), only_ours()).program.calls}
    assert {aten.gelu.default, aten.addcmul.default} <= whole
    table = {
        aten.gelu.default: lambda x, approximate="none": x.relu(),
        aten.addcmul.default: lambda *a, **k: NotImplemented,
    }
    own = [call.op for call in functionalize(program, numbers, set(), table).program.calls]
    assert own == [aten.relu.default, aten.addcmul.default]


def test_linear_backward_is_taken_apart_for_every_table() -> None:
    x, weight, bias = (torch.rand(size, requires_grad=True) for size in ((2, 5, 3), (4, 3), (4,)))
    grad = torch.rand(2, 5, 4)
    expected = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), grad)
    for table in (core_aten(), only_ours()):
        taken_apart = table[torch.ops.aten.linear_backward.default]
        torch.testing.assert_close(taken_apart(x, grad, weight, [True, True, True]), expected)
        some = taken_apart(x, grad, weight, [False, True, False])
        assert (some[0], some[2]) == (None, None)
        torch.testing.assert_close(some[1], expected[1])


def test_a_failing_decomposition_names_the_call_and_its_line() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("cannot be done\nsecond line")

    program, numbers = record(lambda x: x.sin().cos(), X)
    with pytest.raises(CompileError) as caught:
        functionalize(program, numbers, set(), {torch.ops.aten.cos.default: broken})
    assert "has no functional form at aten::cos: cannot be done" in str(caught.value)
    assert "second line" not in str(caught.value)
    assert f"recorded at {__file__}:" in str(caught.value)


def test_a_decomposition_of_another_shape_is_not_used() -> None:
    program, numbers = record(lambda x: x.cos() + 1, X)
    table = {torch.ops.aten.cos.default: lambda x: x.sum(0)}
    functional = verify(functionalize(program, numbers, set(), table).program)
    assert functional.calls[0].name == "aten::cos"
    torch.testing.assert_close(run_functional(functional, [X])[0], X.cos() + 1)


def test_functionalization_is_off_again_after_a_failure() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("cannot be done")

    program, numbers = record(lambda x: x.cos(), X)
    with pytest.raises(CompileError):
        functionalize(program, numbers, set(), {torch.ops.aten.cos.default: broken})
    assert not torch._is_functional_tensor(torch.zeros(2) + 1)
    assert functionalize(program, numbers, set(), core_aten()).program.calls


def test_a_step_compiles_once_when_a_number_varies_from_the_start() -> None:
    compiles: list[events.CompileEvent] = []
    made = FunctionalBackend()
    with registered(made), settings.scope(hot_after=3), torch_ltc.use_backend("functional"):
        stop = events.subscribe(compiles.append, events.CompileEvent)
        x = X.clone().to("ltc")
        expected = X.clone()
        for number in (0.5, 0.25, 0.75, 1.5, -2.0):
            x.mul_(number)
            expected.mul_(number)
            torch_ltc.sync(wait=True)
        stop()
        assert torch.equal(x.cpu(), expected)
    assert len(compiles) == 1
    assert [len(program.numbers) for program in made.programs] == [1]


def test_addmm_and_addmv_broadcast_without_an_expand_on_every_version() -> None:
    matrix, vector = torch.rand(2, 3), torch.rand(3)
    for function, given in (
        (torch.addmm, (torch.rand(4), matrix, torch.rand(3, 4))),
        (torch.addmv, (torch.rand(1), matrix, vector)),
        (torch.addmm, (torch.ones(4, dtype=torch.int64), matrix.long(), torch.ones(3, 4, dtype=torch.int64))),
        (torch.addmm, (torch.rand(4).bfloat16(), matrix.bfloat16(), torch.rand(3, 4).bfloat16())),
    ):
        program, numbers = record(function, *given)
        form = functionalize(program, numbers, set(), core_aten())
        assert "aten::expand" not in {call.name for call in form.program.calls}
        [result] = run_functional(form.program, given)
        torch.testing.assert_close(result, function(*given))


def test_equal_numbers_share_a_tensor_and_zeros_keep_their_signs() -> None:
    scalars = [0.5, 0.5, 0.0, -0.0, 2, 2.0, float("nan"), True]
    numbers = [(10 + slot, slot, torch.float32) for slot in range(len(scalars))]
    made = _number_tensors([*numbers, (30, 0, torch.float64)], scalars, torch.device("cpu"))
    assert made[10] is made[11]
    assert made[14] is made[15]
    assert made[30].dtype is torch.float64
    for number, slot, _ in numbers:
        expected = torch.tensor(scalars[slot], dtype=torch.float32)
        torch.testing.assert_close(made[number], expected, rtol=0, atol=0, equal_nan=True)
        assert made[number].signbit() == expected.signbit()
