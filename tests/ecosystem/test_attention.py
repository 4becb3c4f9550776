"""Forms of attention on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.ecosystem.support import compare

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


def operands(device: str, length: int = 20) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, length, 8).to(device) for _ in range(3)]


def near(score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
    return score - (query - key).abs() * 0.1


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_with_a_score_function(compiled: bool) -> None:
    def attend(device: str) -> Tensor:
        torch._dynamo.reset()
        function = torch.compile(flex_attention) if compiled and device == "ltc" else flex_attention
        return function(*operands(device), score_mod=near)

    compare("torch", f"flex_attention, score_mod{', compiled' if compiled else ''}", attend)


def test_flex_attention_with_a_block_mask_has_gradients() -> None:
    length = 130

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    ours, theirs = ([t.requires_grad_() for t in operands(device, length)] for device in ("ltc", "cpu"))
    mask = create_block_mask(causal, None, None, length, length, device="ltc")
    found = flex_attention(*ours, block_mask=mask)
    # PyTorch has no backward of flex_attention on the CPU.
    expected = F.scaled_dot_product_attention(*theirs, is_causal=True)
    for out in (found, expected):
        out.square().sum().backward()
    for one, other in zip((found, *[t.grad for t in ours]), (expected, *[t.grad for t in theirs]), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=str)
def test_the_kernel_of_attention_is_the_one_that_is_chosen(chosen: SDPBackend) -> None:
    def attend(device: str) -> Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(*operands(device), is_causal=True)

    compare("torch", f"scaled_dot_product_attention, {chosen.name}", attend)
