"""Finding the call that made the first NaN or infinity."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import torch_ltc
from tests.support.backends import RecordedBackend, registered
from torch_ltc.config import settings
from torch_ltc.debug import find_nan
from torch_ltc.debug.replay import figures
from torch_ltc.errors import NonFiniteWarning


def _texts(found):
    """The findings with files, lines and program numbers left out."""
    texts = [re.sub(r"program \d+", "program N", str(each)) for each in found]
    return [re.sub(r"/[^ ]*/(\w+\.py):\d+ in \S*\.", r"\1:LINE in ", text) for text in texts]


def _text_of(found):
    [text] = _texts(found)
    return re.sub(r"/[^ ]*/(\w+\.py):\d+", r"\1:LINE", text)


def test_the_message_names_the_operation_its_inputs_and_the_line():
    values = torch.tensor([-1.0, 0.0, 2.0]).to("ltc")
    with find_nan() as found:
        kept = (values.log() * 2).sum()
    assert _text_of(found) == (
        "LTC301: aten::log made 1 NaN and 1 Inf out of finite numbers in program N\n"
        "  input: float32[3], -1 .. 2\n"
        "  result: float32[3], 0.6931, 1 NaN, 1 Inf\n"
        "  recorded at test_nan.py:LINE in test_the_message_names_the_operation_its_inputs_and_the_line\n"
        "  try: keep its input above 0: x.clamp_min(1e-8), or log1p for small numbers"
    )
    assert found[0].source.line == _line_with("values.log()")
    assert kept.isnan().item()


def _line_with(text):
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line and "_line_with" not in line)


def test_an_infinity_that_becomes_a_nan_is_followed_to_where_it_was_made():
    values = torch.tensor([1000.0, 1.0]).to("ltc")
    with find_nan() as found:
        big = values.exp()
        kept = big - big
        del big
    [finding] = found
    assert finding.op == "aten::exp"
    assert finding.note.startswith("the infinities became NaN in aten::sub.Tensor at ")
    assert kept.cpu().isnan().tolist() == [True, False]


def test_an_infinity_on_purpose_that_reaches_no_result_is_not_blamed():
    scores = torch.randn(3, 3).to("ltc")
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1).to("ltc")
    with find_nan() as found:
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        bad = (weights.sum() * 0 - 1).sqrt()
        kept = weights, bad
    assert [finding.op for finding in found] == ["aten::sqrt"]
    assert kept[0].isfinite().all().item()


def test_a_row_that_is_masked_wholly_is_blamed_on_the_softmax():
    scores = torch.randn(2, 2).to("ltc")
    with find_nan() as found:
        weights = scores.masked_fill(torch.ones(2, 2, dtype=torch.bool, device="ltc"), float("-inf")).softmax(-1)
    [finding] = found
    assert (finding.op, weights.isnan().all().item()) == ("aten::_softmax", True)
    assert str(finding).startswith("LTC301: aten::_softmax made 4 NaN out of infinities in program")
    assert "the infinities are those of aten::masked_fill.Scalar at" in finding.note


def test_masks_of_infinities_are_not_reported():
    with find_nan() as found:
        mask = torch.full((3, 3), float("-inf"), device="ltc").triu(1)
    assert found == []
    assert mask.isinf().any().item()


def test_an_input_that_was_not_finite_is_named_instead_of_an_operation():
    given = torch.tensor([1.0, float("nan")]).to("ltc")
    with find_nan() as found:
        kept = given * 2
    assert _text_of(found) == (
        "LTC302: an input of program N was not finite before it ran: float32[2], 1, 1 NaN\n"
        "  first used at test_nan.py:LINE in test_an_input_that_was_not_finite_is_named_instead_of_an_operation\n"
        "  try: Look for it where the input comes from: data, a checkpoint, or a program that ran before the check was "
        "on."
    )
    assert kept.isnan().any().item()


def test_an_input_is_followed_to_the_program_that_made_it():
    values = torch.tensor([-1.0]).to("ltc")
    with find_nan() as first:
        bad = values.log()
    with find_nan() as second:
        kept = bad + 1
    assert [finding.op for finding in (*first, *second)] == ["aten::log", ""]
    assert second[0].origin == first[0]
    assert f"aten::log made it in program {first[0].program}, recorded at" in str(second[0])
    assert kept.isnan().item()


def test_a_wrong_number_made_in_place_shows_the_range_from_before():
    values = torch.tensor([4.0, -9.0]).to("ltc")
    with find_nan() as found:
        values.sqrt_()
    [finding] = found
    assert [str(shown) for shown in finding.inputs] == ["float32[2], -9 .. 4"]
    assert [str(shown) for shown in finding.results] == ["float32[2], 2, 1 NaN"]


def test_of_several_writes_to_one_memory_the_last_bad_one_is_blamed():
    target = torch.zeros(3).to("ltc")
    with find_nan() as found:
        target[0] = torch.tensor(-1.0, device="ltc").sqrt()
        target.zero_()
        target[1].div_(torch.zeros((), device="ltc"))
        target[2] = 1.0
    assert [finding.op for finding in found] == ["aten::div_.Tensor"]
    assert target.cpu().isnan().tolist() == [False, True, False]


def test_a_call_of_the_backward_pass_is_found():
    values = torch.tensor([0.0, 4.0]).to("ltc").requires_grad_()
    with find_nan() as found:
        values.sqrt().sum().backward()
    assert [finding.op for finding in found] == ["aten::div.Tensor"]
    assert found[0].source.backward
    assert values.grad.cpu().tolist() == [float("inf"), 0.25]


def test_of_a_list_of_tensors_the_one_is_shown():
    given = [torch.full((size,), float(size - 3)).to("ltc") for size in (4, 2, 5)]
    with find_nan() as found:
        made = torch._foreach_sqrt(given)
    assert [str(shown) for shown in found[0].inputs] == ["float32[2], -1"]
    assert made[1].isnan().all().item()


def test_random_numbers_are_those_of_the_run():
    torch.manual_seed(3)
    with find_nan() as found:
        drawn = torch.rand(1000, device="ltc")
        kept = (drawn - 0.5).log()
    after = torch.rand(4, device="ltc").cpu()
    assert found[0].results[0].nans == int(kept.isnan().sum().item())
    torch.manual_seed(3)
    expected = torch.rand(1000)
    assert torch.equal(kept.cpu().isnan(), (expected - 0.5).log().isnan())
    assert torch.equal(after, torch.rand(4))


def test_results_and_updated_inputs_are_those_of_the_normal_run():
    def step(weight, device):
        weight.sub_(0.5).div_(torch.zeros((), device=device))
        return weight.sum()

    weight, expected = torch.ones(3).to("ltc"), torch.ones(3)
    with find_nan() as found:
        total = step(weight, "ltc")
    torch.testing.assert_close(total.cpu(), step(expected, "cpu"))
    torch.testing.assert_close(weight.cpu(), expected)
    assert [finding.op for finding in found] == ["aten::div_.Tensor"]


@pytest.mark.blocking_tiers
def test_compiled_programs_are_searched_too():
    with registered(RecordedBackend), torch_ltc.use_backend("recorded") as backend:
        for sign in (1.0, 1.0, 1.0, -1.0):
            values = torch.full((4,), sign).to("ltc")
            with find_nan() as found:
                kept = (values * 3).log()
        assert backend.runs > 0
        assert [finding.op for finding in found] == ["aten::log"]
        assert kept.isnan().all().item()


def test_each_operation_and_line_is_warned_of_once():
    parameter = torch.tensor([-1.0]).to("ltc")
    texts = []
    with settings.scope(check="nan"):
        for _ in range(3):
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                parameter.log_()
                torch_ltc.sync(wait=True)
            texts += [str(warning.message) for warning in shown if warning.category is NonFiniteWarning]
    assert len(texts) == 1
    assert texts[0].startswith("LTC301: aten::log_ made 1 NaN out of finite numbers in program")


def test_find_nan_can_raise():
    before = settings.check
    values = torch.tensor([0.0]).to("ltc")
    with pytest.raises(NonFiniteWarning, match=r"aten::reciprocal made 1 Inf out of finite numbers"), find_nan(True):
        kept = values.reciprocal()
    assert kept.isinf().item()
    assert settings.check == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(0), "float32[0], empty"),
        (torch.tensor([1, 3]), "int64[2], 1 .. 3"),
        (torch.tensor([True, False]), "bool[2], 0 .. 1"),
        (torch.tensor([3 + 4j, complex("nan")]), "complex64[2], 5, 1 NaN"),
        (torch.tensor([1.5, 2.25]).bfloat16(), "bfloat16[2], 1.5 .. 2.25"),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), "float8_e4m3fn[2], 1 .. 2"),
        (torch.tensor([float("inf"), -float("inf")]), "float32[2], all Inf"),
    ],
)
def test_figures_of_a_tensor(value, text):
    assert str(figures(value)) == text
