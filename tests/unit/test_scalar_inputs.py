"""A number that changes from run to run is an input of the compiled program, with the results of eager."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.support.backends import FunctionalBackend, record, registered, run_functional
from torch_ltc.errors import CompileError
from torch_ltc.lowering import scalar_inputs as forms
from torch_ltc.lowering.decomposition_tables import core_aten, only_ours
from torch_ltc.lowering.functionalize import functionalize, scalar_slots
from torch_ltc.lowering.lower import same_number
from torch_ltc.lowering.number_ranges import all_hold, number_ranges
from torch_ltc.lowering.scalar_inputs import NUMBER_SPECS, tensor_form
from torch_ltc.program.verify import verify

aten, prims = torch.ops.aten, torch.ops.prims


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


FLOAT = torch.tensor([[1.5, -2.25, 0.5], [3.0, -0.75, 7.0]])
TENSORS = {
    "float32": FLOAT,
    "float64": FLOAT.double(),
    "bfloat16": FLOAT.bfloat16(),
    "complex64": torch.complex(FLOAT, FLOAT * 2),
    "int64": torch.tensor([[1, -2, 3], [5, 7, -8]]),
    "int32": torch.tensor([1, -2, 3, 8], dtype=torch.int32),
    "uint8": torch.tensor([1, 200, 7], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "float32 without dimensions": torch.tensor(2.5),
    "int64 without dimensions": torch.tensor(3),
    "transposed": FLOAT.t(),
    "empty": torch.zeros(0, 2),
}
# The number while recording, and the one with which the program runs.
NUMBERS = [(0.3, 1.7), (11, -3), (12, 300), (2.0, -0.0), (True, False)]

Function = Callable[[Tensor, Any], Any]


def in_place(name: str) -> Function:
    return lambda x, n: getattr(x.clone(), name)(n)


def foreach(name: str) -> Function:
    return lambda x, n: getattr(torch, f"_foreach_{name}")([x, x + x], n)


def foreach_lists(name: str) -> Function:
    return lambda x, n: getattr(torch, f"_foreach_{name}")([x, x + x], [n, 2 * n])


def foreach_in_place(name: str) -> Function:
    def run(x: Tensor, n: Any) -> list[Tensor]:
        written = [x.clone(), x + x]
        getattr(torch, f"_foreach_{name}_")(written, n)
        return written

    return run


_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "remainder", "fmod", "floor_divide", "pow", "clamp_min", "clamp_max")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "remainder_", "fmod_", "pow_", "eq_", "clamp_min_", "clamp_max_", "fill_")
_FOREACH = ("add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max", "maximum", "minimum")
FUNCTIONS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _ARITHMETIC + _COMPARISONS},
    **{name: in_place(name) for name in _IN_PLACE},
    **{f"foreach_{name}": foreach(name) for name in _FOREACH},
    **{f"foreach_{name} lists": foreach_lists(name) for name in _FOREACH},
    **{f"foreach_{name}_": foreach_in_place(name) for name in _FOREACH},
    "number minus tensor": lambda x, n: n - x,
    "number by tensor": lambda x, n: n / x,
    "number to the tensor": lambda x, n: n**x,
    "add with alpha": lambda x, n: torch.add(x, x, alpha=n),
    "sub with alpha": lambda x, n: torch.sub(x, x, alpha=n),
    "add two numbers": lambda x, n: torch.add(x, 2, alpha=n),
    "div floor": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "div trunc": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "clamp low": lambda x, n: torch.clamp(x, min=n),
    "clamp high": lambda x, n: torch.clamp(x, max=n),
    "clamp with a constant": lambda x, n: torch.clamp(x, min=-0.5, max=n),
    "clamp with another constant": lambda x, n: torch.clamp(x, n, 5),
    "fill": torch.fill,
    "full": lambda x, n: torch.full((2,), n, device=x.device),
    "full of a dtype": lambda x, n: torch.full((2,), n, dtype=x.dtype, device=x.device),
    "full_like": torch.full_like,
    "masked_fill": lambda x, n: x.masked_fill(x == 3, n),
    "masked_fill_": lambda x, n: x.clone().masked_fill_(x == 3, n),
    "where": lambda x, n: torch.where(x == 3, x, n),
    "where of two": lambda x, n: torch.where(x == 3, n, 1.0),
    "lerp": lambda x, n: torch.lerp(x, x + x, n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x + x, value=n),
    "foreach_lerp": lambda x, n: torch._foreach_lerp([x, x], [x + x, x], n),
    "foreach_addcmul": lambda x, n: torch._foreach_addcmul([x, x], [x + x, x], [x, x], n),
    "foreach_addcdiv": lambda x, n: torch._foreach_addcdiv([x, x], [x + x, x], [x, x], n),
    "foreach_addcdiv lists": lambda x, n: torch._foreach_addcdiv([x, x], [x + x, x], [x, x], [n, 2 * n]),
    "foreach_add with alpha": lambda x, n: torch._foreach_add([x, x], [x + x, x], alpha=n),
    "foreach number to the tensor": lambda x, n: torch._foreach_pow(n, [x, x]),
}
# Calls of integers and truth values with a number of a wider type have no form with tensors: the interpreter runs them.
NO_FORM = {"addcmul", "foreach_addcmul", "add with alpha", "sub with alpha", "foreach_add with alpha"}


def as_list(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


class Unconvertible(Exception):
    """The program is left to PyTorch's kernels: they check the number."""


