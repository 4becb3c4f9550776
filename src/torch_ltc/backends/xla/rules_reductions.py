"""Rules of operators that combine elements along dimensions: reductions, scans, sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from torch_ltc.backends.xla.promotion import Operand, cast, is_complex, is_floating, to_torch_dtype, widen
from torch_ltc.backends.xla.table import rule

Dims = int | Sequence[int] | None


def axes(x: Array, dims: Dims) -> tuple[int, ...]:
    """The dimensions to reduce: all of them for None and for an empty list."""
    if dims is None or dims == [] or dims == ():
        return tuple(range(x.ndim))
    chosen = [dims] if isinstance(dims, int) else dims
    return tuple(d % x.ndim for d in chosen) if x.ndim else ()


def accumulated(x: Array, dtype: torch.dtype | None) -> Array:
    """`x` in the dtype in which it is added up: the one asked for, int64 for integers."""
    x = to_torch_dtype(x, dtype)
    return widen(x) if is_floating(x) or is_complex(x) else x.astype(jnp.int64)


@rule("sum.dim_IntList")
def sum_(x: Array, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    """Sum along dimensions."""
    return jnp.sum(accumulated(x, dtype), axis=axes(x, dims), keepdims=keepdim)


@rule("mean")
def mean_all(x: Array, *, dtype: torch.dtype | None = None) -> Array:
    """Mean of all elements."""
    return jnp.mean(widen(to_torch_dtype(x, dtype)))


@rule("mean.dim")
def mean(x: Array, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    """Mean along dimensions."""
    return jnp.mean(widen(to_torch_dtype(x, dtype)), axis=axes(x, dims), keepdims=keepdim)


@rule("prod")
def prod_all(x: Array, *, dtype: torch.dtype | None = None) -> Array:
    """Product of all elements."""
    return jnp.prod(accumulated(x, dtype))


@rule("prod.dim_int")
def prod(x: Array, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    """Product along one dimension."""
    return jnp.prod(accumulated(x, dtype), axis=axes(x, dim), keepdims=keepdim)


@rule("var_mean.correction")
def var_mean(
    x: Array, dims: Dims = None, *, correction: Operand | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    """Variance and mean along dimensions."""
    wide = widen(x)
    where = axes(x, dims)
    centre = jnp.mean(wide, axis=where, keepdims=True)
    squares = jnp.sum(jnp.square(jnp.abs(wide - centre)), axis=where, keepdims=keepdim)
    count = math.prod(x.shape[d] for d in where)
    divisor = jnp.maximum(count - (1 if correction is None else correction), 0)
    return squares / cast(divisor, squares.dtype), centre if keepdim else jnp.squeeze(centre, where)


@rule("var.correction")
def var(x: Array, dims: Dims = None, *, correction: Operand | None = None, keepdim: bool = False) -> Array:
    """Variance along dimensions."""
    return var_mean(x, dims, correction=correction, keepdim=keepdim)[0]


@rule("linalg_vector_norm")
def vector_norm(
    x: Array, order: Operand = 2, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Array:
    """The norm of this order along dimensions."""
    size = jnp.abs(widen(to_torch_dtype(x, dtype)))
    where = axes(x, dims)
    if isinstance(order, Array):
        return jnp.sum(size**order, axis=where, keepdims=keepdim) ** (1 / order)
    if order == math.inf:
        return jnp.max(size, axis=where, keepdims=keepdim)
    if order == -math.inf:
        return jnp.min(size, axis=where, keepdims=keepdim)
    if order == 0:
        return jnp.sum((size != 0).astype(size.dtype), axis=where, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, axis=where, keepdims=keepdim)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=where, keepdims=keepdim))
    return jnp.sum(size**order, axis=where, keepdims=keepdim) ** (1 / order)


@rule("amax")
def amax(x: Array, dims: Dims = None, keepdim: bool = False) -> Array:
    """Maximum along dimensions."""
    return jnp.max(x, axis=axes(x, dims), keepdims=keepdim)


@rule("amin")
def amin(x: Array, dims: Dims = None, keepdim: bool = False) -> Array:
    """Minimum along dimensions."""
    return jnp.min(x, axis=axes(x, dims), keepdims=keepdim)


@rule("max")
def max_all(x: Array) -> Array:
    """The largest element."""
    return jnp.max(x)


@rule("min")
def min_all(x: Array) -> Array:
    """The smallest element."""
    return jnp.min(x)


@rule("argmax")
def argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The index of the maximum."""
    return _arg(jnp.argmax, x, dim, keepdim)


