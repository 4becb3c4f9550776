"""Rules of Fourier transforms: the three that PyTorch composes all others of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from torch_ltc.backends.xla.table import rule


def _scaled(x: Array, count: int, normalization: int) -> Array:
    """PyTorch numbers the normalizations: 0 none, 1 by the square root of the count, 2 by the count."""
    if normalization == 0 or count == 0:
        return x
    return x / jnp.asarray(math.sqrt(count) if normalization == 1 else count, x.real.dtype)


def _count(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


@rule("_fft_c2c")
def c2c(x: Array, dims: Sequence[int], normalization: int, forward: bool) -> Array:
    """Complex to complex."""
    if not dims:
        return x
    axes, count = tuple(dims), _count(x.shape, dims)
    # JAX divides the inverse transform by the count, PyTorch asks for the division apart.
    result = jnp.fft.fftn(x, axes=axes) if forward else jnp.fft.ifftn(x, axes=axes, norm="forward")
    return _scaled(result, count, normalization)


@rule("_fft_r2c")
def r2c(x: Array, dims: Sequence[int], normalization: int, onesided: bool) -> Array:
    """Real to complex; `onesided` leaves out the half that follows from the other."""
    axes, count = tuple(dims), _count(x.shape, dims)
    result = jnp.fft.rfftn(x, axes=axes) if onesided else jnp.fft.fftn(x, axes=axes)
    return _scaled(result, count, normalization)


@rule("_fft_c2r")
def c2r(x: Array, dims: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    """Complex to real."""
    *others, last = dims
    if others:
        x = jnp.fft.ifftn(x, axes=tuple(others), norm="forward")
    result = jnp.fft.irfft(x, n=last_dim_size, axis=last, norm="forward")
    return _scaled(result, _count(x.shape, others) * last_dim_size, normalization)
