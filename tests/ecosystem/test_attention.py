"""Forms of attention on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import torch_ltc
from tests.ecosystem.support import compare
from tests.semantics.support import observe
from torch_ltc.errors import LtcError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


def operands(device: str, length: int = 20) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, length, 8).to(device) for _ in range(3)]


# ---- flex_attention -------------------------------------------------------------------------------------------------

Score = Any


def near(score: Score, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score - (query - key).abs() * 0.1


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def tensors(
    device: str, key_heads: int = 4, length: int = 20, keys: int = 20, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((4, length), (key_heads, keys), (key_heads, keys))
    made = [torch.randn(2, heads, count, 8, dtype=dtype).to(device) for heads, count in shapes]
    return [tensor.requires_grad_() for tensor in made]


def _plain(device: str) -> Any:
    leaves = tensors(device)
    return leaves, lambda: flex_attention(*leaves)


def _score(device: str) -> Any:
    leaves = tensors(device, length=7)
    return leaves, lambda: flex_attention(*leaves, score_mod=near, scale=0.3)


def _grouped(device: str) -> Any:
    leaves = tensors(device, key_heads=2)
    return leaves, lambda: flex_attention(*leaves, score_mod=near, enable_gqa=True)


def _half(device: str) -> Any:
    leaves = tensors(device, dtype=torch.bfloat16)
    return leaves, lambda: flex_attention(*leaves, score_mod=near)


def _blocks(device: str) -> Any:
    leaves = tensors(device, length=130, keys=130)
    mask = create_block_mask(causal, None, None, 130, 130, device=device)
    return leaves, lambda: flex_attention(*leaves, block_mask=mask)


def _laid_out_by_position(device: str) -> Any:
    leaves = tensors(device)
    return leaves, lambda: flex_attention(*[t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves])


def _captured(device: str) -> Any:
    leaves = tensors(device)
    torch.manual_seed(1)
    bias, slopes = torch.randn(39).to(device).requires_grad_(), torch.rand(4).to(device)
    documents = (torch.arange(20) // 7).to(device)

    def score(score: Score, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score * slopes[head] + bias[query - key + 19]

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return documents[query] == documents[key]

    blocks = create_block_mask(mask, None, None, 20, 20, device=device)
    return [*leaves, bias], lambda: flex_attention(*leaves, score_mod=score, block_mask=blocks)


def _sums(device: str) -> Any:
    leaves = tensors(device)

    def attend() -> list[Tensor]:
        out, more = flex_attention(*leaves, score_mod=near, return_aux=AuxRequest(lse=True))
        return [out, more.lse]

    return leaves, attend


def _sums_alone(device: str) -> Any:
    leaves, attend = _sums(device)
    return leaves[:2], lambda: attend()[1:]


ATTENTIONS = [_plain, _score, _grouped, _half, _blocks, _laid_out_by_position, _captured, _sums, _sums_alone]


def outputs(attend: Callable[[], Any]) -> list[Tensor]:
    found = attend()
    return found if isinstance(found, list) else [found]


def trained(make: Callable[[str], Any], device: str) -> tuple[list[Tensor], list[Tensor]]:
    """The results of an attention, and the gradients of its leaves."""
    leaves, attend = make(device)
    found = outputs(attend)
    torch.stack([out.float().square().sum() for out in found]).sum().backward()
    return found, [leaf.grad for leaf in leaves]


@pytest.fixture
def gradients_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has a backward of `flex_attention` in its eager form, and refuses it on the CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)


@pytest.mark.usefixtures("gradients_on_the_cpu")
@pytest.mark.parametrize("make", ATTENTIONS)
def test_flex_attention_is_one_call_and_its_backward_another(make: Any) -> None:
    found, gradients = trained(make, "ltc")
    calls = torch_ltc.debug.dump_ir([*found, *gradients])
    assert calls.count("torch_ltc::flex_attention(") == 1
    assert calls.count("torch_ltc::flex_attention_backward(") == 1
    assert "bmm" not in calls
    assert "softmax" not in calls
    expected, expected_gradients = trained(make, "cpu")
    for one, other in zip([*found, *gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=0, atol=0)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_with_a_score_function(compiled: bool) -> None:
    def attend(device: str) -> Tensor:
        torch._dynamo.reset()
        function = torch.compile(flex_attention) if compiled and device == "ltc" else flex_attention
        return function(*operands(device), score_mod=near)

    compare("torch", f"flex_attention, score_mod{', compiled' if compiled else ''}", attend)


@pytest.mark.compilers
@pytest.mark.usefixtures("gradients_on_the_cpu")
@pytest.mark.parametrize("make", ATTENTIONS)
def test_flex_attention_on_inductor(make: Any) -> None:
    tolerance = 0.05 if make is _half else 1e-5
    expected, expected_gradients = trained(make, "cpu")
    with torch_ltc.use_backend("inductor"):
        _, attend = make("ltc")
        for _ in range(4):
            with torch.no_grad(), observe() as seen:
                results = [out.cpu() for out in outputs(attend)]
            torch_ltc.wait_for_compiles()
        assert [run.backend for run in seen.runs] == ["inductor"]
        for _ in range(4):
            found, gradients = trained(make, "ltc")
            computed = [tensor.detach().cpu() for tensor in (*found, *gradients)]
            torch_ltc.wait_for_compiles()
    wanted = [tensor.detach() for tensor in (*expected, *expected, *expected_gradients)]
    for one, other in zip([*results, *computed], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.compilers
def test_an_index_that_may_be_wrong_is_left_to_pytorchs_kernel() -> None:
    places = torch.arange(20).to("ltc")
    table = torch.randn(20).to("ltc")

    def run() -> Tensor:
        return flex_attention(*operands("ltc"), score_mod=lambda score, b, h, m, n: score + table[places[m]])

    with torch_ltc.use_backend("inductor"), torch.no_grad():
        expected = run().cpu()
        for _ in range(3):
            found = run().cpu()
            torch_ltc.wait_for_compiles()
        torch.testing.assert_close(found, expected)
        places[3] = 20
        with pytest.raises(IndexError, match=r"out of range|out of bounds"):
            run().cpu()


def test_flex_attention_casts_under_autocast_as_on_the_cpu() -> None:
    def attend(device: str) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return flex_attention(*operands(device), score_mod=near)

    found, expected = attend("ltc"), attend("cpu")
    assert found.dtype is torch.bfloat16
    assert torch.equal(found.cpu(), expected)


def test_a_function_that_dynamo_has_not_seen_is_recorded_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    bias = torch.randn(20)

    def attend(device: str) -> Tensor:
        moved = bias.to(device)
        return flex_attention(*operands(device), score_mod=lambda score, b, h, m, n: score + moved[m])

    found = attend("ltc")
    assert "torch_ltc::flex_attention" not in torch_ltc.debug.dump_ir([found])
    assert torch.equal(found.cpu(), attend("cpu"))


def test_sequences_of_several_lengths_are_right() -> None:
    torch._dynamo.reset()
    for length in (5, 6, 9, 6, 12, 13):
        found, expected = (flex_attention(*operands(device, length), score_mod=near) for device in ("ltc", "cpu"))
        assert torch.equal(found.cpu(), expected)


# ---- other forms ----------------------------------------------------------------------------------------------------


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
