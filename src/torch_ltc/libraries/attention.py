"""Attention of nested tensors with the jagged layout.

On the CPU it goes by way of strided nested tensors. It is one recorded call here, on values and offsets, that does on
the physical tensors what eager does; its backward is another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.lowering.own_operators import define, differentiate
from torch_ltc.pytorch.nested import check_attention, from_values, with_autograd
from torch_ltc.pytorch.patches import replaces
from torch_ltc.record.call_site import current_source

__all__: list[str] = []


_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor offsets, Tensor key_offsets, float? scale"


def _attend(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, key_offsets: Tensor, scale: float | None
) -> Tensor:
    """Eager's attention of jagged tensors with these values (positions, heads, features); the values of its result."""
    queries = torch.nested.nested_tensor_from_jagged(query, offsets).transpose(1, 2)
    # The sizes of nested tensors are equal if their offsets are one tensor.
    keys = torch.nested.nested_tensor_from_jagged(key, key_offsets).transpose(1, 2)
    values = torch.nested.nested_tensor_from_jagged(value, key_offsets).transpose(1, 2)
    out = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return out.transpose(1, 2).values().contiguous()


def _attend_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The gradients of the values, by PyTorch's autograd."""
    with with_autograd():
        leaves: list[Any] = [tensor.detach().requires_grad_() for tensor in given[:3]]
        found = torch.autograd.grad(_attend(*leaves, *given[3:]), leaves, grad)
    return tuple([tensor.contiguous() for tensor in found])


def _infer(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((query.size(0), query.size(1), value.size(2)))


def _infer_backward(grad: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    return tuple([torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in operands[:3]])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.torch_ltc.jagged_attention_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*gradients, None, None, None)


def _define() -> None:
    """The operators `torch_ltc::jagged_attention` and `torch_ltc::jagged_attention_backward`."""
    forward = define(f"jagged_attention({_ARGUMENTS}) -> Tensor", _attend, _infer, nested=True)
    backward = f"jagged_attention_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
    define(backward, _attend_backward, _infer_backward, nested=True)
    differentiate(forward, _differentiate, _save)


_define()


@replaces("torch.nested._internal.ops.jagged_scaled_dot_product_attention")
def _jagged_attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def jagged_scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        ragged = all(getattr(tensor, "_ragged_idx", 0) == 2 and tensor.dim() == 4 for tensor in (query, key, value))
        if query.device.type != "ltc" or settings.device_type != "cpu" or not ragged or is_causal or enable_gqa:
            # Of these the CPU has none either.
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        check_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if dropout_p > 0.0 or any(tensor.lengths() is not None for tensor in (query, key, value)):
            # No NotImplementedError: PyTorch would go on with another attention.
            raise LtcError(
                "attention of jagged tensors with dropout, or with gaps between the sequences, is not there",
                source=str(current_source()),
                hint="dropout_p=0.0 and nested tensors without gaps, or pad them: torch.nested.to_padded_tensor",
            )
        operands = [_cast(tensor).transpose(1, 2).values() for tensor in (query, key, value)]
        out = torch.ops.torch_ltc.jagged_attention(*operands, query.offsets(), key.offsets(), scale)
        return from_values(out, query).transpose(1, 2)

    return jagged_scaled_dot_product_attention


def _cast(tensor: Any) -> Any:
    """As autocast has it: PyTorch's function for jagged tensors casts by itself."""
    if not torch.is_autocast_enabled("ltc") or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("ltc"))