def with_other_number(function: Function, x: Tensor, before: Any, after: Any, table: Any) -> list[Tensor] | None:
    """What the program recorded with one number gives with another; None when the number became a constant."""
    program, numbers = record(lambda x: function(x, before), x)
    others = {(type(n), n): other for n, other in ((2 * before, 2 * after), (before, after))}
    slots = {slot: others[type(n), n] for slot, n in enumerate(numbers) if (type(n), n) in others}
    if not all_hold(number_ranges(program), [slots.get(slot, number) for slot, number in enumerate(numbers)]):
        raise Unconvertible
    form = functionalize(program, numbers, set(slots), table)
    if any(slot in slots for slot, _ in form.fixed):
        return None
    verify(form.program)
    assert {number.slot for number in form.program.numbers} == set(slots)
    given = [x.clone() for _ in form.parameters]
    given += [torch.tensor(slots[number.slot], dtype=number.spec.dtype) for number in form.program.numbers]
    return run_functional(form.program, given)[: len(form.program.outputs)]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_with_another_number_give_what_eager_gives(name: str) -> None:
    function = FUNCTIONS[name]
    compared = 0
    for dtype, x in TENSORS.items():
        for before, after in NUMBERS:
            if isinstance(before, bool) and "pow" in name:
                # Powers of truth values are truth values on CPU, and integers elsewhere.
                continue
            try:
                function(x, before)
                expected = as_list(function(x, after))
            except (RuntimeError, IndexError):
                continue
            for table in (core_aten(), only_ours()) if dtype == "float32" else (core_aten(),):
                try:
                    actual = with_other_number(function, x, before, after, table)
                except Unconvertible:
                    continue
                except CompileError:
                    assert name in NO_FORM, (dtype, before)
                    continue
                assert actual is not None, f"{name} takes a varying number as a constant"
                for ours, theirs in zip(actual, expected, strict=True):
                    torch.testing.assert_close(
                        ours, theirs, equal_nan=True, msg=lambda m, at=(dtype, after): f"{at}: {m}"
                    )
                    if theirs.is_floating_point():
                        assert torch.equal(ours == 0, theirs == 0)
                compared += 1
    assert compared >= 4


@pytest.mark.parametrize("function", [FUNCTIONS["fill_"], FUNCTIONS["masked_fill"], FUNCTIONS["full of a dtype"]])
def test_integers_are_filled_with_floats_without_a_detour_over_float32(function: Function) -> None:
    x = torch.tensor([3, 5])
    actual = with_other_number(function, x, 2.0, 123456789.0, core_aten())
    assert actual is not None
    assert torch.equal(actual[0], function(x, 123456789.0))


@pytest.mark.parametrize("number", [2**60 + 1, -(2**62)])
def test_large_integers_keep_every_bit(number: int) -> None:
    x = torch.tensor([3, -5])
    for function in (torch.add, torch.clamp_min, torch.mul):
        actual = with_other_number(function, x, 7, number, core_aten())
        assert actual is not None
        assert torch.equal(actual[0], function(x, number))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e-45, 1e300])
def test_numbers_at_the_edges(number: float) -> None:
    for name in ("add", "mul", "div", "clamp low", "fill_", "masked_fill", "lerp"):
        try:
            expected = FUNCTIONS[name](FLOAT, number)
        except RuntimeError:
            with pytest.raises(Unconvertible):
                with_other_number(FUNCTIONS[name], FLOAT, 0.5, number, core_aten())
            continue
        try:
            actual = with_other_number(FUNCTIONS[name], FLOAT, 0.5, number, core_aten())
        except Unconvertible:
            assert number == 1e300 or (number != number and name == "clamp low")
            continue
        assert actual is not None
        torch.testing.assert_close(actual[0], expected, equal_nan=True)


_EDGES = (11, -3, 255, 300, 2**40, -(2**40), 1.5, 1e10, 1e30, float("inf"), float("nan"))


