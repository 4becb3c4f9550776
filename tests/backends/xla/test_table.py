"""The table of rules is about functional operators that exist, once each."""

from __future__ import annotations

import pytest
import torch

from torch_ltc.backends.xla.checks import CHECKS
from torch_ltc.backends.xla.decompositions import decompositions
from torch_ltc.backends.xla.lowering import Lowering  # noqa: F401, fills the table
from torch_ltc.backends.xla.table import ABSENT, RULES, add_rules, overload
from torch_ltc.errors import BackendError


def test_every_name_is_an_operator_of_this_pytorch() -> None:
    assert ABSENT == []


def test_rules_are_for_operators_that_write_nothing() -> None:
    writing = [str(op) for op in RULES if op._schema.is_mutable]
    assert writing == []


def test_rules_draw_no_random_numbers() -> None:
    # Attention without dropout draws none, whatever its tag says.
    drawing = {str(op) for op in RULES if torch.Tag.nondeterministic_seeded in op.tags}
    assert drawing == {"aten._scaled_dot_product_flash_attention_for_cpu.default"}


def test_no_operator_with_a_rule_is_taken_apart() -> None:
    both = sorted(str(op) for op in RULES if op in decompositions())
    assert both == []


def test_a_second_rule_for_an_operator_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"aten\.mm\.default has two rules"):
        add_rules(lambda x, y: x, ["mm"])


def test_a_name_that_is_gone_is_left_out() -> None:
    add_rules(lambda x: x, ["no_such_operator.anywhere"])
    assert ABSENT.pop() == "no_such_operator.anywhere"


def test_every_check_belongs_to_a_rule() -> None:
    assert [str(op) for op in CHECKS if op not in RULES] == []


@pytest.mark.parametrize(("name", "full"), [("mm", "aten::mm"), ("add.Tensor", "aten::add.Tensor")])
def test_names_without_an_overload_mean_the_default_one(name: str, full: str) -> None:
    op = overload(name)
    assert op is not None
    assert op.name() == full
