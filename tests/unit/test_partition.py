"""Splitting a functional program into parts for a backend and calls that PyTorch's kernels run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torch_ltc
from tests.support.backends import CPU, FunctionalBackend, record
from torch_ltc.errors import UnsupportedCallError
from torch_ltc.lowering.interface import Arguments, Backend
from torch_ltc.lowering.lower import functional_form, lower
from torch_ltc.lowering.partition import Part, partition
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.verify import verify


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def functional(function: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    program, numbers = record(function, *inputs)
    return functional_form(FunctionalBackend(), program, numbers, set()).program


def without(*names: str) -> Callable[[Call], bool]:
    """Supports everything but these operators."""
    return lambda call: call.name not in {f"aten::{name}" for name in names}


def shape(parts: list[Part]) -> list[str]:
    """What each part is: the name of a direct call, or the names of the calls that the backend gets."""
    names = [[call.name.removeprefix("aten::") for call in part.program.calls] for part in parts]
    return [
        f"!{part.direct.name.removeprefix('aten::')}" if part.direct is not None else " ".join(calls)
        for part, calls in zip(parts, names, strict=True)
    ]


def test_a_program_that_is_supported_whole_is_one_part() -> None:
    program = functional(lambda x: (x.sin().cos() @ x, x.exp()), torch.rand(2, 2))
    (part,) = partition(program, without())
    assert part.direct is None
    assert verify(part.program).calls == program.calls
    assert len(part.program.results) == 2


def test_an_unsupported_call_in_the_middle_gives_three_parts() -> None:
    program = functional(lambda x: x.sin().cos().exp(), torch.rand(2))
    assert shape(partition(program, without("cos"))) == ["sin", "!cos", "exp"]


def test_unsupported_calls_at_the_ends_and_alone() -> None:
    program = functional(lambda x: x.sin().cos(), torch.rand(2))
    assert shape(partition(program, without("sin"))) == ["!sin", "cos"]
    assert shape(partition(program, without("cos"))) == ["sin", "!cos"]
    assert shape(partition(program, without("sin", "cos"))) == ["!sin", "!cos"]


def test_an_unsupported_call_beside_the_rest_does_not_split_it() -> None:
    def function(x: torch.Tensor) -> Any:
        first = x.sin()
        apart = x.cos()
        return first.exp(), apart.tanh()

    program = functional(function, torch.rand(2))
    assert shape(partition(program, without("cos"))) == ["!cos", "sin exp tanh"]


def test_independent_unsupported_calls_of_one_depth_share_one_gap() -> None:
    def function(x: torch.Tensor) -> Any:
        a, b, c = x.sin(), x.exp(), x.tanh()
        return a.cos().abs(), b.cos().sqrt(), c.cos().neg()

    program = functional(function, torch.rand(2))
    parts = shape(partition(program, without("cos")))
    assert parts == ["sin exp tanh", "!cos", "!cos", "!cos", "abs sqrt neg"]


def test_a_chain_has_as_many_gaps_as_it_must() -> None:
    program = functional(lambda x: x.sin().cos().sin().cos().sin(), torch.rand(2))
    assert shape(partition(program, without("cos"))) == ["sin", "!cos", "sin", "!cos", "sin"]


def test_random_calls_reach_no_backend_and_keep_their_order() -> None:
    def function(x: torch.Tensor) -> Any:
        late = torch.bernoulli(x.sin())
        early = torch.rand_like(x)
        return late + early, torch.randn_like(x)

    program = functional(function, torch.rand(3))
    parts = partition(program, lambda call: not call.random)
    drawn = [part.direct for part in parts if part.direct is not None and part.direct.random]
    assert [call.op for call in drawn] == [call.op for call in program.calls if call.random]
    assert next(call.name.split("::")[1].split(".")[0] for call in drawn) == "bernoulli"
    assert not any(call.random for part in parts if part.direct is None for call in part.program.calls)
    assert not any(part.program.random for part in parts if part.direct is None)


def test_draws_that_need_no_value_come_first_and_leave_one_part() -> None:
    def function(x: torch.Tensor) -> Any:
        for _ in range(3):
            x = F.dropout(x.sin(), 0.5)
        return x

    parts = partition(functional(function, torch.rand(3)), without())
    kinds = ["direct" if part.direct is not None else "part" for part in parts]
    assert kinds.count("part") == 1
    assert kinds[-1] == "part"


def test_dead_values_are_named_after_their_last_use() -> None:
    program = functional(lambda x: (x.sin().cos().exp(), x.tanh()), torch.rand(2))
    parts = partition(program, without("cos"))
    assert shape(parts) == ["sin tanh", "!cos", "exp"]
    sin, cos = (call.numbers[0] for call in program.calls if call.name in ("aten::sin", "aten::cos"))
    (given,) = (instruction.number for instruction in program.inputs)
    assert [part.dead for part in parts] == [(given,), (sin,), (cos,)]


def test_results_never_die() -> None:
    program = functional(lambda x: (lambda y: (y, y.cos().exp()))(x.sin()), torch.rand(2))
    results = set(program.results)
    assert all(results.isdisjoint(part.dead) for part in partition(program, without("cos")))


@pytest.mark.parametrize("missing", [(), ("sin",), ("cos",), ("mm",), ("sin", "mm"), ("add.Tensor",)])
def test_every_part_is_well_formed_and_each_call_is_in_one_place(missing: tuple[str, ...]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        h = (x.sin() @ y).cos() + torch.rand_like(x)
        y.add_(h)
        x.copy_(h.sin())
        return h.sum(), F.dropout(h, 0.3) @ y

    program = functional(function, torch.rand(2, 2), torch.rand(2, 2))
    parts = partition(program, without(*missing))
    seen: list[Call] = []
    for part in parts:
        if part.direct is not None:
            seen.append(part.direct)
        else:
            verify(part.program)
            seen.extend(part.program.calls)
    assert len(seen) == len(program.calls)
    assert set(seen) == set(program.calls)


def test_a_part_may_overwrite_an_input_only_where_nothing_later_needs_it() -> None:
    def needed_later(x: torch.Tensor) -> Any:
        later = x.sin().cos()
        before = x * later
        x.add_(1)
        return before.cos()

    program = functional(needed_later, torch.rand(2))
    first, *_, last = [part for part in partition(program, without("cos")) if part.direct is None]
    assert first.program.updates == ()
    assert len(program.updates) == 1
    everything = [number for part in (first, last) for number in part.program.results]
    assert program.updates[0].number in everything


def test_an_input_whose_new_value_is_made_here_is_updated_here() -> None:
    program = functional(lambda x: x.add_(1).sin().cos(), torch.rand(2))
    first, _, *_ = partition(program, without("cos"))
    assert [(update.input, update.number) for update in first.program.updates] == [(0, program.updates[0].number)]
    assert first.program.donated == (0,)


def test_memory_for_a_direct_call_alone_is_made_directly() -> None:
    program = functional(lambda x: x + torch.rand_like(x), torch.rand(2))
    parts = shape(partition(program, without()))
    assert len([part for part in parts if not part.startswith("!")]) == 1


# ---- parts at run time


@pytest.mark.parametrize("missing", [set(), {"aten::sin"}, {"aten::cos", "aten::mm"}, {"aten::add.Tensor", "aten::mm"}])
def test_results_and_random_numbers_do_not_depend_on_the_parts(missing: set[str]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        late = torch.bernoulli(x.sin().abs())
        h = (x.cos() @ y) + torch.rand_like(x)
        y.add_(h)
        return late * h, F.dropout(h.sin() @ y, 0.5)

    x, y = torch.rand(3, 3), torch.rand(3, 3)
    program, numbers = record(function, x, y)
    torch.manual_seed(3)
    own = y.clone()
    expected = function(x, own)
    backend = FunctionalBackend()
    backend.refused_ops = missing
    computation = lower(backend, program, numbers, set(), strict=False).computation
    generator = torch.Generator().manual_seed(3)
    outcome = computation.run(Arguments([x, y], numbers, generator, CPU))
    for result, right in zip(outcome.results, expected, strict=True):
        torch.testing.assert_close(result, right)
    torch.testing.assert_close(y, own)


def test_a_missing_rule_is_noted_with_operator_and_line() -> None:
    program, numbers = record(lambda x: x.sin().cos().sin(), torch.rand(2))
    backend = FunctionalBackend()
    backend.refused_ops = {"aten::cos"}
    note = lower(backend, program, numbers, set(), strict=False).note
    assert note.startswith(f"functional has no rule for aten::cos ({__file__}:")
    assert note.endswith("\n  PyTorch's kernels run them instead")
    with pytest.raises(UnsupportedCallError, match="functional has no rule for aten::cos") as caught:
        lower(backend, program, numbers, set(), strict=True)
    assert caught.value.source is not None
    assert caught.value.source.startswith(f"{__file__}:")


def test_a_note_names_at_most_five_operators_once_each() -> None:
    def function(x: torch.Tensor) -> Any:
        return x.sin().cos().exp().tanh().abs().sqrt().sin().floor()

    program, numbers = record(function, torch.rand(2))

    class Nothing(FunctionalBackend):
        def supports(self, call: Call) -> bool:
            return False

    backend: Backend = Nothing()
    note = lower(backend, program, numbers, set(), strict=False).note.splitlines()[0]
    assert note.count("aten::") == 5
    assert note.count("aten::sin ") == 1
    assert note.endswith(" and 2 more")


def test_a_supported_program_has_no_note() -> None:
    program, numbers = record(lambda x: F.dropout(x, 0.5), torch.rand(2))
    assert lower(FunctionalBackend(), program, numbers, set(), strict=True).note == ""
