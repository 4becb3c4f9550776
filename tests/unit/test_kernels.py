"""Kernels made from schemas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torch_ltc
from torch_ltc.config import settings
from torch_ltc.device import kernels
from torch_ltc.device.kernels import compile_kernel, is_forced, kernel_source, make_kernel
from torch_ltc.device.library import kernel_for, overloads
from torch_ltc.native.recording import native
from torch_ltc.record.operator import Kind, Operator

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels made here are not registered: the table of registered ones must not learn of them."""
    monkeypatch.setattr(kernels, "_stubs", dict(kernels._stubs))


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def test_arguments_are_sorted_by_what_they_mean_for_a_recording() -> None:
    def kinds(operator: Operator) -> dict[str, Kind]:
        return {argument.name: argument.kind for argument in operator.arguments}

    assert kinds(Operator(aten.add.Tensor)) == {"self": Kind.TENSOR, "other": Kind.TENSOR, "alpha": Kind.SCALAR}
    assert kinds(Operator(aten.sum.dim_IntList)) == {
        "self": Kind.TENSOR,
        "dim": Kind.STATIC,
        "keepdim": Kind.STATIC,
        "dtype": Kind.STATIC,
    }
    assert kinds(Operator(aten.cat.default))["tensors"] is Kind.TENSORS
    assert kinds(Operator(aten.index.Tensor))["indices"] is Kind.TENSORS
    assert kinds(Operator(aten.uniform_.default))["generator"] is Kind.GENERATOR
    assert kinds(Operator(aten.arange.default))["end"] is Kind.STATIC_SCALAR
    assert kinds(Operator(aten.empty.memory_format))["pin_memory"] is Kind.DROPPED
    assert kinds(Operator(aten._foreach_add.ScalarList))["scalars"] is Kind.SCALARS


def test_operator_knows_what_it_writes_and_whether_its_size_depends_on_data() -> None:
    assert Operator(aten.add_.Tensor).written == (0,)
    assert Operator(aten.add.out).written == (3,)
    assert Operator(aten.add.Tensor).written == ()
    assert Operator(aten.nonzero.default).dynamic
    assert not Operator(aten.add.Tensor).dynamic
    assert Operator(aten.bernoulli.default).random
    assert Operator(aten.add.Tensor) != Operator(aten.add.Tensor), "compared by identity"


def test_defaults_are_filled_in() -> None:
    assert Operator(aten.add.Tensor).values((1, 2), {}) == (1, 2, 1)
    assert Operator(aten.add.Tensor).values((1, 2), {"alpha": 5}) == (1, 2, 5)
    assert Operator(aten.topk.default).values((1, 2), {"largest": False}) == (1, 2, -1, False, True)


def test_source_of_a_kernel_has_no_loop_over_arguments() -> None:
    source = kernel_source(Operator(aten.add.Tensor))
    assert source.startswith("def kernel(a_self=None, a_other=None, *, alpha=None):")
    assert "for " not in source
    assert "child.key != key" in source


def test_every_kernel_that_the_device_registers_compiles() -> None:
    count = 0
    for op in overloads():
        operator = Operator(op)
        if operator.dynamic or operator.random:
            continue
        compile_kernel(operator)
        count += 1
    assert count > 1000


def test_every_overload_with_a_cpu_kernel_is_covered() -> None:
    found = {op.name() for op in overloads()}
    assert {"aten::add.Tensor", "aten::add_.Tensor", "aten::add.out", "aten::view", "aten::nonzero"} <= found
    assert kernel_for(aten.detach.default) is None
    assert kernel_for(aten.add.Tensor) is not None


@pytest.mark.skipif(native is not None, reason="kernels in Python are for what the hit path in C++ leaves")
def test_a_kernel_becomes_its_own_code_after_a_few_calls() -> None:
    kernel = make_kernel(aten.add.Tensor)
    before = kernel.__code__
    x = torch.ones(2).to("ltc")
    first = kernel(x, x)
    assert kernel.__code__ is before
    for _ in range(kernels._GENERAL_CALLS):
        kernel(x, x)
    assert kernel.__code__ is not before
    second = kernel(x, x, alpha=2)
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_random_operators_have_kernels_of_their_own() -> None:
    with pytest.raises(ValueError, match="takes a generator"):
        make_kernel(aten.normal_.default)


def test_forced_names_match_with_and_without_overload() -> None:
    add, sub = Operator(aten.add.Tensor), Operator(aten.sub.Tensor)
    for text, expected in [
        ("", (False, False)),
        ("aten::add", (True, False)),
        ("aten::add.Tensor", (True, False)),
        ("aten::add.Scalar", (False, False)),
        ("aten::add,aten::sub", (True, True)),
    ]:
        with settings.scope(force_fallback=text):
            assert (is_forced(add), is_forced(sub)) == expected, text
