"""Rules of operators that address the memory behind a tensor instead of its elements.

JAX arrays have no strides. What the program was recorded with is known, though: the memory is rebuilt as a vector from
the array that owns it, and read or written there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from torch_ltc.backends.xla.promotion import cast
from torch_ltc.backends.xla.table import Wants, rule
from torch_ltc.program.spec import Spec

Sizes = Sequence[int]


@dataclass(frozen=True, slots=True)
class Memory:
    """The argument of rules that want the memory, in place of their first tensor: the elements of the storage that are
    known, from address `start` on, and the spec of the tensor among them."""

    elements: Array
    start: int
    spec: Spec

    def read(self, size: Sizes, stride: Sizes, offset: int) -> Array:
        """The tensor of this spec."""
        if math.prod(size) == 0:
            return jnp.zeros(tuple(size), self.elements.dtype)
        first = self._place(size, stride, offset)
        order = memory_order(size, stride)
        if order is None:
            return self.elements[_addresses(size, stride, first)]
        dense = lax.slice_in_dim(self.elements, first, first + math.prod(size))
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return jnp.transpose(jnp.reshape(dense, [size[d] for d in order]), inverse)

    def written(self, source: Array, size: Sizes, stride: Sizes, offset: int) -> Memory:
        """The memory after the elements of a tensor of this spec were replaced."""
        if source.size == 0:
            return self
        where = _addresses(size, stride, self._place(size, stride, offset))
        return Memory(self.elements.at[where].set(cast(source, self.elements.dtype)), self.start, self.spec)

    def _place(self, size: Sizes, stride: Sizes, offset: int) -> int:
        """The place where a tensor begins among the known elements. Raises when it reaches beyond them."""
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if offset < self.start or last >= self.start + self.elements.size:
            raise NotImplementedError("it reaches memory that this part of the program does not know")
        return offset - self.start


def memory_of(owner: Array, owner_spec: Spec, spec: Spec) -> Memory:
    """The memory of a tensor of shape `spec` that lies in the storage of `owner`."""
    order = memory_order(owner_spec.size, owner_spec.stride)
    if owner_spec.numel == 0:
        return Memory(jnp.zeros((0,), owner.dtype), owner_spec.offset, spec)
    if order is None or owner_spec.conj or owner_spec.neg:
        raise NotImplementedError(f"the memory of {owner_spec} has holes")
    return Memory(jnp.reshape(jnp.transpose(owner, order), (-1,)), owner_spec.offset, spec)


def memory_order(size: Sizes, stride: Sizes) -> list[int] | None:
    """The dimensions from the widest stride to the narrowest, if the elements lie without holes in that order."""
    order = sorted(range(len(size)), key=lambda d: (-stride[d], -size[d]))
    expected = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != expected:
            return None
        expected *= size[d]
    return order


def _addresses(size: Sizes, stride: Sizes, first: int) -> Array:
    address = jnp.full(tuple(size), first, jnp.int64)
    for d, step in enumerate(stride):
        address = address + step * lax.broadcasted_iota(jnp.int64, tuple(size), d)
    return address


@rule("as_strided", "as_strided_copy", wants=Wants.MEMORY)
def as_strided(memory: Memory, size: Sizes, stride: Sizes, offset: int | None = None) -> Array:
    """Elements of the memory at regular distances."""
    return memory.read(size, stride, memory.spec.offset if offset is None else offset)


@rule("as_strided_scatter", wants=Wants.MEMORY)
def as_strided_scatter(memory: Memory, source: Array, size: Sizes, stride: Sizes, offset: int | None = None) -> Array:
    """The tensor after elements of its memory at regular distances were replaced."""
    after = memory.written(source, size, stride, memory.spec.offset if offset is None else offset)
    return after.read(memory.spec.size, memory.spec.stride, memory.spec.offset)
