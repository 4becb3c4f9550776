"""Inputs that are saved before a run of compiled code, because it may fail after it has overwritten them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.support.backends import FunctionalBackend, record
from torch_ltc.lowering.functional_computation import CompiledPart, inputs_at_risk
from torch_ltc.lowering.lower import functional_form
from torch_ltc.lowering.partition import partition
from torch_ltc.program.instruction import Call
from torch_ltc.program.spec import Spec

X = torch.eye(3)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


class Checked(FunctionalBackend):
    """Checks indices before it writes anything."""

    name = "checked"

    def fails_midway(self, call: Call, specs: Mapping[int, Spec]) -> bool:
        return call.name != "aten::index_select" and super().fails_midway(call, specs)


def at_risk(backend: FunctionalBackend, function: Callable[..., Any], *inputs: Tensor) -> tuple[int, ...]:
    program, numbers = record(function, *inputs)
    functional = functional_form(backend, program, numbers, set())
    parts = partition(functional.program, backend.supports)
    return inputs_at_risk(backend, functional, [CompiledPart(part, None, "") for part in parts])


def counts_and_factors(count: Tensor, matrix: Tensor) -> Tensor:
    count.add_(1)
    return torch.linalg.cholesky_ex(matrix)[0]


def counts_by_factors(count: Tensor, matrix: Tensor) -> None:
    count.add_(torch.linalg.cholesky_ex(matrix)[0])


def counts_and_selects(count: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    count.add_(1)
    return rows.index_select(0, index)


def test_an_update_beside_a_call_that_may_fail_is_at_risk() -> None:
    assert at_risk(FunctionalBackend(), counts_and_factors, X, X) == (0,)


def test_an_update_that_needs_the_call_is_not() -> None:
    assert at_risk(FunctionalBackend(), counts_by_factors, X, X) == ()


def test_an_update_beside_a_call_that_is_checked_before_anything_is_written_is_not() -> None:
    index = torch.zeros(2, dtype=torch.int64)
    assert at_risk(FunctionalBackend(), counts_and_selects, X, X, index) == (0,)
    assert at_risk(Checked(), counts_and_selects, X, X, index) == ()


def test_an_update_before_a_later_part_that_may_fail_is_at_risk_even_if_that_is_checked() -> None:
    def step(count: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        count.add_(1)
        return rows.sin().index_select(0, index)

    backend = Checked()
    backend.refused_ops = {"aten::sin"}
    index = torch.zeros(2, dtype=torch.int64)
    assert at_risk(backend, lambda count, rows: (count.add_(1), (rows + 1).sin())[1], X, X) == ()
    assert at_risk(backend, lambda c, r, i: (c.add_(1), (r + 1).sin().index_select(0, i))[1], X, X, index) == (0,)
    backend.refused_ops = {"aten::index_select"}
    assert at_risk(backend, step, X, X, index) == (0,)


def test_inputs_that_no_part_updates_are_never_at_risk() -> None:
    # A call outside of the compiled part needs the old value of `count` after it: it is written when all has run.
    def step(count: Tensor, matrix: Tensor) -> Tensor:
        made = torch.atan2(torch.linalg.cholesky_ex(matrix)[0], count)
        count.add_(1)
        return made

    backend = FunctionalBackend()
    assert at_risk(backend, step, X, X) == (1,)
    backend.refused_ops = {"aten::atan2"}
    assert at_risk(backend, step, X, X) == ()


def test_a_backend_that_keeps_its_inputs_risks_only_what_a_later_part_may_spoil() -> None:
    backend = FunctionalBackend()
    backend.keeps_inputs = True
    assert at_risk(backend, counts_and_factors, X, X) == ()
    backend.refused_ops = {"aten::linalg_cholesky_ex"}
    assert at_risk(backend, lambda c, m: (c.add_(1), torch.linalg.cholesky_ex(m + 1)[0])[1], X, X) == (0,)
