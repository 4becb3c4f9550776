"""The difference of two programs, to the letter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

import torch_ltc
from torch_ltc.execute.pending import pending_program
from torch_ltc.program.difference import Listing, difference, difference_text
from torch_ltc.program.text import program_lines
from torch_ltc.source import UNKNOWN, Source


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def recorded(work: Callable[[], torch.Tensor | list[torch.Tensor]]) -> Listing:
    """The lines that this work records, without sources: they are another matter."""
    made = work()
    program = pending_program([made] if isinstance(made, torch.Tensor) else made)
    torch_ltc.sync(wait=True)
    return [(text, UNKNOWN) for text, _ in program_lines(program)]


def layers(rows: int = 2, scale: bool = False, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        x = torch.ones(rows, 3, dtype=dtype).to("ltc")
        weight = torch.ones(4, 3, dtype=dtype).to("ltc")
        hidden = F.linear(x, weight)
        if scale:
            hidden = hidden * 0.5
        return (hidden.relu() + 1).neg().sum()

    return work


def test_equal_programs_have_no_difference() -> None:
    assert difference_text(recorded(layers()), recorded(layers())) == "no difference in 7 lines\n"


def test_a_call_more_shifts_numbers_and_nothing_else() -> None:
    assert difference_text(recorded(layers()), recorded(layers(scale=True))) == (
        "2 lines differ: 1 changed (aten::relu), 1 added (aten::mul.Tensor)\n"
        "--- first\n"
        "+++ second\n"
        "@@ -1,7 +1,8 @@\n"
        "  %0: float32[2,3] = input(buffer=0)\n"
        "  %1: float32[4,3] = input(buffer=1)\n"
        "  %2: float32[2,4] = aten::linear(%0, %1, None)\n"
        "+ %3: float32[2,4] = aten::mul.Tensor(%2, $0:float)\n"
        "- %4: float32[2,4] = aten::relu(%2)\n"
        "+ %4: float32[2,4] = aten::relu(%3)\n"
        "  %5: float32[2,4] = aten::add.Tensor(%4, $1:int, alpha=1)\n"
        "  %6: float32[2,4] = aten::neg(%5)\n"
        "  %7: float32[] ROOT=0 = aten::sum(%6)\n"
    )


def test_a_call_less_is_named_by_its_number_in_the_first_program() -> None:
    assert difference_text(recorded(layers(scale=True)), recorded(layers()), context=1) == (
        "2 lines differ: 1 changed (aten::relu), 1 removed (aten::mul.Tensor)\n"
        "--- first\n"
        "+++ second\n"
        "@@ -3,4 +3,3 @@\n"
        "  %2: float32[2,4] = aten::linear(%0, %1, None)\n"
        "- %3': float32[2,4] = aten::mul.Tensor(%2, $0:float)\n"
        "- %3: float32[2,4] = aten::relu(%3')\n"
        "+ %3: float32[2,4] = aten::relu(%2)\n"
        "  %4: float32[2,4] = aten::add.Tensor(%3, $0:int, alpha=1)\n"
    )


def test_another_size_changes_every_line_that_has_it() -> None:
    assert difference_text(recorded(layers()), recorded(layers(rows=5)), ("program 1", "program 2"), context=0) == (
        "5 lines differ: 5 changed (input, aten::linear, aten::relu, aten::add.Tensor, 1 more)\n"
        "--- program 1\n"
        "+++ program 2\n"
        "@@ -1,1 +1,1 @@\n"
        "- %0: float32[2,3] = input(buffer=0)\n"
        "+ %0: float32[5,3] = input(buffer=0)\n"
        "@@ -3,4 +3,4 @@\n"
        "- %2: float32[2,4] = aten::linear(%0, %1, None)\n"
        "+ %2: float32[5,4] = aten::linear(%0, %1, None)\n"
        "- %3: float32[2,4] = aten::relu(%2)\n"
        "+ %3: float32[5,4] = aten::relu(%2)\n"
        "- %4: float32[2,4] = aten::add.Tensor(%3, $0:int, alpha=1)\n"
        "+ %4: float32[5,4] = aten::add.Tensor(%3, $0:int, alpha=1)\n"
        "- %5: float32[2,4] = aten::neg(%4)\n"
        "+ %5: float32[5,4] = aten::neg(%4)\n"
    )


def test_another_order_of_operands_is_a_difference() -> None:
    def forward() -> torch.Tensor:
        x, y = torch.ones(3).to("ltc"), torch.ones(3).to("ltc")
        return torch.atan2(x.sin(), y.sin())

    def reverse() -> torch.Tensor:
        x, y = torch.ones(3).to("ltc"), torch.ones(3).to("ltc")
        a, b = x.sin(), y.sin()
        return torch.atan2(b, a)

    found = difference(recorded(forward), recorded(reverse))
    assert (found.changed, found.removed, found.added) == (("aten::atan2",), (), ())


def test_whether_two_inputs_are_one_tensor_is_a_difference() -> None:
    def one() -> torch.Tensor:
        x = torch.ones(4).to("ltc")
        return torch.dot(x[:2], x[2:])

    lines = recorded(one)
    apart = [("%0: float32[2] = input(buffer=0)", UNKNOWN), ("%1: float32[2] = input(buffer=1)", UNKNOWN)]
    together = [("%0: float32[2] = input(buffer=3)", UNKNOWN), ("%1: float32[2] = input(buffer=3)", UNKNOWN)]
    assert difference(apart, together).changed == ("input",)
    assert difference(together, apart).changed == ("input",)
    assert difference(lines, lines).same


def test_results_that_are_held_are_a_difference_but_their_order_is_none() -> None:
    def work(held: slice) -> Callable[[], list[torch.Tensor]]:
        def made() -> list[torch.Tensor]:
            x = torch.ones(2).to("ltc")
            y = x.relu()
            return [y, y.neg()][held]

        return made

    both, last, reverse = (recorded(work(held)) for held in (slice(0, 2), slice(1, 2), slice(None, None, -1)))
    assert difference(both, reverse).same
    assert difference_text(both, last, context=0) == (
        "1 line differs: 1 changed (aten::relu)\n"
        "--- first\n"
        "+++ second\n"
        "@@ -2,1 +2,1 @@\n"
        "- %1: float32[2] ROOT=0 = aten::relu(%0)\n"
        "+ %1: float32[2] = aten::relu(%0)\n"
    )


def test_the_same_calls_at_other_lines_are_no_difference() -> None:
    here, there = Source("net.py", 3, "forward"), Source("net.py", 4, "forward")
    line = "%0: float32[2] = input(buffer=0)"
    first, second = [(line, here), (line.replace("0", "1"), here)], [(line, here), (line.replace("0", "1"), there)]
    assert difference_text(first, second) == "no difference in 2 lines; 1 line recorded elsewhere\n"


def test_changed_lines_show_where_they_were_recorded() -> None:
    here = Source("/home/me/net.py", 3, "forward", module="Net.act")
    text = difference_text([("%1: float32[2] = aten::relu(%0)", here)], [("%1: float32[2] = aten::gelu(%0)", UNKNOWN)])
    assert text.splitlines()[-2:] == [
        "- %1': float32[2] = aten::relu(%0')  # net.py:3 forward [Net.act]",
        "+ %1: float32[2] = aten::gelu(%0)",
    ]


def test_programs_are_named_by_their_identity() -> None:
    x = torch.ones(2).to("ltc")
    first = pending_program([x.relu()])
    torch_ltc.sync(wait=True)
    second = pending_program([F.gelu(x)])
    lines = difference_text(first, second).splitlines()
    assert lines[1:3] == [f"--- program {first.identity}", f"+++ program {second.identity}"]


def test_new_values_of_inputs_take_part() -> None:
    line = ("%0: float32[2] = input(buffer=0)", UNKNOWN)
    found = difference([line], [line, ("input 0 becomes %0", UNKNOWN)])
    assert found.added == ("new value of an input",)


def test_a_long_program_with_a_call_in_its_middle() -> None:
    count = 3000
    first = [(f"%{i + 1}: float32[2] = aten::relu(%{i})", UNKNOWN) for i in range(count)]
    second = [
        *first[: count // 2],
        (f"%{count // 2 + 1}: float32[2] = aten::neg(%{count // 2})", UNKNOWN),
        *((f"%{i + 2}: float32[2] = aten::relu(%{i + 1})", UNKNOWN) for i in range(count // 2, count)),
    ]
    found = difference(
        [("%0: float32[2] = input(buffer=0)", UNKNOWN), *first],
        [("%0: float32[2] = input(buffer=0)", UNKNOWN), *second],
    )
    assert (found.changed, found.removed, found.added) == (("aten::relu",), (), ("aten::neg",))
