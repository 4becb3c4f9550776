"""Rules of operators that address the memory behind a tensor instead of its elements.

JAX arrays have no strides. What the program was recorded with is known, though: the memory is rebuilt as a vector from
the array that owns it, and read or written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from torch_ltc.backends.xla.promotion import cast
from torch_ltc.backends.xla.table import Wants, rule
from torch_ltc.program.spec import Spec


@dataclass(frozen=True, slots=True)
class Memory:
    """What rules that want the memory get in the place of their first tensor: the elements of the storage as a vector,
    and the geometry of the tensor in it."""

    elements: Array
    spec: Spec


def memory_of(owner: Array, owner_spec: Spec, spec: Spec) -> Memory:
    """The memory of a tensor of geometry `spec` that lies in the storage of `owner`."""
    size, stride, offset = owner_spec.size, owner_spec.stride, owner_spec.offset
    length = max(owner_spec.extent(), spec.extent())
    order = memory_order(size, stride)
    if owner_spec.covers_storage() and length == owner_spec.numel and order is not None:
        return Memory(jnp.reshape(jnp.transpose(owner, order), (-1,)), spec)
    elements = jnp.zeros((length,), owner.dtype)
    return Memory(_written(elements, owner, size, stride, offset), spec)


def memory_order(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The dimensions from the widest stride to the narrowest, if the elements lie without holes in that order."""
    order = sorted(range(len(size)), key=lambda d: (-stride[d], -size[d]))
    expected = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != expected:
            return None
        expected *= size[d]
    return order


def _read(elements: Array, size: Sequence[int], stride: Sequence[int], offset: int) -> Array:
    order = memory_order(size, stride)
    count = 1
    for length in size:
        count *= length
    if count == 0:
        return jnp.zeros(tuple(size), elements.dtype)
    if order is None:
        return jnp.take(elements, _addresses(size, stride, offset), mode="clip")
    dense = lax.slice_in_dim(elements, offset, offset + count)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return jnp.transpose(jnp.reshape(dense, [size[d] for d in order]), inverse)


def _written(elements: Array, source: Array, size: Sequence[int], stride: Sequence[int], offset: int) -> Array:
    if source.size == 0:
        return elements
    return elements.at[_addresses(size, stride, offset)].set(cast(source, elements.dtype))


def _addresses(size: Sequence[int], stride: Sequence[int], offset: int) -> Array:
    address = jnp.full(tuple(size), offset, jnp.int64)
    for d, step in enumerate(stride):
        address = address + step * lax.broadcasted_iota(jnp.int64, tuple(size), d)
    return address


@rule("as_strided", "as_strided_copy", wants=Wants.MEMORY)
def as_strided(memory: Memory, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Array:
    """Elements of the memory at regular distances."""
    return _read(memory.elements, size, stride, memory.spec.offset if offset is None else offset)


@rule("as_strided_scatter", wants=Wants.MEMORY)
def as_strided_scatter(
    memory: Memory, source: Array, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Array:
    """The tensor after elements of its memory at regular distances were replaced."""
    start = memory.spec.offset if offset is None else offset
    elements = _written(memory.elements, source, size, stride, start)
    return _read(elements, memory.spec.size, memory.spec.stride, memory.spec.offset)
