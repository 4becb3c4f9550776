"""Checks of data that fail in eager, as one boolean that the program computes.

XLA does not raise: an index out of range reads some other element. A program with such calls returns one boolean more,
whether any of them is wrong; then the run counts as failed, its inputs keep the values they had, and the interpreter
runs the program again and raises eager's error at the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array

from torch_ltc.backends.xla.promotion import Operand, category, result_dtype
from torch_ltc.backends.xla.table import overload
from torch_ltc.pytorch.private import OpOverload

Check = Callable[..., "Array | None"]
CheckFunction = TypeVar("CheckFunction", bound=Check)

# A check takes what its operator takes, and gives None where nothing can go wrong.
CHECKS: dict[OpOverload, Check] = {}


def check(*names: str) -> Callable[[CheckFunction], CheckFunction]:
    """Make the decorated function the check of these operators."""

    def add(function: CheckFunction) -> CheckFunction:
        for name in names:
            op = overload(name)
            if op is not None:
                CHECKS[op] = function
        return function

    return add


def _outside(places: Array, length: int) -> Array:
    return jnp.any((places < -length) | (places >= length))


@check("index.Tensor", "index_put", "_index_put_impl")
def index(x: Array, indices: Sequence[Array | None], *others: Any) -> Array | None:
    """An index outside its dimension. Masks cannot be."""
    wrong: list[Array] = []
    dim = 0
    for places in indices:
        if places is not None and places.dtype == jnp.bool_:
            dim += places.ndim
            continue
        if places is not None:
            wrong.append(_outside(places, x.shape[dim]))
        dim += 1
    return jnp.any(jnp.stack(wrong)) if wrong else None


@check("gather", "index_reduce", "index_select", "scatter_add", "scatter_reduce.two")
@check("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")
def along(x: Array, dim: int, places: Array, *others: Any, **named: Any) -> Array:
    """An index outside the dimension."""
    return _outside(places, x.shape[dim] if x.ndim else 1)


@check("embedding")
def embedding(weight: Array, places: Array, *others: Any) -> Array:
    """A row that the table does not have. Negative ones are errors here."""
    return jnp.any((places < 0) | (places >= weight.shape[0]))


@check("put")
def put(x: Array, places: Array, *others: Any) -> Array:
    """An index outside the flattened array."""
    return _outside(places, x.size)


@check("masked_scatter")
def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    """More places under the mask than there are values."""
    return jnp.sum(jnp.broadcast_to(mask, jnp.broadcast_shapes(x.shape, mask.shape))) > source.size


@check("div.Tensor_mode", "div.Scalar_mode", "fmod.Tensor", "fmod.Scalar")
@check("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def divide(x: Operand, y: Operand, *others: Any, **named: Any) -> Array | None:
    """A division of integers by zero."""
    if category(result_dtype(x, y)) > 1 or named.get("rounding_mode", "") is None:
        return None
    return jnp.any(jnp.asarray(y) == 0)
