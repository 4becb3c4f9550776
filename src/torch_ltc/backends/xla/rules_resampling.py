"""Rules of operators that compute an image of another size: interpolation and adaptive mean pooling.

Each of them is linear and treats one dimension after the other: a matrix per dimension, made when the program is
compiled, says how much each input pixel gives to each output pixel. The gradient is the product with the transposed
matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from torch_ltc.backends.xla.promotion import widen
from torch_ltc.backends.xla.rules_matmul import matmul
from torch_ltc.backends.xla.table import add_rules, rule

Matrix = Any
Sizes = Sequence[int]
# Makes the matrix from the input's length, the output's, whether corners are aligned, and the scale asked for.
Maker = Callable[[int, int, bool, float | None], Matrix]


def _scale(source: int, target: int, align: bool, factor: float | None) -> float:
    """Input pixels per output pixel."""
    if align:
        return (source - 1) / (target - 1) if target > 1 else 0.0
    return 1.0 / factor if factor is not None and factor > 0 else source / target


def _centres(source: int, target: int, align: bool, factor: float | None) -> Matrix:
    """The place of each output pixel among the input pixels."""
    scale = np.float32(_scale(source, target, align, factor))
    places = np.arange(target, dtype=np.float32)
    return places * scale if align else (places + np.float32(0.5)) * scale - np.float32(0.5)


def _filled(source: int, target: int, columns: Matrix, weights: Matrix) -> Matrix:
    matrix = np.zeros((target, source), np.float64)
    for column, weight in zip(columns, weights, strict=True):
        np.add.at(matrix, (np.arange(target), np.clip(column, 0, source - 1).astype(np.int64)), weight)
    return matrix


def _nearest(source: int, target: int, align: bool, factor: float | None) -> Matrix:
    scale = np.float32(_scale(source, target, False, factor))
    columns = np.floor(np.arange(target, dtype=np.float32) * scale)
    return _filled(source, target, [columns], [np.ones(target)])


def _nearest_exact(source: int, target: int, align: bool, factor: float | None) -> Matrix:
    scale = np.float32(_scale(source, target, False, factor))
    columns = np.floor((np.arange(target, dtype=np.float32) + np.float32(0.5)) * scale)
    return _filled(source, target, [columns], [np.ones(target)])


def _linear(source: int, target: int, align: bool, factor: float | None) -> Matrix:
    centres = np.maximum(_centres(source, target, align, factor), 0)
    low = np.minimum(np.floor(centres), source - 1)
    part = np.clip(centres - low, 0, 1)
    return _filled(source, target, [low, low + 1], [1 - part, part])


def _cubic_weight(distance: Matrix, sharpness: float) -> Matrix:
    near = ((sharpness + 2) * distance - (sharpness + 3)) * distance**2 + 1
    far = ((sharpness * distance - 5 * sharpness) * distance + 8 * sharpness) * distance - 4 * sharpness
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _cubic(source: int, target: int, align: bool, factor: float | None) -> Matrix:
    centres = _centres(source, target, align, factor)
    low = np.floor(centres)
    columns = [low + i for i in range(-1, 3)]
    return _filled(source, target, columns, [_cubic_weight(np.abs(centres - c), -0.75) for c in columns])


def _smooth(reach: int, weight: Callable[[Matrix], Matrix]) -> Maker:
    """Antialiased interpolation: when the image gets smaller, each output pixel sees more input pixels."""

    def make(source: int, target: int, align: bool, factor: float | None) -> Matrix:
        scale = _scale(source, target, align, factor)
        wide = max(scale, 1.0)
        matrix = np.zeros((target, source), np.float64)
        for row in range(target):
            centre = scale * (row + 0.5)
            first = max(int(centre - reach * wide + 0.5), 0)
            last = min(int(centre + reach * wide + 0.5), source)
            places = np.arange(first, last)
            weights = weight(np.abs((places - centre + 0.5) / wide))
            matrix[row, first:last] = weights / max(weights.sum(), np.finfo(np.float64).tiny)
        return matrix

    return make


def _adaptive_mean(source: int, target: int, align: bool, factor: float | None) -> Matrix:
    matrix = np.zeros((target, source), np.float64)
    for row in range(target):
        first, last = (row * source) // target, -((-(row + 1) * source) // target)
        matrix[row, first:last] = 1 / (last - first)
    return matrix


def _resampled(x: Array, matrices: Sequence[Matrix]) -> Array:
    """`x` multiplied by one matrix in each of its last dimensions."""
    result = widen(x)
    for place, matrix in enumerate(matrices):
        axis = x.ndim - len(matrices) + place
        moved = matmul(jnp.moveaxis(result, axis, -1), jnp.asarray(matrix.T, result.dtype))
        result = jnp.moveaxis(moved, -1, axis)
    return result


def _matrices(make: Maker, source: Sizes, target: Sizes, align: bool, factors: Sequence[float | None]) -> list[Matrix]:
    return [make(s, t, align, f) for s, t, f in zip(source, target, factors, strict=True)]


def _forward(make: Maker, spatial: int, aligned: bool) -> Callable[..., Array]:
    def run(x: Array, size: Sizes, *options: Any) -> Array:
        align, factors = _options(options, spatial, aligned)
        return _resampled(x, _matrices(make, x.shape[x.ndim - spatial :], size, align, factors))

    return run


def _backward(make: Maker, spatial: int, aligned: bool) -> Callable[..., Array]:
    def run(gradient: Array, size: Sizes, input_size: Sizes, *options: Any) -> Array:
        align, factors = _options(options, spatial, aligned)
        source = input_size[len(input_size) - spatial :]
        return _resampled(gradient, [m.T for m in _matrices(make, source, size, align, factors)])

    return run


def _options(options: tuple[Any, ...], spatial: int, aligned: bool) -> tuple[bool, list[float | None]]:
    """True when corners are aligned (a schema argument of smooth interpolations only), and the scale factors."""
    align = bool(options[0]) if aligned and options else False
    factors = list(options[1 if aligned else 0 :])
    return align, factors + [None] * (spatial - len(factors))


_BILINEAR_AA = _smooth(1, lambda distance: np.maximum(1 - distance, 0))
_BICUBIC_AA = _smooth(2, lambda distance: _cubic_weight(distance, -0.5))
_KINDS: list[tuple[str, Maker, int, bool]] = [
    *((f"upsample_nearest{n}d", _nearest, n, False) for n in (1, 2, 3)),
    *((f"_upsample_nearest_exact{n}d", _nearest_exact, n, False) for n in (1, 2, 3)),
    ("upsample_linear1d", _linear, 1, True),
    ("upsample_bilinear2d", _linear, 2, True),
    ("upsample_trilinear3d", _linear, 3, True),
    ("upsample_bicubic2d", _cubic, 2, True),
    ("_upsample_bilinear2d_aa", _BILINEAR_AA, 2, True),
    ("_upsample_bicubic2d_aa", _BICUBIC_AA, 2, True),
]
for _name, _make, _spatial, _aligned in _KINDS:
    # PyTorch takes the nearest pixel by indexing, always.
    if "nearest" not in _name:
        add_rules(_forward(_make, _spatial, _aligned), [_name])
    add_rules(_backward(_make, _spatial, _aligned), [f"{_name}_backward"])


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(x: Array, size: Sizes) -> Array:
    """Mean over windows that divide the image into this many parts."""
    source = x.shape[x.ndim - len(size) :]
    return _resampled(x, _matrices(_adaptive_mean, source, size, False, [None] * len(size)))


@rule("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(gradient: Array, x: Array) -> Array:
    """Gradient of adaptive mean pooling."""
    return _adaptive_backward(gradient, x, 2)


@rule("_adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(gradient: Array, x: Array) -> Array:
    """Gradient of adaptive mean pooling."""
    return _adaptive_backward(gradient, x, 3)


def _adaptive_backward(gradient: Array, x: Array, spatial: int) -> Array:
    source, target = x.shape[x.ndim - spatial :], gradient.shape[x.ndim - spatial :]
    if math.prod(gradient.shape) == 0:
        return jnp.zeros_like(x)
    matrices = _matrices(_adaptive_mean, source, target, False, [None] * spatial)
    return _resampled(gradient, [matrix.T for matrix in matrices])
