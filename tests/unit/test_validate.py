"""Comparing what a backend computes with the interpreter, and finding the first call that it gets wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.conformance.wrong_backends import DropsWrites, Inexact, Right, SwapsResults
from tests.support.backends import ArrayBackend, Misbehaving, RecordedBackend, registered, seen_events, used
from torch_ltc.config import settings
from torch_ltc.debug.compare_runs import difference
from torch_ltc.errors import ExecutionError, ValidationError
from torch_ltc.events import RefusalEvent
from torch_ltc.lowering.interface import Arguments, Backend, Form
from torch_ltc.lowering.kernel_call import run_call
from torch_ltc.program.instruction import Program

pytestmark = pytest.mark.blocking_tiers


@contextmanager
def validated(backend: Backend | type[Backend]) -> Iterator[None]:
    scope = settings.scope(check="validate", recompiles="allow")
    with registered(backend), torch_ltc.use_backend(backend.name), scope:
        yield


def spoiled(name: str, spoils: Callable[[Program, str], bool], form: Form = Form.RECORDED) -> Misbehaving:
    """A backend that computes the results of some calls, those of certain programs, wrong by one percent."""

    def run(program: Program, attempt: int, given: Sequence[Tensor]) -> list[Tensor]:
        count = len(program.inputs)
        values = {i.number: tensor for i, tensor in zip(program.inputs, given[:count], strict=True)}
        generator = given[-1] if program.random else torch.default_generator
        scalars = list(given[count : count + program.scalars])
        arguments = Arguments([], scalars, generator, program.device)  # type: ignore[arg-type]
        for call in program.calls:
            values.update(run_call(call, values.__getitem__, arguments))
            if spoils(program, call.name):
                for number in call.numbers if call.numbers[0] >= 0 else call.mutated:
                    values[number].mul_(1.01)
        return [values[number] for number in program.outputs]

    return Misbehaving(name, form, run)


def failing(step: Callable[[], object], count: int = 3) -> ValidationError:
    """What the steps raise when they are synced."""
    with pytest.raises(ValidationError) as caught:
        for _ in range(count):
            kept = step()
            torch_ltc.sync(wait=True)
            del kept
    return caught.value


def text_of(error: ValidationError) -> str:
    text = re.sub(r"program \d+", "program N", str(error))
    text = re.sub(r"dump_repro\(\d+", "dump_repro(N", text)
    return re.sub(r"/[^ ]*/(\w+\.py):\d+ in \S*\.", r"\1:LINE in ", text)


def test_the_first_bad_call_is_named():
    values = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to("ltc")

    def step() -> Tensor:
        return (values * 0.5).neg().sum(0) + 1

    with validated(spoiled("wrong_neg", lambda program, name: name == "aten::neg")):
        error = failing(step)
    assert text_of(error) == (
        "LTC303: wrong_neg computed program N of 4 calls wrong: 1 of its results and inputs differs from the "
        "interpreter's\n"
        "  worst: result 0, float32[2], made by aten::add.Tensor: 2 of 2 numbers differ, most at [1]: -1.01999998 "
        "instead of -1 (allowed: 2.4e-05)\n"
        "  first bad call: aten::neg, number 2 of 4\n"
        "    input: float32[2,2], 0 .. 1.5\n"
        "    result 1, float32[2,2], made by aten::neg: 3 of 4 numbers differ, most at [1, 1]: -1.51499999 instead of "
        "-1.5 (allowed: 3.4e-05)\n"
        "  the interpreter's results are kept, and it runs this program from now on\n"
        "  recorded at test_validate.py:LINE in step\n"
        "  try: report it with the script that torch_ltc.debug.dump_repro(N, FOLDER) writes"
    )


def test_the_interpreters_results_are_kept_and_it_runs_the_program_from_then_on():
    values = torch.tensor([0.0, 1.0]).to("ltc")
    expected = torch.tensor([0.0, 1.0]).exp() * 2
    with validated(spoiled("wrong_exp", lambda program, name: name == "aten::exp")), seen_events() as seen:
        for attempt in range(4):
            result = values.exp() * 2
            if attempt == 1:
                with pytest.raises(ValidationError):
                    torch_ltc.sync(wait=True)
            torch_ltc.sync(wait=True)
            assert torch.equal(result.cpu(), expected)
    assert used(seen) == ["interpreter", "wrong_exp", "interpreter", "interpreter"]
    assert [event.stage for event in seen if isinstance(event, RefusalEvent)] == ["validate"]


def test_calls_that_are_wrong_together_only_are_not_blamed_one_by_one():
    values = torch.tensor([1.0, 2.0]).to("ltc")

    def fused(program: Program, name: str) -> bool:
        # As if exp and add were merged: wrong where nobody sees what lies between them.
        return len(program.outputs) == 1 and name == "aten::add.Tensor" and len(program.calls) >= 2

    def step() -> Tensor:
        return (values.exp() + 1).neg()

    with validated(spoiled("wrong_fusion", fused)):
        text = str(failing(step))
    assert (
        "no single bad call: with every value returned all 3 calls are right, as when the backend merges calls" in text
    )
    assert "it first shows after aten::add.Tensor, number 2 of 3: result 0, float32[2]" in text


def test_a_program_that_is_right_when_compiled_once_more_is_said_to_be():
    values = torch.tensor([1.0, 2.0]).to("ltc")
    wrong = [True]

    def once(program: Program, name: str) -> bool:
        return wrong.pop() if wrong else False

    with validated(spoiled("wrong_once", once)):
        text = str(failing(lambda: values.exp() + 1))
    assert "no bad call: compiled once more, for its own sizes alone, the program is right" in text


def test_writes_that_are_lost_are_found():
    weight, expected = torch.ones(3).to("ltc"), torch.ones(3)

    def step() -> None:
        weight.mul_(2).add_(1)

    with validated(DropsWrites):
        error = failing(step)
    assert "first bad call: aten::mul_.Tensor, number 1 of 2" in str(error)
    assert "input 0 after the run, float32[3]: 3 of 3 numbers differ" in str(error)
    for _ in range(2):
        expected.mul_(2).add_(1)
    assert torch.equal(weight.cpu(), expected)


def test_views_of_one_memory_are_restored():
    base, expected = torch.arange(8.0).to("ltc"), torch.arange(8.0)
    head, tail = base[:5], base[3:]
    torch_ltc.sync(wait=True)

    def step(first: Tensor, second: Tensor) -> Tensor:
        first.mul_(1.5)
        second.add_(1)
        return first.sum() + second.exp().sum()

    with validated(spoiled("wrong_add", lambda program, name: name == "aten::add_.Tensor")):
        error = failing(lambda: step(head, tail))
    assert "first bad call: aten::add_.Tensor, number 2 of 6" in str(error)
    for _ in range(2):
        step(expected[:5], expected[3:])
    torch.testing.assert_close(base.cpu(), expected)


def test_random_numbers_go_on_after_the_interpreters_run():
    torch.manual_seed(5)
    expected = [torch.rand(4).exp() for _ in range(4)]
    torch.manual_seed(5)
    with validated(spoiled("wrong_exp", lambda program, name: name == "aten::exp")):
        found = []
        for attempt in range(4):
            found.append(torch.rand(4, device="ltc").exp())
            if attempt == 1:
                with pytest.raises(ValidationError, match="first bad call: aten::exp"):
                    torch_ltc.sync(wait=True)
            torch_ltc.sync(wait=True)
        assert all(torch.equal(left.cpu(), right) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [Right, RecordedBackend, ArrayBackend])
def test_a_right_backend_passes_a_training_step(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model.to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(5, 6).to("ltc")
    with validated(kind), seen_events() as seen:
        for _ in range(4):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            torch_ltc.sync(wait=True)
    assert used(seen).count(kind.name) >= 2


def test_a_wrong_optimizer_step_leaves_the_right_parameters():
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
        inputs = torch.ones(3, 4).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            try:
                torch_ltc.sync(wait=True)
            except ValidationError as error:
                texts.append(str(error))
        return [parameter.detach().cpu() for parameter in model.parameters()]

    texts: list[str] = []
    expected = train("cpu")
    with validated(spoiled("wrong_adam", lambda program, name: name.startswith("aten::addcdiv_"))):
        torch.testing.assert_close(train("ltc"), expected)
    assert texts
    assert all("first bad call: aten::addcdiv_" in text for text in texts)


def test_handles_of_a_backend_are_replaced_by_the_interpreters_data():
    class Wrong(ArrayBackend):
        name = "wrong_arrays"

        def compile(self, program: Program) -> Callable[..., Sequence[object]]:
            right = super().compile(program)

            def run(*given: object) -> Sequence[object]:
                results = right(*given)
                for result in results if any(call.name == "aten::exp" for call in program.calls) else ():
                    result.array *= 2  # type: ignore[attr-defined]
                return results

            return run

    weight, expected = torch.ones(3).to("ltc"), torch.ones(3)
    with validated(Wrong):
        for attempt in range(4):
            weight.mul_(0.5)
            torch_ltc.sync(wait=True)
            result = weight.exp_() + 1
            if attempt == 1:
                with pytest.raises(ValidationError, match=r"first bad call: aten::exp"):
                    torch_ltc.sync(wait=True)
            torch_ltc.sync(wait=True)
            expected.mul_(0.5).exp_()
            torch.testing.assert_close(weight.cpu(), expected)
            torch.testing.assert_close(result.cpu(), expected + 1)


def test_swapped_results_are_found():
    values = torch.tensor([1.0, 2.0]).to("ltc")
    with validated(SwapsResults):
        assert "2 of its results and inputs differ from" in str(failing(lambda: (values + 1, values * 3)))


def test_a_small_error_is_found_and_a_tiny_one_is_not():
    values = torch.tensor([1.0, 2.0]).to("ltc")
    with validated(Inexact):
        assert "made by aten::exp: 2 of 2 numbers differ" in str(failing(lambda: values.exp()))

    def tiny(program: Program, attempt: int, given: Sequence[Tensor]) -> list[Tensor]:
        return [given[0].exp() * (1 + 1e-6)]

    with validated(Misbehaving("tiny", Form.RECORDED, tiny)):
        for _ in range(3):
            kept = values.exp()
            torch_ltc.sync(wait=True)
    assert kept.cpu().tolist() == pytest.approx([2.718281828, 7.389056099], rel=1e-5)


def test_rounding_that_the_program_makes_large_is_no_error():
    values = torch.tensor([1.1, 2.2, 3.3]).to("ltc")

    def rounded(program: Program, attempt: int, given: Sequence[Tensor]) -> list[Tensor]:
        [inputs] = given[:1]
        return [(inputs.sum().nextafter(torch.tensor(9.0)) - 6.5).mul(1e7).sin()]

    with validated(Misbehaving("rounded", Form.RECORDED, rounded)) as _, seen_events() as seen:
        for _ in range(3):
            kept = (values.sum() - 6.5).mul(1e7).sin()
            torch_ltc.sync(wait=True)
    assert used(seen) == ["interpreter", "rounded", "rounded"]
    assert kept.item() != (torch.tensor([1.1, 2.2, 3.3]).sum() - 6.5).mul(1e7).sin().item()


def test_nan_is_equal_to_nan():
    values = torch.tensor([-1.0, 1.0]).to("ltc")
    with validated(RecordedBackend):
        for _ in range(3):
            kept = values.log()
            torch_ltc.sync(wait=True)
    assert kept.cpu().isnan().tolist() == [True, False]


def test_memory_that_was_never_written_to_is_not_compared():
    with validated(RecordedBackend):
        for _ in range(3):
            kept = torch.ones(1000, device="ltc") * 2, torch.empty_like(torch.ones(1000, device="ltc"))
            torch_ltc.sync(wait=True)
    assert kept[0].sum().item() == 2000


def test_a_failure_that_a_backend_hides_is_raised():
    def hides(program: Program, attempt: int, given: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros(2, 3)]

    table = torch.ones(4, 3).to("ltc")

    def look_up(place: int) -> Tensor:
        indices = torch.tensor([0, place]).to("ltc")
        torch_ltc.sync(wait=True)
        return torch.nn.functional.embedding(indices, table)

    for _ in range(2):
        kept = look_up(1)
        torch_ltc.sync(wait=True)
    with validated(Misbehaving("hides", Form.RECORDED, hides)):
        kept = look_up(9)
        with pytest.raises((ValidationError, ExecutionError)) as caught:
            torch_ltc.sync(wait=True)
        del kept
    assert "hides ran program" in str(caught.value)
    assert "without an error, but it has one: aten::embedding failed" in str(caught.value)


def test_nothing_is_validated_when_the_setting_is_off():
    values = torch.tensor([0.0]).to("ltc")
    backend = spoiled("wrong_exp", lambda program, name: name == "aten::exp")
    with registered(backend), torch_ltc.use_backend("wrong_exp"):
        for _ in range(3):
            kept = values.exp()
            torch_ltc.sync(wait=True)
        assert kept.cpu().tolist() == [pytest.approx(1.01)]


@pytest.mark.parametrize(
    ("wanted", "got", "text"),
    [
        ([1.0, 2.0], [1.0, 2.5], "x: 1 of 2 numbers differ, most at [1]: 2.5 instead of 2 (allowed: 0.00022)"),
        ([1.0, float("nan")], [1.0, float("nan")], None),
        ([1.0, float("nan")], [1.0, 2.0], "x: 1 of 2 numbers differ, most at [1]: 2 instead of nan (allowed: 0.0001)"),
        (
            [float("inf")],
            [float("-inf")],
            "x: 1 of 1 numbers differ, most at [0]: -inf instead of inf (allowed: 0.0001)",
        ),
        ([True], [False], "x: 1 of 1 numbers differ, most at [0]: False instead of True (equal numbers are asked for)"),
        ([1e6, 0.0], [1e6, 1.0], None),
        ([], [], None),
    ],
)
def test_difference(wanted, got, text):
    tolerance = (0.0, 0.0) if wanted and wanted[0] is True else (1e-5, 1e-4)
    found = difference("x", torch.tensor(wanted), torch.tensor(got), tolerance)
    assert (None if found is None else str(found)) == text
