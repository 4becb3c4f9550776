"""Rules of pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from torch_ltc.backends.xla.promotion import is_floating, widen
from torch_ltc.backends.xla.rules_matmul import spread
from torch_ltc.backends.xla.rules_shape import transposed
from torch_ltc.backends.xla.table import add_rules, rule

Sizes = Sequence[int]


def _output_length(length: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    span = length + 2 * pad - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil_mode else span // stride) + 1
    # A last window that would begin in the border on the right is left out.
    if ceil_mode and (count - 1) * stride >= length + pad:
        count -= 1
    return count


class _Windows:
    """The windows of a pooling over the last dimensions of an array."""

    def __init__(
        self, x: Array, spatial: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
    ) -> None:
        self.lengths = x.shape[x.ndim - spatial :]
        self.kernel = spread(kernel, spatial)
        self.stride = spread(stride, spatial) if stride else self.kernel
        self.padding = spread(padding, spatial)
        self.dilation = spread(dilation, spatial)
        self.counts = [
            _output_length(*each, ceil_mode)
            for each in zip(self.lengths, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        ]

    def padded(self, x: Array, value: float | int) -> Array:
        """`x` with a border wide enough for the last window."""
        widths = [(0, 0, 0)] * (x.ndim - len(self.lengths))
        for length, k, s, p, d, n in zip(
            self.lengths, self.kernel, self.stride, self.padding, self.dilation, self.counts, strict=True
        ):
            widths.append((p, max((n - 1) * s + d * (k - 1) + 1 - length - p, 0), 0))
        return lax.pad(x, jnp.asarray(value, x.dtype), widths)

    def pieces(self, padded: Array) -> list[Array]:
        """For each place in the kernel, what all windows have there."""
        leading = padded.ndim - len(self.lengths)
        found = []
        for place in itertools.product(*(range(k) for k in self.kernel)):
            starts = [p * d for p, d in zip(place, self.dilation, strict=True)]
            ends = [a + (n - 1) * s + 1 for a, n, s in zip(starts, self.counts, self.stride, strict=True)]
            low = [0] * leading + starts
            high = list(padded.shape[:leading]) + ends
            found.append(lax.slice(padded, low, high, [1] * leading + self.stride))
        return found

    def sums(self, x: Array) -> Array:
        """The sum over each window."""
        ones = [1] * (x.ndim - len(self.lengths))
        # A constant of NumPy: only then does JAX see that this is a sum, which has a gradient.
        total = lax.reduce_window(
            self.padded(x, 0), np.zeros((), x.dtype), lax.add, (*ones, *self.kernel), (*ones, *self.stride), "VALID"
        )
        kept = (..., *(slice(n) for n in self.counts))
        return total[kept]


def _max_pool(
    spatial: int,
    x: Array,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> tuple[Array, Array]:
    """Maximum over windows, and where it is."""
    windows = _Windows(x, spatial, kernel, stride, padding, dilation, ceil_mode)
    places = jnp.reshape(jnp.arange(math.prod(windows.lengths)), windows.lengths)
    lowest = -math.inf if is_floating(x) else int(jnp.iinfo(x.dtype).min)
    values = jnp.stack(windows.pieces(windows.padded(x, lowest)))
    where = jnp.stack(windows.pieces(windows.padded(places, -1)))
    # The border must not win against elements that are as low as it is.
    inside = jnp.reshape(where >= 0, (len(where),) + (1,) * (x.ndim - spatial) + where.shape[1:])
    score = jnp.where(inside & (values == lowest), 1, 0)
    best = jnp.argmax(values, axis=0)
    first_inside = jnp.argmax(jnp.broadcast_to(score, values.shape), axis=0)
    best = jnp.where(jnp.max(values, axis=0) == lowest, first_inside, best)[None]
    spread = jnp.broadcast_to(jnp.reshape(where, inside.shape), values.shape)
    return jnp.take_along_axis(values, best, axis=0)[0], jnp.take_along_axis(spread, best, axis=0)[0]


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: Array, size: Sizes) -> tuple[Array, Array]:
    """Maximum over windows that divide the image into this many parts, and where it is."""
    spatial = len(size)
    lengths = x.shape[x.ndim - spatial :]
    values, places = x, jnp.reshape(jnp.arange(math.prod(lengths)), lengths)
    inside = jnp.ones((), jnp.bool_)
    for d, (length, count) in enumerate(zip(lengths, size, strict=True)):
        starts = np.arange(count) * length // count
        ends = -(-(np.arange(count) + 1) * length // count)
        window = starts[:, None] + np.arange(max(ends - starts, default=0))
        valid = jnp.asarray(window < ends[:, None])
        # Each dimension becomes two: which window, and where in it.
        window = np.minimum(window, length - 1)
        values = jnp.take(values, window, axis=values.ndim - spatial - d + 2 * d, mode="clip")
        places = jnp.take(places, window, axis=2 * d, mode="clip")
        inside = inside[..., None, None] & valid
    order = [*range(0, 2 * spatial, 2), *range(1, 2 * spatial, 2)]
    lead = x.ndim - spatial
    arranged = jnp.transpose(values, [*range(lead), *(lead + d for d in order)])
    masked = jnp.where(jnp.transpose(inside, order), arranged, -jnp.inf)
    flat = jnp.reshape(masked, (*masked.shape[: lead + spatial], -1))
    best = jnp.argmax(flat, axis=-1, keepdims=True)
    where = jnp.reshape(jnp.transpose(places, order), (*size, -1))
    chosen = jnp.take_along_axis(jnp.broadcast_to(where, flat.shape), best, axis=-1)
    return jnp.take_along_axis(flat, best, axis=-1)[..., 0], chosen[..., 0]


def _to_places(spatial: int, gradient: Array, x: Array, *options: Any) -> Array:
    """Each gradient added to the element that its window chose: the last option says which."""
    places = options[-1]
    rows = math.prod(x.shape[: x.ndim - spatial])
    row = jnp.arange(rows)[:, None]
    flat = jnp.zeros((rows, math.prod(x.shape[x.ndim - spatial :])), gradient.dtype)
    if gradient.size == 0:
        return jnp.reshape(flat, x.shape)
    added = flat.at[row, jnp.reshape(places, (rows, -1))].add(jnp.reshape(gradient, (rows, -1)))
    return jnp.reshape(added, x.shape)


def _avg_pool(
    spatial: int,
    x: Array,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    """Mean over windows."""
    x = widen(x)
    windows = _Windows(x, spatial, kernel, stride, padding, (1,), ceil_mode)
    total = windows.sums(x)
    if divisor_override is not None:
        return total / divisor_override
    ones = jnp.ones(windows.lengths, x.dtype)
    if not count_include_pad:
        return total / windows.sums(ones)
    # The border counts, but not what lies behind it on the right, where only a rounded-up window reaches.
    bordered = jnp.pad(ones, [(p, p) for p in windows.padding], constant_values=1)
    windows_of_border = _Windows(bordered, spatial, windows.kernel, windows.stride, (0,), (1,), ceil_mode)
    windows_of_border.counts = windows.counts
    return total / windows_of_border.sums(bordered)


def _avg_pool_backward(spatial: int, gradient: Array, x: Array, *options: Any) -> Array:
    return transposed(lambda y: _avg_pool(spatial, y, *options), widen(x), widen(gradient))


for _n in (2, 3):
    add_rules(partial(_max_pool, _n), [f"max_pool{_n}d_with_indices"])
    add_rules(partial(_avg_pool, _n), [f"avg_pool{_n}d"])
    add_rules(partial(_avg_pool_backward, _n), [f"avg_pool{_n}d_backward"])
    _kinds = [f"max_pool{_n}d_with_indices", f"adaptive_max_pool{_n}d", f"fractional_max_pool{_n}d"]
    add_rules(partial(_to_places, _n), [f"{kind}_backward" for kind in _kinds])
