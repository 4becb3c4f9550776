"""Calls that cannot be recorded run eagerly, are counted and named; the setting says whether they may."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import assert_like_eager, assert_same, lazy, no_meta, observe
from torch_ltc import config, metrics
from torch_ltc.config import settings
from torch_ltc.device.fallback import reset_warnings
from torch_ltc.errors import FallbackError, FallbackWarning


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """Fallbacks are silent unless a test says otherwise; warnings come anew."""
    reset_warnings()
    with settings.scope(fallback="allow"):
        yield
    reset_warnings()


DYNAMIC: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "nonzero": ("aten::nonzero", lambda x: x.nonzero()),
    "masked_select": ("aten::masked_select", lambda x: x.masked_select(x > 1)),
    "boolean index": ("aten::index.Tensor", lambda x: x[x > 1]),
    "unique": ("aten::_unique2", lambda x: x.flatten().unique(return_counts=True)),
    "where with one argument": ("aten::nonzero", lambda x: torch.where(x > 1)),
    "equal": ("aten::equal", lambda x: torch.equal(x, x + 0)),
    "allclose": ("aten::allclose", lambda x: torch.allclose(x, x + 0)),
    "bincount": ("aten::bincount", lambda x: x.flatten().long().bincount()),
    "repeat_interleave": (
        "aten::repeat_interleave.Tensor",
        lambda x: torch.repeat_interleave(torch.tensor([1, 2], device=x.device)),
    ),
    "no meta kernel": ("torch_ltc_tests::no_meta", no_meta),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_data_dependent_call_equals_eager_and_is_counted(name: str) -> None:
    op, call = DYNAMIC[name]
    metrics.reset()
    with observe() as seen:
        assert_like_eager(lambda device: call(torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 5.0]]).to(device)))
    assert op in [event.op for event in seen.fallbacks]
    assert metrics.counter_value(op) >= 1
    assert op in metrics.counter_names()


def test_results_of_a_fallback_are_device_tensors_that_record_on() -> None:
    x = lazy(torch.tensor([0.0, 3.0, 0.0, 4.0]))
    places = (x * 2).nonzero()
    assert places.device.type == "ltc"
    rows = x[places.squeeze(1)] + 1
    assert rows.tolist() == [4.0, 5.0]
    values, counts = x.unique(return_counts=True)
    assert (values.tolist(), counts.tolist()) == ([0.0, 3.0, 4.0], [2, 1, 1])


def test_fallback_event_says_what_why_and_where() -> None:
    x = lazy(torch.ones(3))
    with observe() as seen:
        x.nonzero()
    (event,) = seen.fallbacks
    assert event.op == "aten::nonzero"
    assert "depends on data" in event.reason
    assert "test_fallback.py" in event.source.file
    assert event.duration_s > 0


def test_pending_work_runs_before_a_fallback_in_program_order() -> None:
    x = lazy(torch.zeros(4))
    with observe() as seen:
        x[1] = 1
        found = x.nonzero()
        x[2] = 1
        assert found.tolist() == [[1]]
        assert x.nonzero().tolist() == [[1], [2]]
    assert seen.reasons[0] == "FALLBACK"


def test_in_place_and_out_fallbacks_write_to_the_device_tensor() -> None:
    with settings.scope(force_fallback="aten::add_,aten::mul"):
        x = lazy(torch.arange(4.0))
        view = x[2:]
        view.add_(10)
        assert x.tolist() == [0.0, 1.0, 12.0, 13.0]
        out = torch.zeros(0, device="ltc")
        torch.mul(x, 2, out=out)
        assert out.tolist() == [0.0, 2.0, 24.0, 26.0]


def test_policy_warn_warns_once_per_operator_and_names_the_users_line() -> None:
    with settings.scope(fallback="warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = lazy(torch.ones(3))
        x.nonzero()
        x.nonzero()
        x.masked_select(x > 0)
        x.nonzero()
    texts = [str(warning.message) for warning in caught if warning.category is FallbackWarning]
    assert [text.split()[0] for text in texts] == ["aten::nonzero", "aten::masked_select"]
    assert all("test_fallback.py" in text for text in texts)
    assert all(
        warning.filename.endswith("test_fallback.py") for warning in caught if warning.category is FallbackWarning
    )


def test_policy_allow_is_silent_but_counts() -> None:
    metrics.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lazy(torch.ones(3)).nonzero()
    assert metrics.counter_value("aten::nonzero") == 1


def test_policy_error_refuses_and_leaves_the_device_usable() -> None:
    with settings.scope(fallback="error"):
        x = torch.ones(3, device="ltc") * 2
        with pytest.raises(FallbackError, match=r"aten::nonzero cannot be recorded(.|\n)*test_fallback.py") as caught:
            x.nonzero()
        assert 'settings.fallback = "warn"' in str(caught.value)
        with pytest.raises(FallbackError, match=r"aten::index.Tensor"):
            x[x > 1]
        assert (x + 1).tolist() == [3.0, 3.0, 3.0]


def test_reading_a_number_is_no_fallback() -> None:
    with settings.scope(fallback="error"):
        x = torch.ones(2, device="ltc") * 3
        assert x.sum().item() == 6.0
        assert bool(x.sum() > 1)
        assert x.tolist() == [3.0, 3.0]


def test_forced_fallback_takes_several_operators_and_changes_at_run_time() -> None:
    def run() -> tuple[list[float], list[str]]:
        with observe() as seen:
            x = torch.ones(2, device="ltc")
            value = ((x + 1) * 3).sin().tolist()
        return value, [event.op for event in seen.fallbacks]

    expected = torch.full((2,), 6.0).sin().tolist()
    for forced, ops in [
        ("", []),
        ("aten::add", ["aten::add.Tensor"]),
        ("aten::add,aten::sin", ["aten::add.Tensor", "aten::sin"]),
        (" aten::mul.Tensor , aten::sin", ["aten::mul.Tensor", "aten::sin"]),
        ("aten::no_such_operator", []),
        ("", []),
    ]:
        with settings.scope(force_fallback=forced):
            value, seen = run()
        assert value == expected
        assert seen == ops, forced
    config.set_force_fallback("aten::add")
    try:
        assert config.get_force_fallback() == "aten::add"
        assert run() == (expected, ["aten::add.Tensor"])
    finally:
        config.set_force_fallback("")
    assert run() == (expected, [])


@pytest.mark.parametrize(
    ("forced", "call"),
    [
        ("aten::randn", lambda device: torch.randn(3, device=device)),
        ("aten::normal_", lambda device: torch.empty(3, device=device).normal_()),
        ("aten::embedding", lambda device: F.embedding(torch.tensor([1], device=device), torch.eye(3, device=device))),
        ("aten::view", lambda device: torch.arange(6.0, device=device).view(2, 3).t()),
        ("aten::split", lambda device: torch.arange(6.0, device=device).split(2)),
        ("aten::native_dropout,aten::bernoulli_", lambda device: F.dropout(torch.ones(9, device=device), 0.5)),
        (
            "aten::convolution",
            lambda device: F.conv1d(torch.ones(1, 1, 4, device=device), torch.ones(1, 1, 2, device=device)),
        ),
        ("aten::_foreach_add", lambda device: torch._foreach_add([torch.ones(2, device=device)], 1.0)),
        ("aten::max", lambda device: torch.arange(6.0, device=device).view(2, 3).max(1)),
        ("aten::_to_copy", lambda device: torch.arange(3.0, device=device).double()),
        ("aten::copy_", lambda device: torch.zeros(3, device=device).copy_(torch.ones(3, device=device))),
        ("aten::index", lambda device: torch.arange(3.0, device=device)[torch.tensor([2, 0], device=device)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_forced_fallback_of_any_kind_of_operator_equals_eager(forced: str, call: Callable[[str], Any]) -> None:
    with settings.scope(force_fallback=forced):
        assert_like_eager(call)
    assert_like_eager(call)


def test_forced_view_still_aliases() -> None:
    with settings.scope(force_fallback="aten::view,aten::t,aten::slice,aten::select"):
        base = lazy(torch.zeros(2, 3))
        base.view(6)[4:].add_(1)
        base.t()[0].fill_(5)
        assert base.tolist() == [[5.0, 0.0, 0.0], [5.0, 1.0, 1.0]]


def test_gradients_flow_through_a_fallback() -> None:
    def compute(device: str) -> list[Tensor]:
        x = torch.arange(4.0).to(device).requires_grad_()
        x[x > 1].square().sum().backward()
        return [x.grad]

    assert_like_eager(compute)


def test_custom_operator_with_a_meta_kernel_is_recorded_and_one_without_is_not() -> None:
    x = lazy(torch.ones(2))
    with observe() as seen:
        assert no_meta(x).tolist() == [2.0, 2.0]
    assert [event.op for event in seen.fallbacks] == ["torch_ltc_tests::no_meta"]


def test_operator_of_a_library_without_a_meta_kernel_runs_eagerly() -> None:
    with torch.library._scoped_library("torch_ltc_tests_old", "DEF") as library:
        library.define("triple(Tensor x) -> Tensor")
        library.impl("triple", lambda x: x * 3, "CPU")
        with observe() as seen:
            assert torch.ops.torch_ltc_tests_old.triple(lazy(torch.ones(2))).tolist() == [3.0, 3.0]
    assert [event.op for event in seen.fallbacks] == ["torch_ltc_tests_old::triple"]


def test_custom_operator_with_a_size_that_depends_on_data_runs_eagerly() -> None:
    @torch.library.custom_op("torch_ltc_tests::positive", mutates_args=(), device_types="cpu")
    def positive(tensor: Tensor) -> Tensor:
        return tensor[tensor > 0]

    @positive.register_fake
    def _(tensor: Tensor) -> Tensor:
        return tensor.new_empty(torch.library.get_ctx().new_dynamic_size())

    with observe() as seen:
        assert positive(lazy(torch.tensor([-1.0, 2.0, 3.0]))).tolist() == [2.0, 3.0]
    assert [event.op for event in seen.fallbacks] == ["torch_ltc_tests::positive"]


def test_custom_operator_for_all_devices_records_what_it_calls() -> None:
    @torch.library.custom_op("torch_ltc_tests::anywhere", mutates_args=())
    def anywhere(tensor: Tensor) -> Tensor:
        return tensor * 2 + 1

    with observe() as seen, settings.scope(fallback="error"):
        assert anywhere(lazy(torch.ones(2))).tolist() == [3.0, 3.0]
    assert len(seen.runs) == 1


def test_mutating_custom_operator_is_recorded_in_order() -> None:
    @torch.library.custom_op("torch_ltc_tests::bump", mutates_args=("tensor",), device_types="cpu")
    def bump(tensor: Tensor, by: float) -> None:
        tensor.add_(by)

    @bump.register_fake
    def _(tensor: Tensor, by: float) -> None:
        return None

    x = lazy(torch.zeros(3))
    view = x[1:]
    for number in (1.0, 2.0, 3.0):
        bump(view, number)
        view.mul_(2)
    assert x.tolist() == [0.0, 22.0, 22.0]


def test_sparse_results_stay_on_the_physical_device_and_come_back_dense() -> None:
    x = lazy(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    sparse = x.to_sparse()
    assert sparse.layout is torch.sparse_coo
    assert_same(sparse.to_dense().cpu(), torch.tensor([[0.0, 1.0], [2.0, 0.0]]))


def test_metrics_report_names_fallbacks() -> None:
    metrics.reset()
    lazy(torch.ones(3)).nonzero()
    lazy(torch.ones(3)).nonzero()
    assert "Counter: aten::nonzero\n  Value: 2" in metrics.metrics_report()
    torch_ltc.sync(wait=True)


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "lstsq": lambda x, y: torch.linalg.lstsq(x, y),
    "masked_select": lambda x, y: x.masked_select(y > 1),
    "equal": torch.equal,
    "bincount": lambda x, y: x.flatten().long().bincount(y.flatten()),
    "no meta kernel": lambda x, y: torch.ops.torch_ltc_tests.no_meta_of_two(x, y),
}


@torch.library.custom_op("torch_ltc_tests::no_meta_of_two", mutates_args=(), device_types="cpu")
def no_meta_of_two(left: Tensor, right: Tensor) -> Tensor:
    """Adds; has no fake kernel, so that it cannot be recorded."""
    return left + right


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_tensors_of_two_devices_are_refused_as_in_calls_that_are_recorded(name: str, first: bool) -> None:
    x, y = torch.eye(2) * 2, torch.eye(2) + 1
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        MIXED[name](lazy(x) if first else x, y if first else lazy(y))
    MIXED[name](lazy(x), lazy(y))
