"""Rules of operators that rearrange elements. Values never change here, so a view is a pure function like any other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from torch_ltc.backends.xla.promotion import Operand, cast, category, jax_dtype, promote
from torch_ltc.backends.xla.table import rule


@rule("alias", "clone", "lift_fresh", "lift_fresh_copy")
def identity(x: Array, **layout: Any) -> Array:
    """`x` itself: how it lies in memory means nothing here."""
    return x


@rule("copy")
def copy(x: Array, source: Array, non_blocking: bool = False) -> Array:
    """`source` in the shape and dtype of `x`."""
    return jnp.broadcast_to(cast(source, x.dtype), x.shape)


@rule("view", "view_copy")
def view(x: Array, size: Sequence[int]) -> Array:
    """`x` in another shape."""
    if -1 in size:
        known = math.prod(length for length in size if length != -1)
        size = [x.size // known if length == -1 else length for length in size]
    return jnp.reshape(x, tuple(size))


@rule("view.dtype")
def view_dtype(x: Array, dtype: torch.dtype) -> Array:
    """The bits of `x` read as another dtype."""
    target = jax_dtype(dtype)
    if category(x.dtype) == 3 and category(target) == 2:
        parts = jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
        return jnp.reshape(parts, (*x.shape[:-1], -1))
    if category(x.dtype) == 2 and category(target) == 3:
        pairs = jnp.reshape(x, (*x.shape[:-1], -1, 2))
        return lax.complex(pairs[..., 0], pairs[..., 1])
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    ratio = x.dtype.itemsize // max(target.itemsize, 1)
    if x.dtype.itemsize < target.itemsize:
        x = jnp.reshape(x, (*x.shape[:-1], -1, target.itemsize // x.dtype.itemsize))
    if target == jnp.bool_:
        return lax.bitcast_convert_type(x, jnp.uint8) != 0
    result = lax.bitcast_convert_type(x, target)
    return jnp.reshape(result, (*x.shape[:-1], -1)) if ratio > 1 else result


@rule("expand")
def expand(x: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    """`x` repeated along new dimensions and dimensions of length one."""
    missing = len(size) - x.ndim
    lengths = [x.shape[i - missing] if length == -1 else length for i, length in enumerate(size)]
    return jnp.broadcast_to(x, tuple(lengths))


@rule("permute", "permute_copy")
def permute(x: Array, dims: Sequence[int]) -> Array:
    """`x` with its dimensions in another order."""
    return jnp.transpose(x, tuple(dims))


@rule("unsqueeze")
def unsqueeze(x: Array, dim: int) -> Array:
    """`x` with a new dimension of length one."""
    return jnp.expand_dims(x, dim)


@rule("squeeze.dims")
def squeeze(x: Array, dims: Sequence[int]) -> Array:
    """`x` without those of these dimensions that have length one."""
    return jnp.squeeze(x, tuple(d % x.ndim for d in dims if x.shape[d] == 1)) if x.ndim else x


def bounds(length: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Start and end of a slice as PyTorch reads them: negative ones count from the end, too large ones are cut."""
    low, high, _ = slice(start, end).indices(length)
    return low, max(low, high)


@rule("slice.Tensor", "slice_copy.Tensor")
def slice_(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """Every `step`-th element from `start` to `end`."""
    low, high = bounds(x.shape[dim], start, end)
    return lax.slice_in_dim(x, low, high, step, axis=dim)


@rule("select.int", "select_copy.int")
def select(x: Array, dim: int, index: int) -> Array:
    """The sub-array at one index."""
    return lax.index_in_dim(x, index, dim, keepdims=False)


@rule("slice_scatter")
def slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    """`x` with a slice replaced."""
    low, high = bounds(x.shape[dim], start, end)
    where = (slice(None),) * (dim % x.ndim) + (slice(low, high, step),)
    return x.at[where].set(cast(source, x.dtype))


@rule("diagonal")
def diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """A diagonal, as a last dimension."""
    return jnp.diagonal(x, offset, dim1, dim2)


@rule("diagonal_scatter")
def diagonal_scatter(x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """`x` with a diagonal replaced."""
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    places = jnp.arange(source.shape[-1])
    rows, columns = places + max(-offset, 0), places + max(offset, 0)
    return jnp.moveaxis(moved.at[..., rows, columns].set(cast(source, x.dtype)), (-2, -1), (dim1, dim2))


@rule("split_with_sizes")
def split_with_sizes(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    """Consecutive pieces of these lengths."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(lax.slice_in_dim(x, start, start + size, axis=dim))
        start += size
    return pieces


@rule("unbind_copy.int")
def unbind(x: Array, dim: int = 0) -> list[Array]:
    """The sub-arrays at every index."""
    return [select(x, dim, index) for index in range(x.shape[dim])]


@rule("cat")
def cat(arrays: Sequence[Array], dim: int = 0) -> Array:
    """The arrays one after the other. PyTorch ignores empty vectors of whatever shape the others have."""
    arrays = promote(*arrays)
    kept = [x for x in arrays if x.shape != (0,)] or arrays[:1]
    return jnp.concatenate(kept, axis=dim)


@rule("flip")
def flip(x: Array, dims: Sequence[int]) -> Array:
    """`x` with these dimensions reversed."""
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@rule("roll")
def roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    """`x` shifted, what falls off comes back on the other side."""
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@rule("repeat")
def repeat(x: Array, repeats: Sequence[int]) -> Array:
    """`x` laid out like tiles."""
    return jnp.tile(x, tuple(repeats)) if repeats else x


@rule("constant_pad_nd")
def constant_pad_nd(x: Array, pad: Sequence[int], value: Operand = 0) -> Array:
    """`x` with a border; negative widths cut. `pad` begins with the last dimension."""
    widths = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, cast(value, x.dtype), widths)


@rule("unfold")
def unfold(x: Array, dim: int, size: int, step: int) -> Array:
    """Windows of `size` elements, each `step` after the one before, in a new last dimension."""
    if x.ndim == 0:
        return jnp.reshape(x, (1,))[:size]
    starts = jnp.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=dim, mode="clip")
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


@rule("tril")
def tril(x: Array, diagonal: int = 0) -> Array:
    """The lower triangle."""
    return jnp.tril(x, diagonal)


@rule("triu")
def triu(x: Array, diagonal: int = 0) -> Array:
    """The upper triangle."""
    return jnp.triu(x, diagonal)


def transposed(function: Any, example: Array, gradient: Array) -> Array:
    """The gradient of a linear function, at any argument of the shape of `example`."""
    (result,) = jax.linear_transpose(function, example)(gradient)
    return jnp.asarray(result)


def replication_pad(x: Array, pad: Sequence[int]) -> Array:
    """`x` with its border repeated outward."""
    for i in range(len(pad) // 2):
        axis = x.ndim - 1 - i
        places = jnp.arange(-pad[2 * i], x.shape[axis] + pad[2 * i + 1])
        x = jnp.take(x, jnp.clip(places, 0, x.shape[axis] - 1), axis=axis, mode="clip")
    return x


@rule("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(gradient: Array, x: Array, pad: Sequence[int]) -> Array:
    """Gradient of replication padding."""
    return transposed(lambda y: replication_pad(y, pad), x, gradient.astype(x.dtype))
