"""Operators that PyTorch composes differently for the CPU than for other devices.

CPU eager is the oracle, to the bit: what the CPU computes with one fused kernel, or in another order, is recorded
that way here too. On another physical device PyTorch's own composition is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled, math_sdp_enabled, mem_efficient_sdp_enabled

from torch_ltc.config import settings
from torch_ltc.device.kernels import Kernel
from torch_ltc.native.recording import native
from torch_ltc.program.spec import spec_of
from torch_ltc.pytorch.private import (
    attention_choice,
    no_function_transforms,
    overrideable_sdp_enabled,
    sdp_priority_order,
)
from torch_ltc.record.buffer import physical_device

aten = torch.ops.aten
_flash_on_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
# What `torch._fused_sdp_choice` answers.
_MATH, _FLASH, _EFFICIENT, _CUDNN = 0, 1, 2, 3
# What native/attention.cpp does with a call; the fused kernels of CUDA are this much above the answer.
_BY_PYTHON, _BY_MATH, _ON_CPU, _FUSED = 0, 1, 2, 2
_MOST_CHOICES = 10_000
_choices: dict[Any, int] = {}


def _stand_in(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    spec = spec_of(tensor)
    # Not `requires_grad_` afterwards, which function transforms refuse.
    like: dict[str, Any] = {"dtype": spec.dtype, "device": physical_device(), "requires_grad": tensor.requires_grad}
    return torch.empty_strided(spec.size, spec.stride, **like)


@cache
def _check_ranks(*operands: tuple[torch.dtype, int] | None) -> None:
    """Raise what eager raises for operands of these dtypes and ranks, before all else and on any device; sizes are
    checked by the kernel that it chooses."""
    made = [None if o is None else torch.empty((1,) * o[1], dtype=o[0], device="meta") for o in operands]
    torch.nn.functional.scaled_dot_product_attention(*made)  # type: ignore[arg-type]


def _attention_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> int:
    """The attention kernel that eager chooses on the physical device for tensors of these shapes. Raises what eager
    raises where it takes none."""
    # Sizes and strides, not specs: a third of the time, and neither offsets nor lazy bits are asked about.
    known = (
        (query.size(), query.stride(), query.dtype, query.requires_grad),
        (key.size(), key.stride(), key.dtype, key.requires_grad),
        (value.size(), value.stride(), value.dtype, value.requires_grad),
        None if mask is None else (mask.size(), mask.stride(), mask.dtype, mask.requires_grad),
        (dropout_p, is_causal, scale, enable_gqa, torch.is_grad_enabled(), settings.device_type),
        (flash_sdp_enabled(), mem_efficient_sdp_enabled(), math_sdp_enabled(), cudnn_sdp_enabled()),
        (overrideable_sdp_enabled(), *sdp_priority_order()),
    )
    choice = _choices.get(known)
    if choice is None:
        tensors = (query, key, value, mask)
        with no_function_transforms():
            _check_ranks(*(None if t is None else (t.dtype, t.dim()) for t in tensors))
            made: list[Any] = [_stand_in(t) for t in tensors]
            if mask is not None and mask.dtype is torch.bool:
                made[3] = made[3].to(query.dtype)
            choice = int(attention_choice(*made, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa))
        if not all(tensor.numel() for tensor in (query, key, value)):
            # The fused kernels divide by sizes: eager does not call them, whatever the answer is.
            choice = _MATH
        if len(_choices) >= _MOST_CHOICES:
            _choices.clear()
        _choices[known] = choice
    return choice


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`aten::scaled_dot_product_attention`: CPU eager's fused kernel where it would take it, else the plain formula."""
    mask = attn_mask
    choice = _attention_choice(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    if native is not None:
        plan = _plan(choice, query, value, mask, dropout_p, enable_gqa)
        native.remember_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, plan)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if query.dim() == 3 and choice in _ON_CUDA:
        # From PyTorch 2.14 on: the fused kernels take four dimensions alone, and eager adds one.
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 3 else mask
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ).squeeze(0)
    if settings.device_type == "cuda":
        if _is_fused_on_cuda(choice, query, value, mask, dropout_p, enable_gqa):
            on_cuda: torch.Tensor = _ON_CUDA[choice](query, key, value, is_causal, scale)
            return on_cuda
    elif choice == _FLASH:
        out: torch.Tensor = _flash_on_cpu(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
        return out
    math = aten._scaled_dot_product_attention_math
    result: torch.Tensor = math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _plan(
    choice: int, query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float, enable_gqa: bool
) -> int:
    """What native/attention.cpp does with a call like this one, in the way of `scaled_dot_product_attention`."""
    if query.dim() == 3 and choice in _ON_CUDA:
        return _BY_PYTHON
    if settings.device_type == "cuda":
        return choice + _FUSED if _is_fused_on_cuda(choice, query, value, mask, dropout_p, enable_gqa) else _BY_MATH
    return _ON_CPU if choice == _FLASH else _BY_MATH


def _is_fused_on_cuda(
    choice: int, query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float, enable_gqa: bool
) -> bool:
    """The fused kernels would pad a mask and odd sizes, and draw dropout from CUDA's own generator."""
    as_they_are = mask is None and not dropout_p and not enable_gqa
    return as_they_are and query.size(-1) % 8 == 0 and value.size(-1) == query.size(-1) and choice in _ON_CUDA


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _flash(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> Any:
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[0]


def _efficient(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> Any:
    graph = _needs_gradient(query, key, value)
    fused = aten._scaled_dot_product_efficient_attention
    return fused(query, key, value, None, graph, 0.0, is_causal, scale=scale)[0]


def _cudnn(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> Any:
    graph = _needs_gradient(query, key, value)
    fused = aten._scaled_dot_product_cudnn_attention
    return fused(query, key, value, None, graph, 0.0, is_causal, False, scale=scale)[0]


_ON_CUDA: dict[int, Callable[..., Any]] = {_FLASH: _flash, _EFFICIENT: _efficient, _CUDNN: _cudnn}


def pack_padded_sequence(
    sequence: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel of `aten::_pack_padded_sequence`: the lengths are on the CPU, so the result's size is known at once.

    The sizes of the batches stay on the CPU, where recurrent networks look at them.
    """
    sizes = lengths.tolist()
    if not sizes or min(sizes) <= 0:
        raise RuntimeError("Length of all samples has to be greater than 0, but found an element in 'lengths' <= 0")
    if any(a < b for a, b in itertools.pairwise(sizes)):
        raise RuntimeError("`lengths` array must be sorted in decreasing order when `enforce_sorted` is True.")
    steps = sequence.transpose(0, 1) if batch_first else sequence
    batches = [sum(size > step for size in sizes) for step in range(sizes[0])]
    parts, start = [], 0
    for batch, group in itertools.groupby(batches):
        end = start + len(list(group))
        parts.append(steps[start:end, :batch].reshape(-1, *steps.shape[2:]))
        start = end
    return torch.cat(parts), torch.tensor(batches, dtype=torch.int64, device="cpu")


KERNELS: dict[str, Kernel] = {"aten::_pack_padded_sequence": pack_padded_sequence}
COMPOSITES: dict[str, Kernel] = {
    "aten::scaled_dot_product_attention": scaled_dot_product_attention,
}