@pytest.mark.filterwarnings("ignore::torch_ltc.errors.BackendWarning")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        "clamp_min",
        "clamp high",
        "foreach_maximum",
        "foreach_minimum",
        "fill_",
        "full of a dtype",
        "masked_fill",
        "where",
        "add with alpha",
        "pow",
    ],
)
def test_numbers_that_a_dtype_cannot_hold_do_what_they_do_in_eager(name: str, dtype: torch.dtype) -> None:
    function, x = FUNCTIONS[name], torch.tensor([1, 100, 7]).to(dtype)
    backend = FunctionalBackend()
    with registered(backend), torch_ltc.config.settings.scope(backend=backend.name, hot_after=2):
        for number in (10, 12, 14, *_EDGES):
            expected = outcome_of(function, x, number)
            assert outcome_of(function, x.to("ltc"), number) == expected, number
        assert backend.runs


def outcome_of(function: Function, x: Tensor, number: Any) -> Any:
    """The values that a call gives, or that it raises."""
    try:
        return [(made.dtype, repr(made.tolist())) for made in as_list(function(x, number))]
    except RuntimeError:
        return "raises"


@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
@pytest.mark.parametrize(("beta", "alpha"), [(0.25, 3.5), (0.0, 2.0), (1.0, 0.0)])
def test_matrix_products_with_factors(name: str, beta: float, alpha: float) -> None:
    lead = (2,) if name == "baddbmm" else ()
    bias, first, second = torch.full((*lead, 2, 4), float("nan")), torch.rand(*lead, 2, 3), torch.rand(*lead, 3, 4)
    bias = torch.rand_like(bias) if beta else bias

    def function(bias: Tensor, first: Tensor, second: Tensor, beta: float, alpha: float) -> Tensor:
        made: Tensor = getattr(torch, name)(bias, first, second, beta=beta, alpha=alpha)
        return made

    program, numbers = record(lambda *given: function(*given, 0.5, 1.5), bias, first, second)
    form = functionalize(program, numbers, set(range(len(numbers))), core_aten())
    new = {0.5: beta, 1.5: alpha}
    if any(slot not in {n.slot for n in form.program.numbers} for slot in range(len(numbers))):
        pytest.skip("the factors are constants: another value is another program")
    given = [torch.tensor(new[numbers[n.slot]], dtype=n.spec.dtype) for n in form.program.numbers]  # type: ignore[index]
    (result,) = run_functional(form.program, [bias, first, second, *given])
    torch.testing.assert_close(result, function(bias, first, second, beta, alpha))


def overloads() -> Iterator[Any]:
    """Every operator of PyTorch's own, in every overload."""
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            yield getattr(packet, overload)


def test_every_entry_of_the_table_is_the_form_of_an_operator_that_takes_a_number() -> None:
    named = {op._schema.name.removeprefix("aten::") for op in overloads() if tensor_form(op) is not None}
    exact = {op.name().removeprefix("aten::") for op in overloads() if tensor_form(op) is not None}
    for key in forms._FORMS:
        assert key in named | exact, f"no operator has the form {key}"
    assert {"add", "add_", "_foreach_mul_", "clamp"} <= named


def test_a_form_takes_the_arguments_of_its_operator() -> None:
    for op in (aten.add.Tensor, aten.add_.Tensor, aten.clamp.default, aten.pow.Tensor_Scalar, aten.pow_.Scalar):
        form = tensor_form(op)
        assert form is not None
        wanted = len(op._schema.arguments)
        parameters = inspect.signature(form).parameters.values()
        assert any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(parameters) == wanted


@pytest.mark.parametrize(
    "op", [aten.leaky_relu.default, aten.add.out, aten.dropout.default, torch.ops.prims.add.default]
)
def test_operators_without_a_form(op: Any) -> None:
    assert tensor_form(op) is None


def test_slots_of_a_call_are_found_in_lists_and_keywords() -> None:
    program, numbers = record(lambda x: torch._foreach_mul([x, x], [2.0, 3.0])[0], FLOAT)
    assert numbers == [2.0, 3.0]
    assert [slot for call in program.calls for slot in scalar_slots(call)] == [0, 1]
    program, numbers = record(lambda x: torch.add(x, x, alpha=3), FLOAT)
    assert [slot for call in program.calls for slot in scalar_slots(call)] == [0]


def test_numbers_are_the_widest_of_their_kind_without_dimensions() -> None:
    specs = {kind: repr(spec) for kind, spec in NUMBER_SPECS.items()}
    assert specs == {float: "float64[]", int: "int64[]", bool: "bool[]"}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (True, 1, False),
        (0.0, -0.0, False),
        (-0.0, -0.0, True),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (1.5, 1.5, True),
        (1j, 1j, True),
        (2, 3, False),
    ],
)
def test_numbers_are_the_same_in_type_and_bits(first: object, second: object, same: bool) -> None:
    assert same_number(first, second) is same
