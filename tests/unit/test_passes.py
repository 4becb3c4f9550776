"""Passes over functional programs: what each does, what it must leave alone, and that values never change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.support.backends import FunctionalBackend, record, run_functional
from tests.support.random_programs import grow
from torch_ltc.lowering.decomposition_tables import core_aten, only_ours
from torch_ltc.lowering.functionalize import functionalize
from torch_ltc.lowering.lower import functional_form
from torch_ltc.lowering.passes import (
    PASSES,
    cse,
    dce,
    fold_constants,
    propagate_copies,
    run_passes,
)
from torch_ltc.program.instruction import Call, Program, Size, Symbol, SymbolicShape
from torch_ltc.program.text import program_text
from torch_ltc.program.verify import verify

X = torch.arange(1.0, 7.0).view(2, 3)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def functional(function: Callable[..., Any], *inputs: Tensor) -> Program:
    """The functional form of what the function records, before all passes."""
    program, numbers = record(function, *inputs)
    return verify(functionalize(program, numbers, set(), only_ours()).program)


def names(program: Program) -> list[str]:
    return [call.name.removeprefix("aten::") for call in program.calls]


def changed(run: Callable[[Program], Program], program: Program, *given: Tensor) -> Program:
    """The program after one pass, which is well formed, leaves the old one alone and computes the same."""
    before = program_text(program)
    after = verify(run(program))
    assert program_text(program) == before
    assert [i.number for i in after.inputs] == [i.number for i in program.inputs]
    assert len(after.outputs) == len(program.outputs)
    if given:
        kept = {update.input for update in after.updates}
        expected = run_functional(program, [value.clone() for value in given])
        actual = run_functional(after, [value.clone() for value in given])
        count = len(program.outputs)
        wanted = [value for update, value in zip(program.updates, expected[count:]) if update.input in kept]
        for ours, theirs in zip(actual, [*expected[:count], *wanted], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    return after


# ---- dead calls


def test_calls_that_nobody_uses_are_dropped_with_what_only_they_used() -> None:
    def function(x: Tensor) -> Tensor:
        x.sin().cos()
        return x.exp()

    program = functional(function, X)
    assert names(program) == ["sin", "cos", "exp"]
    assert names(changed(dce, program, X)) == ["exp"]


def test_random_calls_stay_because_they_move_the_generator() -> None:
    def function(x: Tensor) -> Tensor:
        torch.rand_like(x.sin())
        return x.exp()

    after = changed(dce, functional(function, X))
    assert sum(call.random for call in after.calls) == 1
    assert "exp" in names(after)


def test_a_call_of_which_one_result_is_used_stays() -> None:
    program = functional(lambda x: x.sort()[1], X)
    assert names(changed(dce, program, X)) == ["sort"]


def test_new_values_of_inputs_are_used() -> None:
    program = functional(lambda x: (x.add_(1), None)[1], X)
    assert names(changed(dce, program, X)) == names(program)
    assert len(program.updates) == 1


def test_inputs_stay_even_when_nobody_uses_them() -> None:
    program = functional(lambda x, y: (y + 1, x.exp())[1], X, X)
    assert len(changed(dce, program, X, X).inputs) == 2


# ---- common calls


def test_equal_calls_are_one() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin().exp(), x.sin().exp() + 1, x.sum(0) + x.sum(0)

    after = changed(cse, functional(function, X), X)
    assert names(after) == ["sin", "exp", "add.Tensor", "sum.dim_IntList", "add.Tensor"]


def test_equal_outputs_are_both_there() -> None:
    after = changed(cse, functional(lambda x: (x.sin(), x.sin()), X), X)
    assert names(after) == ["sin"]
    assert len(after.outputs) == 2
    assert len(set(after.outputs)) == 1


def test_random_calls_are_never_one() -> None:
    program = functional(lambda x: (torch.rand_like(x), torch.rand_like(x)), X)
    after = changed(cse, program)
    assert sum(call.random for call in after.calls) == 2
    assert len(set(after.outputs)) == 2


def test_numbers_of_another_type_or_sign_are_other_numbers() -> None:
    program = functional(lambda x: (x + 1, x + 1.0, x + True), X)
    assert len(changed(cse, program, X).calls) == len(program.calls)
    zeros = functional(lambda x: (x * 0.0, x * -0.0, torch.full((2,), 0.0, device=x.device)), X)
    after = changed(cse, zeros, X)
    products = [call for call in after.calls if call.name.startswith("aten::mul")]
    assert len(products) == 2
    first, second, _ = run_functional(after, [X])
    assert not torch.signbit(first).any()
    assert torch.signbit(second).all()


def test_not_a_number_is_a_number_like_any_other() -> None:
    program = functional(lambda x: (x * float("nan"), x * float("nan")), X)
    assert len(changed(cse, program, X).calls) == 1


def test_other_dtypes_dimensions_and_operands_are_other_calls() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        return x.sum(0), x.sum(1), x.to(torch.float64), x.to(torch.float16), x - y, y - x

    program = functional(function, X, X)
    assert len(changed(cse, program, X, X).calls) == len(program.calls)


def test_calls_whose_operands_became_one_are_one() -> None:
    program = functional(lambda x: (x.sin().cos().exp(), x.sin().cos().tanh()), X)
    assert names(changed(cse, program, X)) == ["sin", "cos", "exp", "tanh"]


def test_lists_of_operands_are_renamed_too() -> None:
    program = functional(lambda x: torch.cat([x.sin(), x.sin(), x.cos()]), X)
    after = changed(cse, program, X)
    assert names(after) == ["sin", "cos", "cat"]
    assert after.calls[-1].operands[0] == after.calls[-1].operands[1]


def test_operands_given_by_keyword_are_renamed_too() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.searchsorted(x, x + 1, sorter=x.argsort().clone())

    after = changed(propagate_copies, functional(function, X), X)
    assert "clone" not in names(after)


def test_calls_that_use_other_results_of_one_call_differ() -> None:
    program = functional(lambda x: tuple(part.sin() for part in x.sort()), X)
    assert names(changed(cse, program, X)).count("sin") == 2


# ---- copies


def test_users_of_a_copy_use_the_original() -> None:
    program = functional(lambda x: x.clone().view(2, 3).sin(), X)
    after = changed(propagate_copies, program, X)
    assert names(after) == ["sin"]
    assert after.calls[0].operands == (after.inputs[0].number,)


def test_a_copy_of_another_layout_is_a_copy() -> None:
    program = functional(lambda x: (x.t().contiguous().t(), x.t().clone()), X)
    after = changed(propagate_copies, program, X)
    specs = after.specs()
    assert [specs[number].stride for number in after.outputs] == [(1, 2), (1, 3)]
    assert "clone" in names(after)


def test_a_cast_that_changes_the_dtype_is_no_copy() -> None:
    after = changed(propagate_copies, functional(lambda x: (x.to(torch.float64), x.to(torch.int32)), X), X)
    assert names(after).count("_to_copy") == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.permute(1, 0).sin(),
        lambda x: x[1:].sin(),
        lambda x: x[:, ::2].sin(),
        lambda x: x.view(3, 2).sin(),
        lambda x: x.flip(0).sin(),
        lambda x: x[:1].expand(2, 3).sin(),
    ],
)
def test_calls_that_move_elements_stay(function: Callable[[Tensor], Tensor]) -> None:
    assert len(changed(propagate_copies, functional(function, X), X).calls) >= 2


@pytest.mark.parametrize("size", [(3, 3), (1, 1), (1, 4), (4, 1)])
def test_transposing_a_square_is_no_copy_and_a_line_is_right_either_way(size: tuple[int, int]) -> None:
    square = torch.rand(size)
    program = functional(lambda x: (x.t() + 1, x.permute(1, 0).contiguous().sin()), square)
    changed(propagate_copies, program, square)


def test_permutations_that_undo_each_other() -> None:
    program = functional(lambda x: (x.permute(1, 0).permute(1, 0).sin(), x.t().exp().t().cos()), X)
    changed(propagate_copies, program, X)


def test_an_input_that_ends_as_it_was_is_not_updated() -> None:
    def function(x: Tensor) -> Tensor:
        x.copy_(x.clone())
        return x.sin()

    program = run_passes(functional(function, X))
    assert verify(program).updates == ()


def test_an_input_that_takes_the_value_of_another_is_updated() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y)
        return x.sin()

    program = verify(run_passes(functional(function, X, X)))
    assert [update.input for update in program.updates] == [0]


# ---- constants


def test_copies_of_a_constant_are_the_constant() -> None:
    def function(x: Tensor) -> Tensor:
        return x + torch.full((2, 3), 2.5, device=x.device).clone()

    after = changed(fold_constants, functional(function, X), X)
    assert "clone" not in names(after)


@pytest.mark.parametrize("ones", [lambda x: torch.ones(2, 3, device=x.device), lambda x: 1.0], ids=["tensor", "number"])
def test_a_product_with_one_is_the_other_factor(ones: Callable[[Tensor], Any]) -> None:
    program = functional_form(FunctionalBackend(), *record(lambda x: (x * ones(x)).sin(), X), set()).program
    assert "aten::mul.Tensor" not in [call.name for call in program.calls]
    torch.testing.assert_close(run_functional(program, [X])[0], X.sin())


@pytest.mark.parametrize(
    ("x", "other"),
    [
        (torch.tensor([1, 2]), 1.0),
        (torch.tensor([True, False]), 1),
        (torch.tensor(2.0), torch.ones(3)),
        (torch.tensor([1.0, 2.0]), torch.ones(3, 1)),
        (torch.tensor([1, 2]), torch.ones(2)),
        (torch.rand(2, 3).t(), torch.ones(3, 2)),
    ],
    ids=["int by float", "bool by int", "broadcast", "broadcast both", "promoted", "layout"],
)
def test_a_product_with_one_that_changes_dtype_or_shape_stays(x: Tensor, other: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return x * (torch.ones(other.shape, device=x.device) if isinstance(other, Tensor) else other)

    expected = function(x)
    program, numbers = record(function, x)
    folded = verify(run_passes(functionalize(program, numbers, set(), core_aten()).program))
    (result,) = run_functional(folded, [x])
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    "number", [0.0, -0.0, 0.1, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"), 2**53 + 1, -3]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_folded_constants_have_the_bits_of_eager(number: float, dtype: torch.dtype) -> None:
    def function(device: str) -> Tensor:
        return torch.full((3,), number, dtype=dtype, device=device).clone().view(3, 1)

    try:
        expected = function("cpu")
    except RuntimeError:
        pytest.skip("eager refuses it")
    program = verify(run_passes(functional(lambda: function("ltc"))))
    (result,) = run_functional(program, [])
    assert result.dtype is dtype
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    if dtype.is_floating_point:
        assert torch.equal(torch.signbit(result), torch.signbit(expected))


def test_a_folded_constant_is_on_the_device_of_the_program() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.full((2, 3), 2.5, device=x.device).clone() + x

    after = changed(fold_constants, functional(function, X), X)
    made = [call for call in after.calls if call.name == "aten::full"]
    assert made
    assert [call.kwargs["device"] for call in made] == [after.device] * len(made)


def test_a_draw_is_not_folded() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.full((3,), 0.5, device=x.device).bernoulli_() * torch.ones(3, device=x.device)

    program = functional(function, X)
    assert sum(call.random for call in changed(fold_constants, program).calls) == 1


# ---- all passes on many programs


def test_passes_are_observed_one_by_one() -> None:
    seen: list[tuple[str, int]] = []

    def function(x: Tensor) -> Any:
        x.cos()
        return x.sin() + x.sin().clone()

    program, numbers = record(function, X)
    form = functional_form(
        FunctionalBackend(), program, numbers, set(), lambda name, p: seen.append((name, len(p.calls)))
    )
    assert [name for name, _ in seen] == ["functionalize", *(name for name, _ in PASSES)]
    assert dict(seen) == {
        "functionalize": 5,
        "dce": 4,
        "fold_constants": 4,
        "propagate_copies": 3,
        "cse": 2,
        "final_dce": 2,
    }
    assert len(form.program.calls) == 2


def test_text_before_and_after() -> None:
    def function(x: Tensor) -> Tensor:
        x.cos()
        return x.sin() + x.sin().clone()

    program = functional(function, X)

    def text(program: Program) -> list[str]:
        return [line.split("  #")[0].strip() for line in program_text(program).splitlines()[1:-1]]

    assert text(program) == [
        "%0: float32[2,3] = input(buffer=0)",
        "%1: float32[2,3] = aten::cos(%0)",
        "%2: float32[2,3] = aten::sin(%0)",
        "%3: float32[2,3] = aten::sin(%0)",
        "%4: float32[2,3] = aten::clone(%3)",
        "%5: float32[2,3] ROOT=0 = aten::add.Tensor(%2, %4, alpha=1)",
    ]
    assert text(run_passes(program)) == [
        "%0: float32[2,3] = input(buffer=0)",
        "%2: float32[2,3] = aten::sin(%0)",
        "%5: float32[2,3] ROOT=0 = aten::add.Tensor(%2, %2, alpha=1)",
    ]


def check_every_pass(program: Program, numbers: list[object], given: list[Tensor]) -> int:
    """Run all passes on both tables, verify each result, compare values with the program before; calls dropped."""
    dropped = 0
    for table in (core_aten(), only_ours()):
        form = functionalize(program, numbers, set(range(len(numbers))), table)
        current = verify(form.program)
        random = [call.op for call in current.calls if call.random]
        for _, run in PASSES:
            after = verify(run(current))
            assert [call.op for call in after.calls if call.random] == random
            dropped += len(current.calls) - len(after.calls)
            current = after
        if random:
            continue
        values = [*given, *(torch.tensor(numbers[n.slot], dtype=n.spec.dtype) for n in current.numbers)]
        expected = run_functional(form.program, [value.clone() for value in values])
        actual = run_functional(current, [value.clone() for value in values])
        count = len(current.outputs)
        torch.testing.assert_close(actual[:count], expected[:count], rtol=0, atol=0, equal_nan=True)
        by_input = dict(zip([u.input for u in form.program.updates], expected[count:]))
        for update, value in zip(current.updates, actual[count:]):
            torch.testing.assert_close(value, by_input[update.input], rtol=0, atol=0, equal_nan=True)
    return dropped


def captured(step: Callable[[], Any]) -> tuple[Program, list[object]]:
    """What a step on tensors of the device records."""
    return record(lambda: step())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax(-1)),
    "convnet": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten()
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.TransformerEncoderLayer(3, 1, 8, dropout=0.0, batch_first=True), nn.Flatten()
    ),
    "norms": lambda: nn.Sequential(
        nn.LayerNorm(6), nn.SiLU(), nn.Unflatten(1, (2, 3)), nn.GroupNorm(1, 2), nn.Flatten()
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_passes_keep_the_values_of_training_steps(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    x = torch.rand(4, 6).to("ltc")

    def step() -> Tensor:
        loss = F.smooth_l1_loss(model(x), torch.zeros((), device="ltc").expand_as(model(x)))
        loss.backward()
        with torch_ltc.config.settings.scope(sync_after_optimizer=False):
            optimizer.step()
        return loss.detach()

    step()
    torch_ltc.sync(wait=True)
    program, numbers = captured(step)
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.rand(i.spec.size, generator=generator).to(i.spec.dtype)
        for i in functionalize(program, numbers, set(), core_aten()).program.inputs
    ]
    assert check_every_pass(program, numbers, given) > 0


def test_passes_keep_the_values_of_random_programs() -> None:
    dropped = 0
    for seed in range(25):
        leaves, _ = grow(seed, "cpu", read=False)

        def function(*given: Tensor, seed: int = seed) -> list[Tensor]:
            return [value.detach() for value in grow(seed, "ltc", read=False)[1]]

        program, numbers = record(function)
        functional_inputs = functionalize(program, numbers, set(), core_aten()).program.inputs
        sizes = {tuple(leaf.shape): leaf.detach() for leaf in leaves}
        given = [sizes.get(i.spec.size, torch.rand(i.spec.size)).to(i.spec.dtype) for i in functional_inputs]
        dropped += check_every_pass(program, numbers, given)
    assert dropped > 0


def test_calls_keep_their_lines() -> None:
    program = run_passes(functional(lambda x: x.sin().clone() + x.sin(), X))
    assert all(isinstance(call, Call) and call.source.file == __file__ for call in program.calls)


def symbolic(program: Program, *shapes: SymbolicShape) -> Program:
    """The program with these shapes of its first values, which look alike in the program that is compiled."""
    symbols = (Symbol("s0", 3, True), Symbol("s1", 3, True))
    return replace(program, symbols=symbols, symbolic_shapes=dict(enumerate(shapes)))


ROWS, COLUMNS = Size("s0", 3), Size("s1", 3)


def test_values_that_are_alike_for_some_symbols_only_stay_apart() -> None:
    plain = functional(lambda x: x.view(3, 3).exp(), torch.ones(3, 3))
    assert names(propagate_copies(plain)) == ["exp"]
    turned = symbolic(plain, SymbolicShape((ROWS, COLUMNS), (COLUMNS, 1)), SymbolicShape((COLUMNS, ROWS), (ROWS, 1)))
    assert names(propagate_copies(turned)) == ["view", "exp"]
    same = symbolic(plain, SymbolicShape((ROWS, COLUMNS), (COLUMNS, 1)), SymbolicShape((ROWS, COLUMNS), (COLUMNS, 1)))
    assert names(propagate_copies(same)) == ["exp"]


def test_a_known_number_is_filled_in_for_all_symbols() -> None:
    program = functional(lambda x: torch.full((3,), 2.0, device=x.device).clone() + x, torch.ones(3))
    made = {number: SymbolicShape((ROWS,), (1,)) for number in range(program.values)}
    after = fold_constants(replace(program, symbols=(Symbol("s0", 3, True),), symbolic_shapes=made))
    assert [call.args[0] for call in after.calls if call.name == "aten::full"][-1] == (ROWS,)
