"""Rules of operators that rearrange elements or make arrays of numbers. Values never change here, so that a view is a
pure function like any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from torch_ltc.backends.xla.promotion import Operand, cast, category, jax_dtype, promote, widen
from torch_ltc.backends.xla.table import add_rules, rule


def _triangle(places: Callable[..., Any], rows: int, columns: int, offset: int = 0, **result: Any) -> Array:
    """The places of a triangle: one row of rows, one of columns."""
    return jnp.asarray(np.stack(places(rows, offset, columns)))


add_rules(partial(_triangle, np.tril_indices), ["tril_indices"])
add_rules(partial(_triangle, np.triu_indices), ["triu_indices"])


@rule("alias", "clone", "lift_fresh", "lift_fresh_copy", "_to_copy", "prims:convert_element_type", "scalar_tensor")
def identity(x: Operand, *dtype: Any, **layout: Any) -> Operand:
    """`x` itself: the caller casts, and how it lies in memory means nothing here."""
    return x


@rule("copy", "full_like")
def like(x: Array, source: Operand, *options: Any, **result: Any) -> Array:
    """`source` in the shape of `x`."""
    return jnp.broadcast_to(jnp.asarray(source), x.shape)


@rule("full")
def full(size: Sequence[int], value: Operand, **result: Any) -> Array:
    """An array of one value."""
    return jnp.broadcast_to(jnp.asarray(value), tuple(size))


@rule("empty.memory_format", "_efficientzerotensor", "empty_strided", "empty_permuted")
def empty(size: Sequence[int], *layout: Any, **result: Any) -> Array:
    """Zeros: memory without a value does not exist here."""
    return jnp.zeros(tuple(size), jnp.bool_)


@rule("new_empty_strided")
def new_empty_strided(x: Array, size: Sequence[int], stride: object, **result: Any) -> Array:
    """Zeros."""
    return empty(size)


@rule("arange.start_step")
def arange(start: Operand, end: Operand, step: Operand = 1, **result: Any) -> Array:
    """`start`, `start + step` ... below `end`."""
    whole = all(isinstance(bound, int) for bound in (start, end, step))
    # Wider than the result: PyTorch multiplies in double precision.
    return jnp.arange(start, end, step, dtype=jnp.int64 if whole else jnp.float64)


@rule("prims:iota")
def iota(length: int, *, start: int, step: int, **result: Any) -> Array:
    """`start`, `start + step` ..., `length` of them."""
    return start + step * jnp.arange(length, dtype=jnp.int64)


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
        return jnp.reshape(view_as_real(x), (*x.shape[:-1], -1))
    if category(x.dtype) == 2 and category(target) == 3:
        return view_as_complex(jnp.reshape(x, (*x.shape[:-1], -1, 2)))
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


@rule("squeeze.dims")
def squeeze(x: Array, dims: Sequence[int]) -> Array:
    """`x` without those of these dimensions that have length one."""
    return jnp.squeeze(x, tuple(d % x.ndim for d in dims if x.shape[d] == 1)) if x.ndim else x


def _along(x: Array, dim: int, chosen: slice) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % x.ndim), chosen)


@rule("slice.Tensor", "slice_copy.Tensor")
def slice_(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """Every `step`-th element from `start` to `end`."""
    return x[_along(x, dim, slice(start, end, step))]


@rule("select.int", "select_copy.int")
def select(x: Array, dim: int, index: int) -> Array:
    """The sub-array at one index."""
    return lax.index_in_dim(x, index, dim, keepdims=False)


@rule("slice_scatter")
def slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    """`x` with a slice replaced."""
    return x.at[_along(x, dim, slice(start, end, step))].set(cast(source, x.dtype))


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


add_rules(jnp.transpose, ["permute", "permute_copy"])
add_rules(jnp.expand_dims, ["unsqueeze"])
add_rules(jnp.diagonal, ["diagonal"])
add_rules(jnp.tile, ["repeat"])


def transposed(function: Any, example: Array, gradient: Array) -> Array:
    """The gradient of a linear function, at any argument of the shape of `example`."""
    (result,) = jax.linear_transpose(function, example)(gradient)
    return jnp.asarray(result)


@rule("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(gradient: Array, x: Array, pad: Sequence[int]) -> Array:
    """Gradient of replication padding."""
    widths = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    border = [(max(low, 0), max(high, 0)) for low, high in widths]
    kept = tuple(slice(max(-low, 0), min(high, 0) or None) for low, high in widths)
    return transposed(lambda y: jnp.pad(y, border, mode="edge")[kept], x, gradient.astype(x.dtype))


@rule("view_as_real")
def view_as_real(x: Array) -> Array:
    """Real and imaginary part in a last dimension of two."""
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@rule("view_as_complex")
def view_as_complex(x: Array) -> Array:
    """The inverse of `view_as_real`."""
    return lax.complex(widen(x[..., 0]), widen(x[..., 1]))
