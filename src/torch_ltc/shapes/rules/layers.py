"""Layers of networks: convolutions, norms, pools, embeddings, attention, losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.shapes.broadcasting import is_odd
from torch_ltc.shapes.rules.meta_kernels import copied
from torch_ltc.shapes.table import contiguous, fresh, fresh_contiguous, masked, require, rule, several

Sizes = Sequence[int]

_FULL_PRECISION = (torch.float32, torch.float64)
_INDICES = (torch.int64, torch.int32)
_NO_REDUCTION = 0


def _all_contiguous(dtype: torch.dtype, *specs: Spec | None) -> None:
    """Row-major operands of one floating dtype; anything else is left to PyTorch."""
    require(dtype.is_floating_point)
    for spec in specs:
        require(spec is None or (spec.contiguous and spec.dtype is dtype))


def _all(wanted: Spec, *specs: Spec | None) -> None:
    """Operands of this spec, where they are given."""
    require(all(spec is None or spec is wanted for spec in specs))


# ---- convolutions ---------------------------------------------------------------------------------------------------


def _windows(lengths: Sizes, kernel: Sizes, *steps: Sizes) -> list[int]:
    """The number of windows along each dimension; `steps` are stride, padding and dilation."""
    rank = len(lengths)
    each = [list(values) * rank if len(values) == 1 else values for values in (kernel, *steps)]
    require(all(len(values) == rank for values in each))
    made = []
    for length, size, stride, padding, dilation in zip(lengths, *each, strict=True):
        require(stride > 0 and padding >= 0 and dilation > 0 and size > 0)
        made.append((length + 2 * padding - dilation * (size - 1) - 1) // stride + 1)
    require(min(made) > 0)
    return made


@rule("convolution")
def convolution(image: Spec, weight: Spec, bias: Spec | None, *options: Any) -> Returns:
    """A convolution of a batch."""
    stride, padding, dilation, transposed, _, groups = options
    _all_contiguous(image.dtype, image, weight, bias)
    rank = len(image.size) - 2
    require(not transposed and rank in (1, 2, 3) and len(weight.size) == rank + 2 and groups > 0)
    require(image.size[1] == weight.size[1] * groups and weight.size[0] % groups == 0)
    require(bias is None or bias.size == weight.size[:1])
    lengths = _windows(image.size[2:], weight.size[2:], stride, padding, dilation)
    return fresh_contiguous(image.dtype, (image.size[0], weight.size[0], *lengths))


@rule("convolution_backward")
def convolution_backward(gradient: Spec, image: Spec, weight: Spec, bias_sizes: Sizes | None, *options: Any) -> Returns:
    """The gradients of a convolution."""
    *forward, mask = options
    require(convolution(image, weight, None, *forward) == fresh(gradient))
    return masked(mask, image, weight, contiguous(image.dtype, weight.size[:1]))


# ---- norms ----------------------------------------------------------------------------------------------------------


@rule("native_layer_norm")
def layer_norm(image: Spec, shape: Sizes, weight: Spec | None, bias: Spec | None, eps: float) -> Returns:
    """The normalised tensor, means and deviations."""
    require(image.dtype in _FULL_PRECISION)
    _all_contiguous(image.dtype, image, weight, bias)
    wanted = tuple(shape)
    require(wanted and len(wanted) <= len(image.size) and image.size[-len(wanted) :] == wanted)
    require((weight is None or weight.size == wanted) and (bias is None or bias.size == wanted))
    outer = (*image.size[: -len(wanted)], *(1 for _ in wanted))
    statistics = contiguous(image.dtype, outer)
    return several(image, statistics, statistics)


@rule("native_layer_norm_backward")
def layer_norm_backward(gradient: Spec, image: Spec, shape: Sizes, mean: Spec, deviation: Spec, *rest: Any) -> Returns:
    """The gradients of a layer norm."""
    weight, bias, mask = rest
    require(gradient is image and weight is not None and bias is not None)
    require(layer_norm(image, shape, weight, bias, 0.0) == several(image, mean, deviation))
    affine = contiguous(image.dtype, shape)
    return masked(mask, image, affine, affine)


def _batch_statistics(image: Spec, training: bool, *specs: Spec | None) -> Spec:
    """The spec of means and deviations of a batch, which those of the other operands must be."""
    require(training and len(image.size) >= 2 and image.dtype in _FULL_PRECISION and image.contiguous)
    affine = contiguous(image.dtype, image.size[1:2])
    _all(affine, *specs)
    return affine


@rule("native_batch_norm", "_native_batch_norm_legit")
def batch_norm(image: Spec, *rest: Any) -> Returns:
    """The normalised tensor, means and deviations of the batch."""
    *affines, training, _, _ = rest
    require(settings.device_type == "cpu")
    affine = _batch_statistics(image, training, *affines)
    return several(image, affine, affine)


@rule("native_batch_norm_backward")
def batch_norm_backward(gradient: Spec, image: Spec, weight: Spec | None, *rest: Any) -> Returns:
    """The gradients of a batch norm."""
    *affines, training, _, mask = rest
    require(gradient is image and weight is not None and None not in affines[2:])
    affine = _batch_statistics(image, training, weight, *affines)
    return masked(mask, image, affine, affine)


# ---- pools ----------------------------------------------------------------------------------------------------------


def _pooled(spec: Spec, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool) -> tuple[int, ...]:
    require(spec.contiguous and spec.dtype.is_floating_point and len(spec.size) == 4 and not ceil)
    require(2 * max(padding) <= min(kernel))
    return (*spec.size[:2], *_windows(spec.size[2:], kernel, stride or kernel, padding, dilation))


@rule("max_pool2d_with_indices")
def max_pool(spec: Spec, *options: Any) -> Returns:
    """The largest of each window, and where it is."""
    size = _pooled(spec, *options)
    return several(contiguous(spec.dtype, size), contiguous(torch.int64, size))


@rule("max_pool2d_with_indices_backward")
def max_pool_backward(gradient: Spec, spec: Spec, *rest: Any) -> Returns:
    """The gradient of the former."""
    *options, indices = rest
    require(max_pool(spec, *options) == several(gradient, indices))
    return fresh(spec)


@rule("avg_pool2d")
def mean_pool(
    spec: Spec, kernel: Sizes, stride: Sizes, padding: Sizes, ceil: bool, include_padding: bool, divisor: int | None
) -> Returns:
    """The mean of each window."""
    require(divisor is None)
    return fresh_contiguous(spec.dtype, _pooled(spec, kernel, stride, padding, (1, 1), ceil))


@rule("avg_pool2d_backward")
def mean_pool_backward(gradient: Spec, spec: Spec, *options: Any) -> Returns:
    """The gradient of the former."""
    require(mean_pool(spec, *options) == fresh(gradient))
    return fresh(spec)


@rule("_adaptive_avg_pool2d")
def adaptive_pool(spec: Spec, size: Sizes) -> Returns:
    """Means of as many windows as are asked for."""
    require(spec.contiguous and spec.dtype.is_floating_point and len(spec.size) == 4 and len(size) == 2)
    return fresh_contiguous(spec.dtype, (*spec.size[:2], *size))


# ---- embeddings and attention ---------------------------------------------------------------------------------------


@rule("embedding")
def embedding(weight: Spec, indices: Spec, padding: int, scale: bool, sparse: bool) -> Returns:
    """A row of the table for each index."""
    require(len(weight.size) == 2 and indices.dtype in _INDICES and indices.contiguous)
    return fresh_contiguous(weight.dtype, (*indices.size, weight.size[1]))


@rule("embedding_dense_backward")
def embedding_backward(gradient: Spec, indices: Spec, rows: int, padding: int, scale: bool) -> Returns:
    """The gradient of the table."""
    require(indices.dtype in _INDICES and gradient.size[:-1] == indices.size and gradient.dtype in _FULL_PRECISION)
    require(rows > 0 and gradient.size)
    return fresh_contiguous(gradient.dtype, (rows, gradient.size[-1]))


@rule("_scaled_dot_product_flash_attention_for_cpu")
def attention(
    query: Spec, key: Spec, value: Spec, dropout: float, causal: bool, mask: Spec | None, scale: float | None
) -> Returns:
    """The values, weighted, and the sums that the weights were divided by."""
    require(len(query.size) == 4 and len(key.size) == 4 and key.size == value.size and dropout == 0.0)
    require(query.dtype in _FULL_PRECISION and query.dtype is key.dtype and key.dtype is value.dtype)
    require(query.size[:2] == key.size[:2] and query.size[3] == key.size[3])
    require(mask is None or (mask.dtype is query.dtype and len(mask.size) in (2, 4)))
    batch, heads, length, _ = query.size
    out = make_spec(query.dtype, query.size, _attended(query))
    return several(out, make_spec(query.dtype, (batch, heads, length), (length * heads, 1, heads)))


def _attended(query: Spec) -> tuple[int, ...]:
    if not is_odd(query):
        return copied(query).stride
    # One position, as when words are generated one by one: a dense query keeps its strides, also those of length 1.
    extent = 1
    for stride, length in sorted((s, n) for s, n in zip(query.stride, query.size, strict=True) if n != 1):
        require(stride == extent)
        extent *= length
    return query.stride


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    gradient: Spec, query: Spec, key: Spec, value: Spec, out: Spec, sums: Spec, *rest: Any
) -> Returns:
    """The gradients of query, key and value."""
    require(len(query.size) == 4 and key.size == value.size and gradient.size == query.size == out.size)
    require(query.dtype in _FULL_PRECISION)
    return several(*(_rows_first(spec) for spec in (query, key, value)))


def _rows_first(spec: Spec) -> Spec:
    _, heads, length, width = spec.size
    return make_spec(spec.dtype, spec.size, (length * heads * width, width, heads * width, 1))


# ---- losses ---------------------------------------------------------------------------------------------------------


@rule("nll_loss_forward")
def nll_loss(spec: Spec, target: Spec, weight: Spec | None, reduction: int, ignored: int) -> Returns:
    """The loss, and what it was divided by."""
    _check_classes(spec, target, weight)
    size = spec.size[:1] if reduction == _NO_REDUCTION else ()
    return several(contiguous(spec.dtype, size), contiguous(spec.dtype, ()))


@rule("nll_loss_backward")
def nll_loss_backward(gradient: Spec, spec: Spec, *rest: Any) -> Returns:
    """The gradient of the scores."""
    *forward, divisor = rest
    require(nll_loss(spec, *forward) == several(gradient, divisor))
    return fresh(spec)


def _check_classes(spec: Spec, target: Spec, weight: Spec | None) -> None:
    require(len(spec.size) == 2 and spec.contiguous and spec.dtype.is_floating_point)
    require(target.size == spec.size[:1] and target.dtype is torch.int64)
    require(weight is None or (weight.size == spec.size[1:] and weight.dtype is spec.dtype))


@rule("mse_loss")
def squared_error(spec: Spec, target: Spec, reduction: int) -> Returns:
    """The squared difference, or what becomes of it."""
    require(spec is target and spec.contiguous and spec.dtype.is_floating_point)
    return fresh(spec) if reduction == _NO_REDUCTION else fresh_contiguous(spec.dtype, ())


@rule("mse_loss_backward")
def squared_error_backward(gradient: Spec, spec: Spec, target: Spec, reduction: int) -> Returns:
    """The gradient of the former."""
    require(squared_error(spec, target, reduction) == fresh(gradient))
    return fresh(spec)
