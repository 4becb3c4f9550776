"""Skeletons: what programs have in common, where they differ, and expressions in those places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.support.backends import record
from torch_ltc.program.instruction import Program, Return, ReturnKind, Size, Symbol, SymbolicShape
from torch_ltc.program.specialization import (
    Specialization,
    evaluated,
    evaluator,
    known_sizes,
    separate_symbols,
    shared_symbols,
)
from torch_ltc.program.symbolic_key import (
    addresses_storage,
    input_slots,
    length_slots,
    slot_texts,
    specialize,
    symbolic_key,
    symbolic_key_text,
)
from torch_ltc.program.text import program_text


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def recorded(function: Callable[..., Any], *inputs: Tensor) -> Program:
    program, _ = record(function, *inputs)
    return program


def keys(first: Callable[..., Any], second: Callable[..., Any], *inputs: Tensor) -> tuple[object, object]:
    return symbolic_key(recorded(first, *inputs))[0], symbolic_key(recorded(second, *inputs))[0]


def test_sizes_strides_and_offsets_of_inputs_are_slots() -> None:
    small, large = (recorded(lambda x: x.exp(), torch.ones(n, 3)) for n in (2, 5))
    assert symbolic_key(small)[0] == symbolic_key(large)[0]
    assert symbolic_key(small)[1] == (2, 3, 3, 1, 0)
    assert symbolic_key(large)[1] == (5, 3, 3, 1, 0)


def test_sizes_offsets_and_indices_of_calls_are_slots_and_dimensions_are_not() -> None:
    x = torch.ones(6, 4)
    first, second = keys(lambda x: x[1:3].view(8), lambda x: x[2:4].view(8), x)
    assert first == second
    first, second = keys(lambda x: x.narrow(0, 0, 2), lambda x: x.narrow(1, 0, 2), x)
    assert first != second
    first, second = keys(lambda x: x.select(0, 1), lambda x: x.select(0, 3), x)
    assert first == second


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x.sin(), lambda x: x.cos()),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
        (lambda x: x.to(torch.float64), lambda x: x.to(torch.int32)),
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: (x + x).sin(), lambda x: (x + x, (x + x).sin())[1]),
        (lambda x: x.view(6), lambda x: x.view(3, 2)),
        (lambda x: x.split(1), lambda x: x.split(2)),
        (lambda x: torch.arange(3, device=x.device) + x, lambda x: torch.arange(3.0, device=x.device) + x),
        (lambda x: x.add(x), lambda x: x.add_(x)),
    ],
)
def test_programs_that_differ_in_more_have_other_skeletons(first: Any, second: Any) -> None:
    one, other = keys(first, second, torch.ones(2, 3))
    assert one != other


def test_inputs_that_share_a_buffer_are_part_of_the_skeleton() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert symbolic_key(recorded(lambda a, b: a + b, x, y))[0] != symbolic_key(recorded(lambda a: a + a, x))[0]


def test_whether_a_call_returns_a_view_is_part_of_the_skeleton() -> None:
    program = recorded(lambda x: x.view(6), torch.ones(2, 3))
    call = program.calls[0]
    returned = call.returns[0]
    assert isinstance(returned, Return)
    fresh = replace(call, returns=(Return(ReturnKind.FRESH, returned.spec, group=0),))
    other = replace(program, instructions=(*program.instructions[:1], fresh))
    assert symbolic_key(other)[0] != symbolic_key(program)[0]


def test_the_text_of_a_skeleton_is_the_same_in_every_process() -> None:
    """Operators by name: their numbers are those of the order in which a process meets them."""
    program = recorded(lambda x: (x[1:3].view(8) * 2).sum(0), torch.ones(6, 4))
    integer = "<class 'int'>"
    assert symbolic_key_text(program).splitlines() == [
        *("(4,)", "device(type='cpu')", "1"),
        *("'input'", "0", "torch.float32", "2", "False", "False"),
        *("'aten::slice.Tensor'", "0", f"({integer}, 0)", integer, integer, integer, "('VIEW', 0, 'None')"),
        *("'aten::view'", "1", "1", "('VIEW', 0, 'None')"),
        *("'aten::mul.Tensor'", "2", integer, "0"),
        *("'aten::sum.dim_IntList'", "3", f"(({integer}, 0),)", "(<class 'bool'>, False)", "None", "0"),
    ]


def test_a_slot_is_named_with_its_line() -> None:
    program = recorded(lambda x: x[1:3].exp(), torch.ones(6, 4))
    texts = slot_texts(program, range(len(symbolic_key(program)[1])))
    assert texts[0].startswith("size 0 of input 0 (used by aten::slice.Tensor at ")
    assert texts[3].startswith("stride 1 of input 0")
    assert texts[4].startswith("offset of input 0")
    assert texts[5].startswith("start of aten::slice.Tensor at ")
    assert texts[6].startswith("end of aten::slice.Tensor at ")
    assert "test_symbolic_key.py" in texts[5]
    assert input_slots(program)[:6] == [True] * 5 + [False]
    assert length_slots(program)[:6] == [True] * 4 + [False] * 2


def test_expressions_stand_in_the_slots() -> None:
    program = recorded(lambda x: x.view(8).exp(), torch.ones(2, 4))
    assert symbolic_key(program)[1] == (2, 4, 4, 1, 0, 8)
    sizes = Specialization(("s0", 4, 4, 1, 0, "4*(s0)"), (Symbol("s0", 2, True),), (0,))
    made = specialize(program, sizes)
    assert made.symbols == sizes.symbols
    assert made.symbolic_shapes == {0: SymbolicShape((Size("s0", 2), 4), (4, 1), 0)}
    assert made.calls[0].args[1] == (Size("4*(s0)", 8),)
    assert "aten::view(%0, [4*(s0)])" in program_text(made)
    assert specialize(program, Specialization((2, 4, 4, 1, 0, 8))) is program


def test_calls_on_the_memory_of_results_are_found() -> None:
    x = torch.ones(4, 4)
    strided = recorded(lambda x: (x * 2).as_strided((2,), (1,)), x)
    reshaped = recorded(lambda x: torch.ops.aten._reshape_alias(x * 2, (x.numel(),), (1,)), x)
    for as_recorded in (True, False):
        found = addresses_storage(strided, as_recorded)
        assert found is not None
        assert found.name == "aten::as_strided"
        assert addresses_storage(recorded(lambda x: x.as_strided((2,), (1,)) * 2, x), as_recorded) is None
        assert addresses_storage(recorded(lambda x: x.t().as_strided((2,), (1,)) * 2, x), as_recorded) is None
    assert addresses_storage(reshaped, recorded=True) is not None
    assert addresses_storage(reshaped, recorded=False) is None


# ---- which integers become symbols ----------------------------------------------------------------------------------


def test_integers_that_never_differ_are_constants() -> None:
    assert shared_symbols([(3, 4), (3, 4)], [True, True]) == Specialization((3, 4))
    assert separate_symbols([(3, 4), (3, 4)], [True, False]) == Specialization((None, 4))


def test_integers_that_are_always_equal_are_one_symbol() -> None:
    sizes = shared_symbols([(3, 3, 7), (5, 5, 9), (6, 6, 6)], [False, True, True])
    assert sizes.slots == ("s0", "s0", "s1")
    assert sizes.symbols == (Symbol("s0", 6, True), Symbol("s1", 6, True))
    assert sizes.places == (0, 2)
    assert not sizes.mismatches((8, 8, 2))
    assert sizes.mismatches((8, 9, 2)) == [1]


def test_multiples_sums_and_products_are_expressions() -> None:
    seen = [(3, 2, 12, 4, 6, 30), (5, 7, 20, 6, 35, 175), (4, 9, 16, 5, 36, 180)]
    sizes = shared_symbols(seen, [True] * 6)
    assert sizes.slots == ("s0", "s1", "4*(s0)", "s0 + 1", "1*(s0)*(s1)", "5*(1*(s0)*(s1))")
    assert not sizes.mismatches((2, 3, 8, 3, 6, 30))
    assert sizes.mismatches((2, 3, 8, 3, 7, 30)) == [4]


def test_a_negative_distance_and_negative_values() -> None:
    sizes = shared_symbols([(5, 2, -1), (6, 3, -4), (9, 6, -2)], [True, True, False])
    assert sizes.slots == ("s0", "s0 - 3", "s1")
    assert sizes.symbols[1] == Symbol("s1", -2, False)


def test_recorded_programs_get_a_symbol_for_each_integer() -> None:
    sizes = separate_symbols([(3, 3, 3), (5, 5, 3)], [True, False, False])
    assert sizes.slots == (None, "s0", 3)
    assert not sizes.mismatches((7, 8, 3))
    assert sizes.mismatches((7, 8, 4)) == [2]
    assert sizes.values_of((7, 8, 3)) == (8,)


def test_expressions_have_values() -> None:
    assert evaluator(("s0", "s1"), ("s0*s1", "max(s0, 7)", "s0//2"))(5, 3) == (15, 7, 2)
    assert evaluated("min(s0, 2) % 2", {"s0": 9}) == 0
    assert known_sizes((4, Size("s0 - 1", 3)), {"s0": 8}) == (4, 7)
    assert -Size("s0", 3) * 2 + 1 == Size("((-(s0))*(2)) + (1)", -5)
    assert evaluated((Size("s0", 3) - 1).expression, {"s0": 8}) == 7
