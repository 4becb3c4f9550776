"""Rules of matrix products, convolutions and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from torch_ltc.backends.xla.promotion import is_complex, is_floating, widen
from torch_ltc.backends.xla.table import rule

# PyTorch multiplies float32 matrices in float32; XLA would take a faster, coarser path on some devices.
_PRECISION = lax.Precision.HIGHEST


@rule("mm", "bmm")
def matmul(x: Array, y: Array) -> Array:
    """Matrix product, half precision added up in float32."""
    wide = jnp.float32 if is_floating(x) and x.dtype.itemsize == 2 else None
    return jnp.matmul(x, y, precision=_PRECISION, preferred_element_type=wide)


@rule("_trilinear")
def trilinear(x: Array, y: Array, z: Array, *dims: Any) -> Array:
    """Product of three arrays, each given new dimensions, summed."""
    x, y, z = (jnp.expand_dims(each, tuple(new)) for each, new in zip((x, y, z), dims[:3], strict=True))
    return jnp.sum(x * y * z, axis=tuple(dims[3]))


def _convolve(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    spatial = x.ndim - 2
    steps, border, apart = (spread(values, spatial) for values in (stride, padding, dilation))
    wide = jnp.float32 if is_floating(x) and x.dtype.itemsize == 2 else None
    options: dict[str, Any] = {"feature_group_count": groups, "precision": _PRECISION, "preferred_element_type": wide}
    if not transposed:
        pads = [(p, p) for p in border]
        return lax.conv_general_dilated(x, weight, steps, pads, rhs_dilation=apart, **options)
    extra = spread(output_padding, spatial)
    reach = [d * (k - 1) for d, k in zip(apart, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + e) for r, p, e in zip(reach, border, extra, strict=True)]
    kernel = _transposed_kernel(weight, groups)
    ones = [1] * spatial
    return lax.conv_general_dilated(x, kernel, ones, pads, lhs_dilation=steps, rhs_dilation=apart, **options)


def _transposed_kernel(weight: Array, groups: int) -> Array:
    """The kernel of the plain convolution that computes a transposed one: mirrored, inputs and outputs exchanged."""
    mirrored = jnp.flip(weight, tuple(range(2, weight.ndim)))
    inputs, outputs = weight.shape[:2]
    grouped = jnp.reshape(mirrored, (groups, inputs // groups, outputs, *weight.shape[2:]))
    return jnp.reshape(jnp.swapaxes(grouped, 1, 2), (groups * outputs, inputs // groups, *weight.shape[2:]))


def spread(values: Sequence[int], count: int) -> list[int]:
    """One value for each of `count` dimensions."""
    return list(values) * count if len(values) == 1 else list(values)


@rule("convolution", "convolution_overrideable")
def convolution(x: Array, weight: Array, bias: Array | None, *options: Any) -> Array:
    """Convolution over any number of dimensions."""
    result = _convolve(x, weight, *options)
    if bias is None:
        return result
    return result + jnp.reshape(bias.astype(result.dtype), (1, -1) + (1,) * (x.ndim - 2))


@rule("convolution_backward")
def convolution_backward(
    gradient: Array, x: Array, weight: Array, bias_sizes: Sequence[int] | None, *options: Any
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of `convolution`, of which the last option wants some."""
    *settings, output_mask = options

    def forward(x: Array, weight: Array) -> Array:
        return _convolve(x, weight, *settings)

    gradient, x, weight = widen(gradient), widen(x), widen(weight)
    # JAX pulls a gradient back without conjugating it.
    back = jax.vjp(forward, x, weight)[1](jnp.conj(gradient) if is_complex(gradient) else gradient)
    for_x, for_weight = (jnp.conj(each) if is_complex(each) else each for each in back)
    dims = (0, *range(2, gradient.ndim))
    return (
        for_x if output_mask[0] else None,
        for_weight if output_mask[1] else None,
        jnp.sum(gradient, axis=dims) if output_mask[2] else None,
    )


def _scores(query: Array, key: Array, mask: Array | None, is_causal: bool, factor: float) -> Array:
    scores = matmul(query, jnp.swapaxes(key, -2, -1)) * factor
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_)), scores, -jnp.inf)
    return scores if mask is None else scores + widen(mask)


def _factor(query: Array, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _repeated(x: Array, heads: int) -> Array:
    """Keys or values for each head of the query: several heads may share one."""
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def _gathered(gradient: Array, heads: int) -> Array:
    """The gradient of `_repeated`: what belongs to one head of the keys added up."""
    batch, repeated, *rest = gradient.shape
    return jnp.sum(jnp.reshape(gradient, (batch, heads, repeated // heads, *rest)), axis=2)


@rule("_scaled_dot_product_flash_attention_for_cpu")
def attention(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Scaled dot product attention, and the logarithm of the sum of exponentials of each row of scores."""
    query = widen(query)
    key, value = (_repeated(widen(x), query.shape[1]) for x in (key, value))
    scores = _scores(query, key, attn_mask, is_causal, _factor(query, scale))
    total = jax.nn.logsumexp(scores, axis=-1)
    return matmul(_weights(scores, total), value), total


def _weights(scores: Array, total: Array) -> Array:
    # A row that sees nothing attends to nothing.
    return jnp.where(jnp.isneginf(total)[..., None], 0, jnp.exp(scores - total[..., None]))


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    gradient: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `attention` with respect to query, key and value, from what the forward pass kept."""
    heads = key.shape[1]
    gradient, query = widen(gradient), widen(query)
    key, value = (_repeated(widen(x), query.shape[1]) for x in (key, value))
    factor = _factor(query, scale)
    weights = _weights(_scores(query, key, attn_mask, is_causal, factor), widen(logsumexp))
    for_value = matmul(jnp.swapaxes(weights, -2, -1), gradient)
    for_weights = matmul(gradient, jnp.swapaxes(value, -2, -1))
    inner = jnp.sum(gradient * widen(out), axis=-1, keepdims=True)
    for_scores = weights * (for_weights - inner) * factor
    for_key = matmul(jnp.swapaxes(for_scores, -2, -1), query)
    return matmul(for_scores, key), _gathered(for_key, heads), _gathered(for_value, heads)
