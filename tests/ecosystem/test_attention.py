"""Forms of attention on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import torch_ltc
from tests.ecosystem.support import compare
from torch_ltc.errors import LtcError

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


def test_attention_of_jagged_tensors_has_gradients() -> None:
    def attend(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        offsets = torch.tensor([0, 3, 7, 8]).to(device)
        values = [torch.randn(8, 2, 4).to(device).requires_grad_() for _ in range(3)]
        jagged = [torch.nested.nested_tensor_from_jagged(value, offsets).transpose(1, 2) for value in values]
        out = F.scaled_dot_product_attention(*jagged, scale=0.3)
        flat = out.transpose(1, 2).values()
        flat.square().sum().backward()
        return [flat, *[value.grad for value in values]]

    compare("torch", "scaled_dot_product_attention, jagged", attend)


def test_attention_of_jagged_tensors_is_one_instruction_with_keys_of_other_lengths() -> None:
    def attend(device: str) -> Tensor:
        torch.manual_seed(0)
        query = torch.nested.nested_tensor_from_jagged(
            torch.randn(5, 2, 4).to(device), torch.tensor([0, 3, 5]).to(device)
        )
        memory = torch.nested.nested_tensor_from_jagged(
            torch.randn(9, 2, 4).to(device), torch.tensor([0, 2, 9]).to(device)
        )
        query, memory = query.transpose(1, 2), memory.transpose(1, 2)
        return F.scaled_dot_product_attention(query, memory, memory).transpose(1, 2).values()

    found = attend("ltc")
    assert torch_ltc.debug.dump_ir([found]).count("torch_ltc::jagged_attention") == 1
    torch.testing.assert_close(found.cpu(), attend("cpu"), rtol=0, atol=0)


def test_attention_of_jagged_tensors_that_is_not_there_is_refused_at_the_call() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.ones(3, 2, 4).to("ltc"), torch.tensor([0, 1, 3]).to("ltc"))
    jagged = jagged.transpose(1, 2)
    with pytest.raises(RuntimeError, match=r"No viable backend"):
        F.scaled_dot_product_attention(jagged, jagged, jagged, is_causal=True)
    with pytest.raises(LtcError, match=r"dropout_p=0\.0"):
        F.scaled_dot_product_attention(jagged, jagged, jagged, dropout_p=0.5)


def test_variable_length_attention_is_refused_at_the_call_as_on_the_cpu() -> None:
    for device in ("cpu", "ltc"):
        values, offsets = torch.ones(3, 2, 8).to(device), torch.tensor([0, 1, 3], dtype=torch.int32).to(device)
        with pytest.raises(NotImplementedError, match=r"_flash_attention_forward"):
            varlen_attn(values, values, values, offsets, offsets, 2, 2)