@rule("argmin")
def argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The index of the minimum."""
    return _arg(jnp.argmin, x, dim, keepdim)


def _arg(function: Callable[..., Any], x: Array, dim: int | None, keepdim: bool) -> Array:
    if x.ndim == 0:
        return jnp.zeros((), jnp.int64)
    result: Array = function(x, axis=dim, keepdims=keepdim)
    return result


@rule("max.dim")
def max_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """Maximum along one dimension, and where it is."""
    return amax(x, dim, keepdim), argmax(x, dim, keepdim)


@rule("min.dim")
def min_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """Minimum along one dimension, and where it is."""
    return amin(x, dim, keepdim), argmin(x, dim, keepdim)


@rule("any", "any.dim", "any.dims")
def any_(x: Array, dims: Dims = None, keepdim: bool = False) -> Array:
    """True when any element is not zero."""
    return jnp.any(x != 0, axis=axes(x, dims), keepdims=keepdim)


@rule("_softmax")
def softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    """Softmax along one dimension."""
    return jax.nn.softmax(widen(x), axis=dim) if x.ndim else jnp.ones_like(x)


@rule("_safe_softmax")
def safe_softmax(x: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    """As `softmax`, zero where every element is minus infinity."""
    wide = widen(to_torch_dtype(x, dtype))
    nothing = jnp.all(jnp.isneginf(wide), axis=axes(x, dim), keepdims=True)
    return jnp.where(nothing, 0, softmax(wide, dim))


@rule("_log_softmax")
def log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    """Logarithm of the softmax along one dimension."""
    return jax.nn.log_softmax(widen(x), axis=dim) if x.ndim else jnp.zeros_like(x)


@rule("cumsum")
def cumsum(x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    """Running sum."""
    wide = accumulated(x, dtype)
    return lax.cumsum(wide, axis=dim % x.ndim) if x.ndim else wide


@rule("cumprod")
def cumprod(x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    """Running product."""
    wide = accumulated(x, dtype)
    return lax.cumprod(wide, axis=dim % x.ndim) if x.ndim else wide


@rule("logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    """Logarithm of the running sum of exponentials."""
    return lax.cumlogsumexp(widen(x), axis=dim % x.ndim) if x.ndim else x


@rule("cummax")
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    """Running maximum, and where it is."""
    return _running(x, dim, jnp.greater_equal)


@rule("cummin")
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    """Running minimum, and where it is."""
    return _running(x, dim, jnp.less_equal)


def _running(x: Array, dim: int, better: Callable[..., Array]) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    axis = dim % x.ndim
    places = lax.broadcasted_iota(jnp.int64, x.shape, axis)

    def later_wins(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        # Ties go to the later element, and a nan wins over all that is no nan.
        take = better(second[0], first[0]) | jnp.isnan(second[0]) if is_floating(x) else better(second[0], first[0])
        return jnp.where(take, second[0], first[0]), jnp.where(take, second[1], first[1])

    values, indices = lax.associative_scan(later_wins, (x, places), axis=axis)
    return values, indices


@rule("sort.stable")
def sort_stable(
    x: Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    """As `sort`."""
    return sort(x, dim, descending)


@rule("sort")
def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """Sorted values, and where they were. Always stable."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


@rule("topk")
def topk(x: Array, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> tuple[Array, Array]:
    """The `k` largest or smallest elements, and where they are."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    values, indices = sort(x, dim=dim, descending=largest)
    return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(indices, 0, k, axis=dim)


@rule("kthvalue")
def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The `k`-th smallest element, and where it is."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    values, indices = sort(x, dim=dim)
    chosen = (lax.index_in_dim(each, k - 1, dim, keepdims=keepdim) for each in (values, indices))
    return next(chosen), next(chosen)


@rule("median.dim")
def median(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower median along one dimension, and where it is. A nan is the median of anything."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    values, indices = kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if not is_floating(x):
        return values, indices
    lost = jnp.any(jnp.isnan(x), axis=dim, keepdims=keepdim)
    first = jnp.argmax(jnp.isnan(x), axis=dim, keepdims=keepdim)
    return jnp.where(lost, jnp.asarray(jnp.nan, x.dtype), values), jnp.where(lost, first, indices)


@rule("nanmedian.dim")
def nanmedian(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower median of what is no nan, along one dimension, and where it is."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    values, indices = sort(x, dim=dim)
    valid = jnp.sum(~jnp.isnan(x), axis=dim, keepdims=True) if is_floating(x) else x.shape[dim]
    place = jnp.broadcast_to(jnp.maximum((valid - 1) // 2, 0), _kept(x, dim))
    chosen = [jnp.take_along_axis(each, place, axis=dim) for each in (values, indices)]
    return (chosen[0], chosen[1]) if keepdim else (jnp.squeeze(chosen[0], dim), jnp.squeeze(chosen[1], dim))


def _kept(x: Array, dim: int) -> tuple[int, ...]:
    return tuple(1 if d == dim % x.ndim else length for d, length in enumerate(x.shape))


@rule("median")
def median_all(x: Array) -> Array:
    """The lower median of all elements."""
    return median(jnp.ravel(x), 0)[0]


@rule("nanmedian")
def nanmedian_all(x: Array) -> Array:
    """The lower median of all elements that are no nan."""
    return nanmedian(jnp.ravel(x), 0)[0]


@rule("mode")
def mode(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The most frequent element, the smallest of several, and the last place where it is."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    moved = jnp.moveaxis(x, dim, -1)
    counts = jnp.sum(moved[..., :, None] == moved[..., None, :], axis=-1)
    frequent = counts == jnp.max(counts, axis=-1, keepdims=True)
    smallest = jnp.where(frequent, jnp.argsort(jnp.argsort(moved, axis=-1), axis=-1), moved.shape[-1])
    value = jnp.take_along_axis(moved, jnp.argmin(smallest, axis=-1, keepdims=True), axis=-1)
    places = jnp.where(moved == value, jnp.arange(moved.shape[-1]), -1)
    index = jnp.max(places, axis=-1, keepdims=True)
    if keepdim:
        return jnp.moveaxis(value, -1, dim), jnp.moveaxis(index, -1, dim)
    return value[..., 0], index[..., 0]
