"""What fails in code that many programs share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torch_ltc
from tests.semantics.promotion import Case, compare, floats
from tests.semantics.support import assert_same, observe
from tests.support.backends import SymbolicBackend, registered
from torch_ltc.config import settings
from torch_ltc.errors import BackendWarning

pytestmark = pytest.mark.usefixtures("nothing_known")


class Failing(SymbolicBackend):
    """Runs programs of one size only."""

    name = "failing"

    def compile(self, program: Any) -> Any:
        made = super().compile(program)
        bind = made.bind  # type: ignore[attr-defined]

        def bound(symbols: Any) -> Any:
            run = bind(symbols)

            def fail(*given: Any) -> Any:
                given[0].zero_()
                raise RuntimeError("not this size")

            return run if symbols["s0"] < 10 else fail

        made.bind = bound  # type: ignore[attr-defined]
        return made


def test_a_shared_computation_that_fails_for_one_size_goes_on_for_others() -> None:
    case = Case("in place", lambda n: [floats(n, 3)], lambda x, n: x.add_(1).mul_(2))
    with registered(Failing), settings.scope(backend="failing", tiers="blocking"):
        for value in (4, 5, 6):
            compare(case, value)
        with pytest.warns(BackendWarning, match="not this size"):
            compare(case, 12)
        with observe() as seen:
            compare(case, 12)
            compare(case, 7)
        assert [run.backend for run in seen.runs] == ["interpreter", "failing"]
        torch_ltc.sync(wait=True)


def test_a_wrong_index_in_a_shared_program_is_reported_as_ever(sharing: str) -> None:
    weight = floats(10, 3).to("ltc")
    for size in (4, 5, 6, 7):
        index = (torch.arange(size) % 10).to("ltc")
        torch_ltc.sync(wait=True)
        out = F.embedding(index, weight).exp()
        torch_ltc.sync(wait=True)
    index = torch.full((8,), 11).to("ltc")
    torch_ltc.sync(wait=True)
    out = F.embedding(index, weight).exp()
    with pytest.raises(Exception, match="index out of range"):
        out.cpu()
    index = torch.full((9,), 1).to("ltc")
    assert_same(F.embedding(index, weight).exp().cpu(), F.embedding(index.cpu(), weight.cpu()).exp())


def test_a_specialization_that_never_settles_goes_to_the_interpreter_with_one_warning() -> None:
    class Narrow(SymbolicBackend):
        name = "narrow"

        def compile(self, program: Any) -> Any:
            made = super().compile(program)
            made.guards = tuple(f"{symbol.name} == {symbol.hint}" for symbol in program.symbols)  # type: ignore[attr-defined]
            return made

    case = Case("size", lambda n: [floats(n, 3)], lambda x, n: x.exp())
    told = pytest.warns(BackendWarning, match="again and again: guard s0 == ")
    with registered(Narrow), settings.scope(backend="narrow", tiers="blocking"), observe() as seen, told as caught:
        for value in range(4, 40):
            compare(case, value)
    assert len(caught) == 1
    assert len(seen.compiles) == 8
