"""Rules of operators that compute an image of another size: interpolation and adaptive mean pooling.

Each of them is linear and treats one dimension after the other: a matrix per dimension, made when the program is
compiled, says how much each input pixel gives to each output pixel. The gradient is the product with the transposed
matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from torch_ltc.backends.xla.promotion import widen
from torch_ltc.backends.xla.rules_matmul import matmul
from torch_ltc.backends.xla.table import add_rules

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


def _nearest(shift: float) -> Maker:
    def make(source: int, target: int, align: bool, factor: float | None) -> Matrix:
        scale = np.float32(_scale(source, target, False, factor))
        columns = np.floor((np.arange(target, dtype=np.float32) + np.float32(shift)) * scale)
        return _filled(source, target, [columns], [np.ones(target)])

    return make


def _linear_weight(distance: Matrix) -> Matrix:
    return np.maximum(1 - distance, 0)


def _cubic_weight(distance: Matrix, sharpness: float) -> Matrix:
    near = ((sharpness + 2) * distance - (sharpness + 3)) * distance**2 + 1
    far = ((sharpness * distance - 5 * sharpness) * distance + 8 * sharpness) * distance - 4 * sharpness
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _interpolated(reach: int, weight: Callable[[Matrix], Matrix]) -> Maker:
    """Interpolation; places outside the image are its border."""

    def make(source: int, target: int, align: bool, factor: float | None) -> Matrix:
        centres = _centres(source, target, align, factor)
        columns = [np.floor(centres) + i for i in range(1 - reach, 1 + reach)]
        return _filled(source, target, columns, [weight(np.abs(centres - c)) for c in columns])

    return make


def _smooth(weight: Callable[[Matrix], Matrix]) -> Maker:
    """Antialiased interpolation: when the image gets smaller, each output pixel sees more input pixels."""

    def make(source: int, target: int, align: bool, factor: float | None) -> Matrix:
        scale = _scale(source, target, align, factor)
        centres = scale * (np.arange(target)[:, None] + 0.5)
        weights = weight(np.abs(np.arange(source) + 0.5 - centres) / max(scale, 1.0))
        return weights / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)

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


def _forward(make: Maker, spatial: int, aligned: bool, x: Array, size: Sizes, *options: Any) -> Array:
    align, factors = _options(options, spatial, aligned)
    return _resampled(x, _matrices(make, x.shape[x.ndim - spatial :], size, align, factors))


def _backward(
    make: Maker, spatial: int, aligned: bool, gradient: Array, size: Sizes, input_size: Sizes, *options: Any
) -> Array:
    align, factors = _options(options, spatial, aligned)
    source = input_size[len(input_size) - spatial :]
    return _resampled(gradient, [m.T for m in _matrices(make, source, size, align, factors)])


def _adaptive_backward(spatial: int, gradient: Array, x: Array) -> Array:
    size = gradient.shape[x.ndim - spatial :]
    return _backward(_adaptive_mean, spatial, False, gradient, size, x.shape)


def _options(options: tuple[Any, ...], spatial: int, aligned: bool) -> tuple[bool, list[float | None]]:
    """True when corners are aligned (a schema argument of smooth interpolations only), and the scale factors."""
    align = bool(options[0]) if aligned and options else False
    factors = list(options[1 if aligned else 0 :])
    return align, factors + [None] * (spatial - len(factors))


_LINEAR = _interpolated(1, _linear_weight)
_KINDS: list[tuple[str, Maker, int, bool]] = [
    *((f"upsample_nearest{n}d", _nearest(0), n, False) for n in (1, 2, 3)),
    *((f"_upsample_nearest_exact{n}d", _nearest(0.5), n, False) for n in (1, 2, 3)),
    *((f"upsample_{kind}", _LINEAR, n, True) for n, kind in enumerate(("linear1d", "bilinear2d", "trilinear3d"), 1)),
    ("upsample_bicubic2d", _interpolated(2, lambda distance: _cubic_weight(distance, -0.75)), 2, True),
    ("_upsample_bilinear2d_aa", _smooth(_linear_weight), 2, True),
    ("_upsample_bicubic2d_aa", _smooth(lambda distance: _cubic_weight(distance, -0.5)), 2, True),
]
for _name, _make, _spatial, _aligned in _KINDS:
    # PyTorch takes the nearest pixel by indexing, always.
    if "nearest" not in _name:
        add_rules(partial(_forward, _make, _spatial, _aligned), [_name])
    add_rules(partial(_backward, _make, _spatial, _aligned), [f"{_name}_backward"])
for _spatial in (2, 3):
    add_rules(partial(_forward, _adaptive_mean, _spatial, False), [f"_adaptive_avg_pool{_spatial}d"])
    add_rules(partial(_adaptive_backward, _spatial), [f"_adaptive_avg_pool{_spatial}d_backward"])
