"""What a backend returns is checked, laid out as recorded, and given memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_ltc
from tests.support.backends import CPU, FunctionalBackend, Misbehaving, record, run_functional
from torch_ltc.errors import ExecutionError
from torch_ltc.lowering.backend_data import BackendData
from torch_ltc.lowering.interface import Arguments, Form, Outcome
from torch_ltc.lowering.lower import lower
from torch_ltc.lowering.result_checks import WrongResultError, check_count, check_result, fitted
from torch_ltc.program.instruction import Program
from torch_ltc.program.spec import make_spec, spec_of


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


@pytest.fixture
def program() -> Program:
    return record(lambda x: x @ x, torch.zeros(2, 2))[0]


def test_results_are_a_list_of_the_right_length(program: Program) -> None:
    tensor = torch.zeros(2, 2)
    assert check_count("b", program, [tensor], 1) == [tensor]
    assert check_count("b", program, (tensor,), 1) == [tensor]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "b returned 0 results for program .*, which has 1\n  try: return one result per number"),
        ([1, 2], "b returned 2 results for program .*, which has 1"),
        (None, "b returned NoneType for program .*, not a sequence of results\n  try: return a list"),
        (torch.zeros(1, 2, 2), "b returned Tensor for program"),
        ({"out": 1}, "b returned dict for program"),
        (iter([1]), "b returned list_iterator for program"),
    ],
)
def test_another_count_or_no_sequence_is_refused(program: Program, results: Any, message: str) -> None:
    with pytest.raises(WrongResultError, match=message):
        check_count("b", program, results, 1)


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (torch.zeros(2, 3), "float32[2, 3]"),
        (torch.zeros(4), "float32[4]"),
        (torch.zeros(2, 2, dtype=torch.float64), "float64[2, 2]"),
        (None, "NoneType"),
        (3.5, "float"),
        ([torch.zeros(2, 2)], "list"),
        (BackendData.from_tensor(torch.zeros(2)), "float32[2]"),
        (BackendData.from_tensor(torch.zeros(2, 2, dtype=torch.int32)), "int32[2, 2]"),
    ],
)
def test_another_dtype_or_shape_is_refused_with_the_call_and_its_line(program: Program, result: Any, got: str) -> None:
    (number,) = program.outputs
    with pytest.raises(WrongResultError) as caught:
        check_result("b", program, number, result, make_spec(torch.float32, (2, 2), (2, 1)))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"b returned {got} for %{number} of program {program.identity}, the result of aten::mm, "
        "where float32[2,2] was recorded"
    )
    assert lines[1].startswith(f"  recorded at {__file__}:")


@pytest.mark.parametrize("device", ["meta", "ltc"])
def test_a_result_on_another_device_is_refused(program: Program, device: str) -> None:
    result = torch.zeros(2, 2, device=device)
    with pytest.raises(WrongResultError, match=device):
        check_result("b", program, program.outputs[0], result, make_spec(torch.float32, (2, 2), (2, 1)))
    torch_ltc.sync(wait=True)


def test_right_results_pass(program: Program) -> None:
    spec = make_spec(torch.float32, (2, 2), (2, 1))
    for result in (torch.zeros(2, 2), torch.zeros(2, 2).t(), BackendData.from_tensor(torch.zeros(2, 2))):
        check_result("b", program, program.outputs[0], result, spec)
    check_result("b", program, program.outputs[0], ExecutionError("lost"), spec)


SPECS = [
    make_spec(torch.float32, (2, 3), (3, 1)),
    make_spec(torch.float32, (2, 3), (1, 2)),
    make_spec(torch.float32, (2, 3), (6, 2)),
    make_spec(torch.float32, (2, 3), (3, 1), 4),
    make_spec(torch.float32, (0, 3), (3, 1)),
    make_spec(torch.float32, (1, 1), (7, 5)),
    make_spec(torch.float32, (), ()),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "offset", "handle"])
def test_a_result_is_laid_out_as_recorded(spec: Any, kind: str) -> None:
    values = torch.arange(float(spec.numel)).view(spec.size)
    result: Any = values
    if kind == "transposed" and values.dim() == 2:
        result = values.t().contiguous().t()
    elif kind == "offset":
        result = torch.cat([torch.zeros(2), values.flatten()])[2:].view(spec.size)
    elif kind == "handle":
        result = BackendData.from_tensor(values)
    made = fitted(result, spec)
    tensor = made.tensor() if isinstance(made, BackendData) else made
    assert spec_of(tensor) is spec
    assert torch.equal(tensor, values)


def test_a_result_laid_out_as_recorded_is_not_copied() -> None:
    tensor = torch.zeros(2, 3)
    data = BackendData.from_tensor(tensor)
    assert fitted(tensor, spec_of(tensor)) is tensor
    assert fitted(data, spec_of(tensor)) is data


def test_conjugate_and_negative_bits_are_resolved() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    for result in (values.conj(), torch._neg_view(values)):
        made = fitted(result, make_spec(torch.complex64, (2,), (1,)))
        assert isinstance(made, torch.Tensor)
        assert not made.is_conj()
        assert not made.is_neg()
        assert torch.equal(made, result)


# ---- memory


def run(function: Any, *inputs: torch.Tensor, behaviour: Any = None, replaceable: bool = True) -> Outcome:
    """The outcome of a recorded function on a functional backend that behaves like this."""
    program, numbers = record(function, *inputs)
    backend = FunctionalBackend() if behaviour is None else Misbehaving("odd", Form.FUNCTIONAL, behaviour)
    computation = lower(backend, program, numbers, set(), strict=True).computation
    return computation.run(Arguments(list(inputs), numbers, torch.Generator(), CPU, None, replaceable))


def storages(outcome: Outcome) -> list[int]:
    held = [*outcome.results, *outcome.replaced.values()]
    return [tensor.untyped_storage().data_ptr() for tensor in held if isinstance(tensor, torch.Tensor)]


def test_equal_outputs_have_memory_of_their_own() -> None:
    x = torch.rand(3)
    outcome = run(lambda x: (x + 1, x + 1), x)
    assert len(set(storages(outcome))) == 2
    assert all(torch.equal(result, x + 1) for result in outcome.results)  # type: ignore[arg-type]


def test_an_output_that_is_an_input_is_copied() -> None:
    x = torch.rand(3)
    (result,) = run(lambda x: x.clone(), x).results
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, x)
    assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_outputs_that_share_memory_are_copied() -> None:
    def halves(program: Program, attempt: int, given: Any) -> Any:
        both = torch.cat([given[0] + 1, given[0] * 2])
        return [both[:3], both[3:]]

    x = torch.rand(3)
    outcome = run(lambda x: (x + 1, x * 2), x, behaviour=halves)
    assert len(set(storages(outcome))) == 2
    assert torch.equal(outcome.results[0], x + 1)  # type: ignore[arg-type]
    assert torch.equal(outcome.results[1], x * 2)  # type: ignore[arg-type]


def test_a_small_view_of_large_memory_is_copied() -> None:
    def corner(program: Program, attempt: int, given: Any) -> Any:
        return [torch.zeros(10_000)[:3].copy_(given[0])]

    (result,) = run(lambda x: x + 0.0, torch.rand(3), behaviour=corner).results
    assert isinstance(result, torch.Tensor)
    assert result.untyped_storage().nbytes() == 12


def test_a_new_value_of_an_input_and_an_output_do_not_share_memory() -> None:
    x = torch.zeros(3)
    outcome = run(lambda x: x.add_(1).clone(), x)
    assert len(outcome.replaced) == 1
    assert len(set(storages(outcome))) == 2


def test_without_leave_to_replace_an_input_it_is_written_in_place() -> None:
    x = torch.zeros(3)
    outcome = run(lambda x: x.add_(1).sum(), x, replaceable=False)
    assert outcome.replaced == {}
    assert x.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("replaceable", [True, False])
def test_inputs_that_exchange_their_values(replaceable: bool) -> None:
    def exchange(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = x.clone()
        x.copy_(y)
        y.copy_(before)
        return x.sum()

    x, y = torch.zeros(3), torch.ones(3)
    outcome = run(exchange, x, y, replaceable=replaceable)
    after = {0: x, 1: y, **outcome.replaced}
    assert [after[i].tolist() for i in (0, 1)] == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]  # type: ignore[union-attr]


def test_an_input_that_is_returned_itself_was_written_in_place() -> None:
    def in_place(program: Program, attempt: int, given: Any) -> Any:
        return [given[0].add_(1)]

    x = torch.zeros(3)
    outcome = run(lambda x: (x.add_(1), None)[1], x, behaviour=in_place)
    assert outcome.replaced == {}
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_a_wrong_output_leaves_every_input_as_it_was() -> None:
    def wrong(program: Program, attempt: int, given: Any) -> Any:
        first, *rest = run_functional(program, given)
        return [first.double(), *rest]

    x, whole = torch.zeros(3), torch.zeros(8)
    part = whole[2:4]
    program, numbers = record(lambda x, y: (x.add_(1), y.add_(1), x * 2)[2], x, torch.zeros(2))
    computation = lower(Misbehaving("odd", Form.FUNCTIONAL, wrong), program, numbers, set(), True).computation
    with pytest.raises(WrongResultError, match="float64"):
        computation.run(Arguments([x, part], numbers, torch.Generator(), CPU, None, False))
    assert x.tolist() == [0.0, 0.0, 0.0]
    assert whole.tolist() == [0.0] * 8


def test_a_wrong_update_leaves_every_input_as_it_was() -> None:
    def wrong(program: Program, attempt: int, given: Any) -> Any:
        *rest, last = run_functional(program, given)
        return [*rest, last[:1]]

    x, y = torch.zeros(3), torch.zeros(3)
    with pytest.raises(WrongResultError, match=r"float32\[1\]"):
        run(lambda x, y: (x.add_(1), y.add_(1), None)[2], x, y, behaviour=wrong, replaceable=False)
    assert x.tolist() == y.tolist() == [0.0, 0.0, 0.0]


# ---- results that lie in memory in the same way at every run


def runs(function: Any, behaviour: Any, *inputs: torch.Tensor, count: int = 3) -> list[Outcome]:
    """The outcomes of several runs on a backend whose functions repeat their layouts."""
    program, numbers = record(function, *inputs)
    backend = Misbehaving("odd", Form.FUNCTIONAL, behaviour)
    backend.repeats_layouts = True
    computation = lower(backend, program, numbers, set(), strict=True).computation
    arguments = Arguments(list(inputs), numbers, torch.Generator(), CPU, None, False)
    return [computation.run(arguments) for _ in range(count)]


def test_results_that_were_right_once_are_passed_on_unchecked() -> None:
    returned: list[torch.Tensor] = []

    def right(program: Program, attempt: int, given: Any) -> Any:
        returned.append(given[0] + 1)
        return [returned[-1]]

    outcomes = runs(lambda x: x + 1, right, torch.rand(3))
    assert all(outcome.results[0] is made for outcome, made in zip(outcomes, returned, strict=True))


def test_results_that_need_a_copy_are_copied_at_every_run() -> None:
    def shared(program: Program, attempt: int, given: Any) -> Any:
        both = torch.cat([given[0] + 1, given[0] * 2])
        return [both[:3], both[3:]]

    for outcome in runs(lambda x: (x + 1, x * 2), shared, torch.rand(3)):
        assert len(set(storages(outcome))) == 2


def test_an_update_that_is_not_in_place_is_written_also_after_one_that_was() -> None:
    attempts: list[int] = []

    def sometimes(program: Program, attempt: int, given: Any) -> Any:
        attempts.append(attempt)
        return [given[0].add_(1) if len(attempts) < 3 else given[0] + 1]

    x = torch.zeros(3)
    runs(lambda x: (x.add_(1), None)[1], sometimes, x, count=4)
    assert len(attempts) == 4
    assert x.tolist() == [4.0, 4.0, 4.0]
