"""Rules of operators that read or write elements at computed places.

An index out of range is an error in eager. Here it cannot be one: XLA reads the nearest element and drops the write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from torch_ltc.backends.xla.promotion import Operand, cast, is_floating
from torch_ltc.backends.xla.rules_reductions import vector_norm
from torch_ltc.backends.xla.table import rule

Index = Sequence[Array | None]


def _places(indices: Index) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@rule("index.Tensor", "_unsafe_index.Tensor")
def index(x: Array, indices: Index) -> Array:
    """The elements at these places."""
    return x[_places(indices)]


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(x: Array, indices: Index, values: Array, accumulate: bool = False, unsafe: bool = False) -> Array:
    """`x` with values written, or added, at these places."""
    if any(each is not None and each.dtype == jnp.bool_ for each in indices):
        return _mask_put(x, indices, values, accumulate)
    place = x.at[_places(indices)]
    values = cast(values, x.dtype)
    return _add_at(place, values) if accumulate else place.set(values)


def _add_at(place: Any, values: Array) -> Array:
    # Booleans do not add up: what is set stays set.
    result: Array = place.max(values) if values.dtype == jnp.bool_ else place.add(values)
    return result


def _mask_put(x: Array, indices: Index, values: Array, accumulate: bool) -> Array:
    """As `index_put`, for one mask over the leading dimensions."""
    mask, *others = [each for each in indices if each is not None]
    if others or indices[0] is None:
        raise NotImplementedError("a mask among other indices has a shape that is known only when it runs")
    rest = x.shape[mask.ndim :]
    flat = jnp.ravel(mask)
    if values.ndim > len(rest) and values.shape[0] != 1:
        # The values belong to the places that are set, in order.
        order = jnp.clip(jnp.cumsum(flat) - 1, 0, values.shape[0] - 1)
        values = jnp.reshape(values[order], (*mask.shape, *values.shape[1:]))
    chosen = cast(values, x.dtype)
    written = _sum_of(x, chosen) if accumulate else chosen
    return jnp.where(jnp.reshape(mask, mask.shape + (1,) * len(rest)), written, x)


def _sum_of(x: Array, y: Array) -> Array:
    return x | y if x.dtype == jnp.bool_ else x + y


@rule("index_select")
def index_select(x: Array, dim: int, places: Array) -> Array:
    """The sub-arrays at these indices."""
    if x.ndim == 0:
        return x
    return jnp.take(x, jnp.ravel(places), axis=dim, mode="clip")


@rule("embedding")
def embedding(weight: Array, places: Array, *options: object) -> Array:
    """The rows of a table."""
    return jnp.take(weight, places, axis=0, mode="clip")


@rule("embedding_dense_backward")
def embedding_dense_backward(
    gradient: Array, places: Array, rows: int, padding: int, scale_by_frequency: bool
) -> Array:
    """Gradient of the table behind `embedding`."""
    width = gradient.shape[places.ndim :]
    gradient = gradient * (places != padding).astype(gradient.dtype)[(...,) + (None,) * len(width)]
    if scale_by_frequency:
        count = jnp.zeros((rows,), jnp.int64).at[jnp.ravel(places)].add(1)
        gradient = gradient / count[places][(...,) + (None,) * len(width)].astype(gradient.dtype)
    return jnp.zeros((rows, *width), gradient.dtype).at[places].add(gradient)


@rule("embedding_renorm")
def embedding_renorm(weight: Array, places: Array, max_norm: Operand, order: Operand) -> Array:
    """The table with those rows among `places` shortened that are longer than `max_norm`."""
    used = jnp.zeros((weight.shape[0],), jnp.bool_).at[jnp.ravel(places)].set(True)
    length = vector_norm(weight, order, 1)
    factor = jnp.where(used & (length > max_norm), max_norm / (length + 1e-7), 1)
    return weight * factor[:, None].astype(weight.dtype)


def _grid(places: Array, dim: int) -> tuple[Array, ...]:
    """For each element of `places` its own coordinates, that of `dim` replaced by its value."""
    axis = dim % places.ndim
    return tuple(places if d == axis else lax.broadcasted_iota(jnp.int64, places.shape, d) for d in range(places.ndim))


@rule("gather")
def gather(x: Array, dim: int, places: Array, *, sparse_grad: bool = False) -> Array:
    """`x[i][places[i][j]]` and the like."""
    if places.size == 0:
        return jnp.zeros(places.shape, x.dtype)
    if places.ndim == 0 or x.ndim == 0:
        return jnp.reshape(jnp.ravel(x)[jnp.ravel(places)], places.shape)
    return x[_grid(places, dim)]


@rule("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")
def scatter(x: Array, dim: int, places: Array, source: Operand, *, reduce: str | None = None) -> Array:
    """`x[i][places[i][j]] = source[i][j]` and the like; `reduce` adds to or multiplies what is there."""
    return _scattered(x, dim, places, source, reduce)


@rule("scatter_add")
def scatter_add(x: Array, dim: int, places: Array, source: Array) -> Array:
    """`x[i][places[i][j]] += source[i][j]` and the like."""
    return _scattered(x, dim, places, source, "add")


_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min", None: "set"}


def _scattered(x: Array, dim: int, places: Array, source: Operand, reduce: str | None = None) -> Array:
    if places.size == 0:
        return x
    # Without dimensions there is one element: the same as a vector of one.
    shape = x.shape
    x, places, values = jnp.atleast_1d(x), jnp.atleast_1d(places), cast(source, x.dtype)
    if values.ndim:
        values = values[tuple(slice(length) for length in places.shape)]
    place, method = x.at[_grid(places, dim)], _METHODS.get(reduce, reduce)
    result = _add_at(place, values) if method == "add" else getattr(place, str(method))(values)
    return jnp.reshape(result, shape)


@rule("scatter_reduce.two")
def scatter_reduce(
    x: Array, dim: int, places: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """As `scatter`, combining what is written to one place by sum, prod, mean, amax or amin."""
    if places.size == 0:
        return x
    if x.dtype == jnp.bool_:
        # The product of booleans is their minimum, and they have no arithmetic in XLA.
        reduce = {"prod": "amin", "sum": "amax", "mean": "amin"}.get(reduce, reduce)
    start = x if include_self else _scattered(x, dim, places, _neutral(reduce, x.dtype))
    result = _scattered(start, dim, places, source, reduce)
    if reduce != "mean":
        return result
    counted = jnp.full(x.shape, 1 if include_self else 0, jnp.int64)
    count = jnp.maximum(_scattered(counted, dim, places, jnp.ones(places.shape, jnp.int64), "add"), 1)
    return result / count.astype(x.dtype) if is_floating(x) else jnp.floor_divide(result, count.astype(x.dtype))


def _neutral(reduce: str, dtype: Any) -> Array:
    """The value that changes nothing under a reduction."""
    if reduce in ("sum", "mean", "prod"):
        return jnp.asarray(reduce == "prod", dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(reduce == "amin")
    low, high = (-jnp.inf, jnp.inf) if jnp.issubdtype(dtype, jnp.floating) else _limits(dtype)
    return jnp.asarray(low if reduce == "amax" else high, dtype)


def _limits(dtype: Any) -> tuple[int, int]:
    limits = jnp.iinfo(dtype)
    return int(limits.min), int(limits.max)


@rule("index_reduce")
def index_reduce(x: Array, dim: int, places: Array, source: Array, reduce: str, *, include_self: bool = True) -> Array:
    """`x` with sub-arrays combined at these indices."""
    if source.ndim:
        shape = [1] * source.ndim
        shape[dim] = -1
        places = jnp.broadcast_to(jnp.reshape(places, shape), source.shape)
    return scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


@rule("put")
def put(x: Array, places: Array, source: Array, accumulate: bool = False) -> Array:
    """The flattened array with elements replaced or added to."""
    flat = index_put(jnp.ravel(x), [jnp.ravel(places)], jnp.ravel(source), accumulate)
    return jnp.reshape(flat, x.shape)


@rule("masked_scatter")
def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    """`x` with the elements under the mask replaced by those of `source`, in order."""
    x, mask = jnp.broadcast_arrays(x, mask)
    return x if source.size == 0 else _mask_put(x, [mask], jnp.ravel(source), accumulate=False)


@rule("masked_scatter_backward")
def masked_scatter_backward(gradient: Array, mask: Array, sizes: Sequence[int]) -> Array:
    """Gradient of the source of `masked_scatter`."""
    count = math.prod(sizes)
    gradient, mask = jnp.broadcast_arrays(gradient, mask)
    flat = jnp.ravel(mask)
    # What is not under the mask is sent behind the end, where it is dropped.
    order = jnp.where(flat, jnp.cumsum(flat) - 1, count)
    result = jnp.zeros((count,), gradient.dtype).at[order].set(jnp.ravel(gradient), mode="drop")
    return jnp.reshape(result, tuple(sizes))


@rule("nonzero_static")
def nonzero_static(x: Array, *, size: int, fill_value: int = -1) -> Array:
    """The coordinates of the first `size` elements that are not zero."""
    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1)


@rule("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    ordered: Array,
    values: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """The place of each value in the last dimension of `ordered`."""
    if sorter is not None:
        ordered = jnp.take_along_axis(ordered, sorter, axis=-1)
    side, values = side or ("right" if right else "left"), jnp.asarray(values)
    if ordered.ndim <= 1:
        return jnp.searchsorted(jnp.ravel(ordered), values, side=side)
    rows = jnp.reshape(ordered, (-1, 1, ordered.shape[-1]))
    wanted = jnp.reshape(values, (rows.shape[0], -1, 1))
    return jnp.reshape(jnp.sum(rows < wanted if side == "left" else rows <= wanted, axis=-1), values.shape)


@rule("bucketize.Tensor", "bucketize.Scalar")
def bucketize(value: Operand, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    """Between which boundaries each value lies."""
    return searchsorted(boundaries, value, right=right)
