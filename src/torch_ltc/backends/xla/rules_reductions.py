"""Rules of operators that combine elements along dimensions: reductions, scans, sorting."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from torch_ltc.backends.xla.promotion import Operand, cast, is_complex, is_floating, to_torch_dtype, widen
from torch_ltc.backends.xla.table import add_rules, rule

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


@rule("mean", "mean.dim")
def mean(x: Array, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    """Mean along dimensions."""
    return jnp.mean(widen(to_torch_dtype(x, dtype)), axis=axes(x, dims), keepdims=keepdim)


@rule("prod", "prod.dim_int")
def prod(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
    """Product along dimensions."""
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
    if not isinstance(order, Array) and order in (math.inf, -math.inf):
        return (jnp.max if order == math.inf else jnp.min)(size, axis=where, keepdims=keepdim)
    if not isinstance(order, Array) and order in (0, 1, 2):
        powers = (size != 0).astype(size.dtype) if order == 0 else size if order == 1 else size * size
        total = jnp.sum(powers, axis=where, keepdims=keepdim)
        return jnp.sqrt(total) if order == 2 else total
    return jnp.sum(size**order, axis=where, keepdims=keepdim) ** (1 / order)


def _add_extreme(name: str, value: Callable[..., Array], place: Callable[..., Array]) -> None:
    """The rules of a maximum or minimum, of where it is, and of both."""

    def along(x: Array, dims: Dims = None, keepdim: bool = False) -> Array:
        return value(x, axis=axes(x, dims), keepdims=keepdim)

    def arg(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        return place(x, axis=dim, keepdims=keepdim) if x.ndim else jnp.zeros((), jnp.int64)

    add_rules(along, [f"a{name}", name])
    add_rules(arg, [f"arg{name}"])
    add_rules(lambda x, dim, keepdim=False: (along(x, dim, keepdim), arg(x, dim, keepdim)), [f"{name}.dim"])


_add_extreme("max", jnp.max, jnp.argmax)
_add_extreme("min", jnp.min, jnp.argmin)


@rule("any", "any.dim", "any.dims")
def any_(x: Array, dims: Dims = None, keepdim: bool = False) -> Array:
    """True when any element is not zero."""
    return jnp.any(x != 0, axis=axes(x, dims), keepdims=keepdim)


@rule("_softmax")
def softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    """Softmax along one dimension."""
    return jnp.reshape(jax.nn.softmax(jnp.atleast_1d(widen(x)), axis=dim), x.shape)


@rule("_log_softmax")
def log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    """Logarithm of the softmax along one dimension."""
    return jnp.reshape(jax.nn.log_softmax(jnp.atleast_1d(widen(x)), axis=dim), x.shape)


def _scan(function: Callable[..., Array], x: Array, dim: int) -> Array:
    return function(x, axis=dim % x.ndim) if x.ndim else x


@rule("cumsum")
def cumsum(x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    """Running sum."""
    return _scan(lax.cumsum, accumulated(x, dtype), dim)


@rule("cumprod")
def cumprod(x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    """Running product."""
    return _scan(lax.cumprod, accumulated(x, dtype), dim)


@rule("logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    """Logarithm of the running sum of exponentials."""
    return _scan(lax.cumlogsumexp, widen(x), dim)


Pair = tuple[Array, Array]


def _of_vectors(function: Callable[..., Pair]) -> Callable[..., Pair]:
    """The function for arrays without dimensions, too: they are vectors of one element."""

    @functools.wraps(function)
    def run(x: Array, *args: Any, **kwargs: Any) -> Pair:
        values, places = function(jnp.atleast_1d(x), *args, **kwargs)
        return (values, places) if x.ndim else (jnp.reshape(values, ()), jnp.reshape(places, ()))

    return run


@_of_vectors
def _running(x: Array, dim: int, better: Callable[..., Array]) -> Pair:
    """Running extreme, and where it is."""
    axis = dim % x.ndim
    places = lax.broadcasted_iota(jnp.int64, x.shape, axis)

    def later_wins(first: Pair, second: Pair) -> Pair:
        # Ties go to the later element, and a nan wins over all that is no nan.
        take = better(second[0], first[0]) | jnp.isnan(second[0]) if is_floating(x) else better(second[0], first[0])
        return jnp.where(take, second[0], first[0]), jnp.where(take, second[1], first[1])

    values, indices = lax.associative_scan(later_wins, (x, places), axis=axis)
    return values, indices


add_rules(lambda x, dim: _running(x, dim, jnp.greater_equal), ["cummax"])
add_rules(lambda x, dim: _running(x, dim, jnp.less_equal), ["cummin"])


@rule("sort", "sort.stable")
@_of_vectors
def sort(x: Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Pair:
    """Sorted values, and where they were. Always stable."""
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


@rule("topk")
@_of_vectors
def topk(x: Array, k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> Pair:
    """The `k` largest or smallest elements, and where they are."""
    values, indices = sort(x, dim=dim, descending=largest)
    return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(indices, 0, k, axis=dim)


@rule("kthvalue")
@_of_vectors
def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    """The `k`-th smallest element, and where it is."""
    values, indices = (lax.index_in_dim(each, k - 1, dim, keepdims=keepdim) for each in sort(x, dim=dim))
    return values, indices


@rule("median.dim")
@_of_vectors
def median(x: Array, dim: int, keepdim: bool = False) -> Pair:
    """The lower median along one dimension, and where it is. A nan is the median of anything."""
    values, indices = kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if not is_floating(x):
        return values, indices
    lost = jnp.any(jnp.isnan(x), axis=dim, keepdims=keepdim)
    first = jnp.argmax(jnp.isnan(x), axis=dim, keepdims=keepdim)
    return jnp.where(lost, jnp.asarray(jnp.nan, x.dtype), values), jnp.where(lost, first, indices)


@rule("nanmedian.dim")
@_of_vectors
def nanmedian(x: Array, dim: int, keepdim: bool = False) -> Pair:
    """The lower median of what is no nan, along one dimension, and where it is."""
    valid = jnp.sum(~jnp.isnan(x), axis=dim, keepdims=True)
    place = jnp.maximum((valid - 1) // 2, 0)
    values, indices = (jnp.take_along_axis(each, place, axis=dim) for each in sort(x, dim=dim))
    return (values, indices) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(indices, dim))


add_rules(lambda x: median(jnp.ravel(x), 0)[0], ["median"])
add_rules(lambda x: nanmedian(jnp.ravel(x), 0)[0], ["nanmedian"])


@rule("mode")
@_of_vectors
def mode(x: Array, dim: int = -1, keepdim: bool = False) -> Pair:
    """The most frequent element, the smallest of several, and the last place where it is."""
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
