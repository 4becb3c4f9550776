"""Group normalization of images in channels_last: on the CPU it keeps the format, on CUDA it is row-major.

Autograd's formula makes gradient and input row-major for every device but the CPU: the gradient would have other
strides than eager's, and other last bits. PyTorch's composition takes this device for one that keeps the format, and
kernels of CUDA refuse it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.device.kernels import Kernel
from torch_ltc.device.registration import composed
from torch_ltc.pytorch.private import dispatch_modes, forward_ad, function_transforms

aten = torch.ops.aten
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Autograd's kernel of `aten::group_norm`."""
    if settings.device_type != "cpu":
        return row_major_group_norm(input, num_groups, weight, bias, eps, cudnn_enabled)
    if not _keeps_format(input) or not _are_usual(input, num_groups, weight, bias):
        return composed(aten.group_norm.default, input, num_groups, weight, bias, eps, cudnn_enabled)
    sizes = (input.size(0), input.size(1), math.prod(input.shape[2:]), num_groups)
    given = [None if tensor is None else tensor.contiguous() for tensor in (weight, bias)]
    return _apply(input, *given, *sizes, eps)[0]


def row_major_group_norm(input: torch.Tensor, *rest: Any) -> Any:
    """Kernel of `aten::group_norm` without autograd, and of CUDA with it."""
    given = input if settings.device_type == "cpu" else input.contiguous()
    return composed(aten.group_norm.default, given, *rest)


def _keeps_format(input: torch.Tensor) -> bool:
    """True where CPU eager's derivative differs from that of other devices, and nobody looks at it on the way."""
    memory_format = _FORMATS.get(input.dim())
    if memory_format is None or input.is_contiguous() or not input.is_contiguous(memory_format=memory_format):
        return False
    watched = dispatch_modes() or function_transforms() or forward_ad._current_level >= 0
    return torch.is_grad_enabled() and not watched


def _are_usual(input: torch.Tensor, num_groups: int, *others: torch.Tensor | None) -> bool:
    """True for sizes that PyTorch accepts, of which something requires a gradient."""
    channels = input.size(1)
    right = all(tensor is None or tuple(tensor.shape) == (channels,) for tensor in others)
    wanted = any(tensor is not None and tensor.requires_grad for tensor in (input, *others))
    return right and wanted and num_groups > 0 and channels % num_groups == 0


class _GroupNorm(torch.autograd.Function):
    """`aten::native_group_norm` with the derivative that it has on the CPU."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, *sizes_and_eps: Any) -> Any:
        out, mean, deviation = aten.native_group_norm.default(input, weight, bias, *sizes_and_eps)
        ctx.save_for_backward(input, weight, bias, mean, deviation)
        ctx.sizes_and_eps = sizes_and_eps
        ctx.set_materialize_grads(False)
        return out, mean, deviation

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight, bias, mean, deviation = ctx.saved_tensors
        none = [None] * len(ctx.sizes_and_eps)
        if torch.is_grad_enabled() or grads[1] is not None or grads[2] is not None:
            return *_differentiable(ctx, (input, weight, bias), grads), *none
        if grads[0] is None:
            return None, None, None, *none
        grad = grads[0].contiguous(memory_format=_FORMATS[input.dim()])
        sizes, mask = ctx.sizes_and_eps[:-1], ctx.needs_input_grad[:3]
        made = aten.native_group_norm_backward.default(grad, input, mean, deviation, weight, *sizes, mask)
        return *made, *none


def _differentiable(ctx: Any, inputs: tuple[Any, ...], grads: tuple[Any, ...]) -> list[Any]:
    """The gradients by PyTorch's formula, which can be differentiated again and has no kernel of its own."""
    with torch.enable_grad():
        results = aten.native_group_norm.default(*inputs, *ctx.sizes_and_eps)
    given = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    wanted = [tensor for tensor, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    outputs, weights = zip(*given, strict=True)
    made = iter(torch.autograd.grad(outputs, wanted, weights, create_graph=torch.is_grad_enabled()))
    return [next(made) if needed else None for needed in ctx.needs_input_grad[:3]]


_apply: Any = _GroupNorm.apply
AUTOGRAD: dict[str, Kernel] = {"aten::group_norm": group_norm}
COMPOSED: dict[str, Kernel] = {"aten::group_norm": row_major_group_norm}
