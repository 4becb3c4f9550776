"""Expressions over the sizes of a program as text: evaluated with integers, and with symbols again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_ltc.lowering.symbolic import SymbolicSizes
from torch_ltc.program.instruction import Size, Symbol
from torch_ltc.program.specialization import evaluated, evaluator

FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "product": (lambda n: 3 * n * n, lambda n: 3 * n * n),
    "quotient": (lambda n: n // 2, lambda n: n // 2),
    "remainder": (lambda n: n % 3, lambda n: n % 3),
    "largest": (lambda n: torch.sym_max(n, 6), lambda n: max(n, 6)),
    "smallest": (lambda n: torch.sym_min(n, 6), lambda n: min(n, 6)),
    "fraction": (lambda n: 1.0 / torch.sym_float(3 * n), lambda n: 1.0 / (3 * n)),
    "true division": (lambda n: n / 7, lambda n: n / 7),
    "root": (lambda n: torch._sym_sqrt(n), math.sqrt),
    "floor": (lambda n: math.floor(torch.sym_float(n) * 0.3), lambda n: math.floor(n * 0.3)),
    "ceiling": (lambda n: math.ceil(torch.sym_float(n) * 0.3), lambda n: math.ceil(n * 0.3)),
    "power": (lambda n: torch.sym_float(n) ** -0.5, lambda n: n**-0.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_text_of_an_expression_has_its_value_for_every_size(name: str) -> None:
    symbolic, plain = FUNCTIONS[name]
    sizes = SymbolicSizes([Symbol("s0", 5, True)])
    made = sizes.operand(symbolic(sizes.integers["s0"]))
    assert isinstance(made, Size)
    assert "torch" not in made.expression
    for size in (2, 5, 8, 31):
        assert evaluated(made.expression, {"s0": size}) == pytest.approx(plain(size), rel=1e-15)
        assert evaluator(("s0",), (made.expression,))(size) == (pytest.approx(plain(size), rel=1e-15),)
    again = SymbolicSizes([Symbol("s0", 8, True)])
    assert again.operand(again.integer(made)).expression == made.expression
