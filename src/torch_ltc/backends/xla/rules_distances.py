"""Rules of pairwise distances, histograms and sampling of images at given places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from torch_ltc.backends.xla.promotion import Operand, widen
from torch_ltc.backends.xla.rules_reductions import vector_norm
from torch_ltc.backends.xla.table import rule


def _distance_gradient(gradient: Array, difference: Array, distance: Array, p: float) -> Array:
    """Gradient of the norm of `difference`; zero where the norm has none."""
    gradient, distance = gradient[..., None], distance[..., None]
    size = jnp.abs(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return gradient * jnp.sign(difference)
    if p == math.inf:
        return gradient * jnp.sign(difference) * (size == distance)
    zero = distance == 0
    part = jnp.where(size == 0, 0, difference * jnp.where(size == 0, 1, size) ** (p - 2))
    return jnp.where(zero, 0, gradient * part / jnp.where(zero, 1, distance) ** (p - 1))


@rule("_cdist_forward")
def cdist(x: Array, y: Array, p: float, compute_mode: int | None) -> Array:
    """The distance of each row of `x` from each row of `y`."""
    return vector_norm(x[..., :, None, :] - y[..., None, :, :], p, -1)


@rule("_cdist_backward")
def cdist_backward(gradient: Array, x: Array, y: Array, p: float, distances: Array) -> Array:
    """Gradient of `cdist` with respect to `x`."""
    difference = x[..., :, None, :] - y[..., None, :, :]
    result = jnp.sum(_distance_gradient(gradient, difference, distances, p), axis=-2)
    # Dimensions along which x was repeated to fit y are already part of x here.
    return jnp.reshape(result, jnp.broadcast_shapes(result.shape, x.shape))


def _pairs(rows: int) -> tuple[Array, Array]:
    first, second = np.triu_indices(rows, 1)
    return jnp.asarray(first), jnp.asarray(second)


@rule("_pdist_forward")
def pdist(x: Array, p: float = 2) -> Array:
    """The distance of each row from each later one."""
    first, second = _pairs(x.shape[0])
    return vector_norm(x[first] - x[second], p, -1)


@rule("_pdist_backward")
def pdist_backward(gradient: Array, x: Array, p: float, distances: Array) -> Array:
    """Gradient of `pdist`."""
    first, second = _pairs(x.shape[0])
    if gradient.size == 0:
        return jnp.zeros_like(x)
    part = _distance_gradient(gradient, x[first] - x[second], distances, p)
    return jnp.zeros_like(x).at[first].add(part).at[second].add(-part)


@rule("histc")
def histc(x: Array, bins: int = 100, low: Operand = 0, high: Operand = 0) -> Array:
    """The number of elements in each of `bins` equal intervals; between the extremes if no bounds are given."""
    flat = jnp.ravel(x)
    start, end = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    if flat.size:
        free = start == end
        start, end = jnp.where(free, jnp.min(flat), start), jnp.where(free, jnp.max(flat), end)
    same = start == end
    start, end = jnp.where(same, start - 1, start), jnp.where(same, end + 1, end)
    place = jnp.floor((flat - start) / (end - start) * bins).astype(jnp.int64)
    inside = (flat >= start) & (flat <= end)
    place = jnp.where(inside, jnp.minimum(place, bins - 1), bins)
    return jnp.zeros((bins,), x.dtype).at[place].add(1, mode="drop")


def _unnormalized(place: Array, length: int, align: bool) -> Array:
    """-1 ... 1 as pixels."""
    return (place + 1) / 2 * (length - 1) if align else ((place + 1) * length - 1) / 2


def _bordered(place: Array, length: int, padding: int, align: bool) -> Array:
    """Places outside the image moved inside: 0 leaves them, 1 clips, 2 reflects."""
    if padding == 2:
        low, high = (0.0, float(length - 1)) if align else (-0.5, length - 0.5)
        place = _reflected(place, low, high)
    return jnp.clip(place, 0, length - 1) if padding else place


def _reflected(place: Array, low: float, high: float) -> Array:
    span = high - low
    if span <= 0:
        return jnp.zeros_like(place)
    distance = jnp.abs(place - low)
    turns = jnp.floor(distance / span)
    rest = distance - turns * span
    return jnp.where(turns % 2 == 0, rest + low, high - rest)


def _pixels(x: Array, places: Sequence[Array]) -> Array:
    """The pixels at whole places, zero outside: `(N, C, ...)` from places `(N, ...)`."""
    lengths = x.shape[2:]
    inside = jnp.ones(places[0].shape, jnp.bool_)
    clipped = []
    for place, length in zip(places, lengths, strict=True):
        inside &= (place >= 0) & (place <= length - 1)
        clipped.append(jnp.clip(place, 0, length - 1).astype(jnp.int64))
    batch = jnp.reshape(jnp.arange(x.shape[0]), (-1,) + (1,) * (places[0].ndim - 1))
    where = (batch, slice(None), *clipped)
    found = x[where]
    return jnp.moveaxis(jnp.where(inside[..., None], found, 0), -1, 1)


def _cubic_weights(part: Array) -> list[Array]:
    a = -0.75

    def near(t: Array) -> Array:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: Array) -> Array:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    return [far(part + 1), near(part), near(1 - part), far(2 - part)]


def _sampled(x: Array, grid: Array, mode: int, padding: int, align: bool) -> Array:
    """`x` at the places in `grid`. Modes: 0 linear, 1 nearest, 2 cubic."""
    lengths = x.shape[2:]
    # The grid's last dimension begins with the image's last.
    places = [_unnormalized(grid[..., -1 - d], length, align) for d, length in enumerate(lengths)]
    if mode == 2:
        low = [jnp.floor(place) for place in places]
        weights = [_cubic_weights(place - floor) for place, floor in zip(places, low, strict=True)]
        offsets = range(-1, 3)
    else:
        places = [_bordered(p, n, padding, align) for p, n in zip(places, lengths, strict=True)]
        if mode == 1:
            return _pixels(x, [jnp.round(place) for place in places])
        low = [jnp.floor(place) for place in places]
        weights = [[1 - (place - floor), place - floor] for place, floor in zip(places, low, strict=True)]
        offsets = range(2)
    total: Array | None = None
    for corner in itertools.product(range(len(offsets)), repeat=len(lengths)):
        at = [floor + offsets[i] for floor, i in zip(low, corner, strict=True)]
        if mode == 2:
            at = [_bordered(p, n, padding, align) for p, n in zip(at, lengths, strict=True)]
        weight = math.prod((weights[d][i] for d, i in enumerate(corner)), start=jnp.ones((), x.dtype))
        part = _pixels(x, at) * weight[:, None]
        total = part if total is None else total + part
    assert total is not None
    return total


@rule("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(x: Array, grid: Array, mode: int, padding: int, align_corners: bool) -> Array:
    """`x` at the places in `grid`."""
    return _sampled(widen(x), widen(grid), mode, padding, align_corners)


@rule("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    gradient: Array, x: Array, grid: Array, mode: int, padding: int, align_corners: bool, output_mask: Sequence[bool]
) -> tuple[Array | None, Array | None]:
    """Gradients of `grid_sampler` with respect to the image and the grid."""
    _, back = jax.vjp(lambda x, grid: _sampled(x, grid, mode, padding, align_corners), widen(x), widen(grid))
    for_x, for_grid = back(widen(gradient))
    return for_x if output_mask[0] else None, for_grid if output_mask[1] else None
