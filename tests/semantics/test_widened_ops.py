"""Calls with dtypes that accelerators have kernels for and the CPU has not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.semantics.support import assert_same, lazy

pytestmark = pytest.mark.usefixtures("no_fallback", "backend")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_histogram_of_integers(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 2, 1, 7, 3, 4, 4], dtype=dtype)
    for options in ({"bins": 4, "min": 0, "max": 3}, {"bins": 8, "min": 0, "max": 7}, {"bins": 3}):
        expected = torch.histc(values.double(), **options)
        for _ in range(3):
            assert_same(torch.histc(lazy(values), **options), expected.to(dtype))
    floats = values.float()
    assert_same(torch.histc(lazy(floats), 4), torch.histc(floats, 4))


HALVES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "bilinear": (lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True), (2, 3, 6, 6)),
    "bicubic": (lambda x: F.interpolate(x, size=(3, 4), mode="bicubic", antialias=True), (2, 3, 6, 6)),
    "average pool": (lambda x: F.avg_pool3d(x, 2), (1, 2, 4, 4, 4)),
    "margin": (lambda x: F.multi_margin_loss(x, torch.tensor([2, 0], device=x.device)), (2, 3)),
    "labels": (lambda x: F.multilabel_margin_loss(x, torch.tensor([[2, -1, 0]] * 2, device=x.device)), (2, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_computed_in_float32_and_rounded(name: str, dtype: torch.dtype) -> None:
    compute, size = HALVES[name]
    x = torch.randn(size).to(dtype)
    wide, ours = x.float().requires_grad_(), lazy(x).requires_grad_()
    expected = compute(wide)
    expected.sum().backward()
    for _ in range(3):
        got = compute(ours)
        assert_same(got, expected.to(dtype))
        ours.grad = None
        got.sum().backward()
        assert_same(ours.grad, wide.grad.to(dtype))  # type: ignore[union-attr]


def test_a_mixture_of_experts_computes_what_it_does_on_the_cpu() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    ours, tokens = copy.deepcopy(model).to("ltc"), torch.arange(10).view(2, 5)
    for module, given in ((model, tokens), (ours, lazy(tokens))):
        module(given, labels=given).loss.backward()
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
