"""Models train on the device as on eager CPU: the same numbers, one program a step, compiled once."""

from __future__ import annotations

import pytest
import torch

from tests.models import training
from tests.models.layer_cases import LAYER_CASES
from tests.models.training import Case
from tests.models.transformer_cases import TRANSFORMER_CASES, gpt2

each_case = pytest.mark.parametrize("case", LAYER_CASES + TRANSFORMER_CASES, ids=lambda case: case.name)
each_backend = pytest.mark.parametrize("backend", ["interpreter", "torchscript"])


@each_case
def test_interpreter_training_has_the_bits_of_eager(case: Case) -> None:
    training.assert_interpreter_bit_equal(case)


@each_case
def test_torchscript_training_equals_eager_within_rounding(case: Case) -> None:
    training.assert_torchscript_close(case)


@each_case
@each_backend
def test_steady_step_is_one_program(case: Case, backend: str) -> None:
    training.assert_one_program_per_step(case, backend)


@pytest.mark.blocking_session
@each_case
def test_compiles_stop_after_the_third_step(case: Case) -> None:
    training.assert_compiles_stop(case)


@each_case
@each_backend
def test_nothing_falls_back(case: Case, backend: str) -> None:
    training.assert_no_fallbacks(case, backend)


def test_tied_weights_stay_tied_on_the_device() -> None:
    model = gpt2().to("ltc")
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        model.transformer.wte.weight[0, 0] = 7.0
    assert model.lm_head.weight[0, 0].item() == 7.0
