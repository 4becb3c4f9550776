"""Rules of operators that make arrays from nothing but numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from torch_ltc.backends.xla.promotion import Operand, cast, jax_dtype
from torch_ltc.backends.xla.table import rule


def _dtype(dtype: torch.dtype | None, default: Any) -> Any:
    return default if dtype is None else jax_dtype(dtype)


def _kind(value: Operand) -> Any:
    return value.dtype if isinstance(value, Array) else jnp.asarray(value).dtype


@rule("full")
def full(size: Sequence[int], value: Operand, *, dtype: torch.dtype | None = None, **result: Any) -> Array:
    """An array of one value."""
    return jnp.broadcast_to(cast(value, _dtype(dtype, _kind(value))), tuple(size))


@rule("full_like")
def full_like(x: Array, value: Operand, *, dtype: torch.dtype | None = None, **result: Any) -> Array:
    """An array of one value in the shape of another."""
    return jnp.broadcast_to(cast(value, _dtype(dtype, x.dtype)), x.shape)


@rule("scalar_tensor")
def scalar_tensor(value: Operand, *, dtype: torch.dtype | None = None, **result: Any) -> Array:
    """An array without dimensions."""
    return cast(value, _dtype(dtype, _kind(value)))


@rule("empty.memory_format", "_efficientzerotensor")
def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **result: Any) -> Array:
    """Zeros: memory without a value does not exist here."""
    return jnp.zeros(tuple(size), _dtype(dtype, jnp.float32))


@rule("empty_strided", "empty_permuted")
def empty_strided(size: Sequence[int], order: object, *, dtype: torch.dtype | None = None, **result: Any) -> Array:
    """Zeros."""
    return empty(size, dtype=dtype)


@rule("new_empty_strided")
def new_empty_strided(
    x: Array, size: Sequence[int], stride: object, *, dtype: torch.dtype | None = None, **result: Any
) -> Array:
    """Zeros in the dtype of `x`."""
    return jnp.zeros(tuple(size), _dtype(dtype, x.dtype))


@rule("arange.start_step")
def arange(
    start: Operand, end: Operand, step: Operand = 1, *, dtype: torch.dtype | None = None, **result: Any
) -> Array:
    """`start`, `start + step` ... below `end`."""
    whole = all(isinstance(bound, int) for bound in (start, end, step))
    target = _dtype(dtype, jnp.int64 if whole else jnp.float32)
    # Wider than the result: PyTorch multiplies in double precision.
    return jnp.arange(start, end, step, dtype=jnp.int64 if whole else jnp.float64).astype(target)


@rule("tril_indices")
def tril_indices(rows: int, columns: int, offset: int = 0, **result: Any) -> Array:
    """The places of a lower triangle: one row of rows, one of columns."""
    return jnp.asarray(np.stack(np.tril_indices(rows, offset, columns)))


@rule("triu_indices")
def triu_indices(rows: int, columns: int, offset: int = 0, **result: Any) -> Array:
    """The places of an upper triangle: one row of rows, one of columns."""
    return jnp.asarray(np.stack(np.triu_indices(rows, offset, columns)))


@rule("prims:iota")
def iota(length: int, *, start: int, step: int, dtype: torch.dtype, **result: Any) -> Array:
    """`start`, `start + step` ..., `length` of them."""
    return (start + step * jnp.arange(length, dtype=jnp.int64)).astype(jax_dtype(dtype))
