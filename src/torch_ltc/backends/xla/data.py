"""Data as JAX arrays, and the way between them and PyTorch tensors.

An array holds the elements in the order in which they lie in the memory of the tensor that it stands for: a tensor
with permuted strides is a permuted array. Memory is shared both ways through DLPack, where the layout allows it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array

from torch_ltc.backends.xla.promotion import all_bits
from torch_ltc.backends.xla.rules_memory import memory_order
from torch_ltc.errors import BackendError
from torch_ltc.lowering.backend_data import BackendData, BackendDevice, DataState
from torch_ltc.program.spec import Spec, contiguous_strides, make_spec, spec_of


@functools.lru_cache(maxsize=65536)
def order_of(spec: Spec) -> tuple[int, ...]:
    """The dimensions of a tensor as they follow each other in memory; as they are for tensors with holes."""
    order = memory_order(spec.size, spec.stride) if held_spec(spec) is spec else None
    return tuple(range(len(spec.size))) if order is None else tuple(order)


@functools.lru_cache(maxsize=65536)
def inverse_of(spec: Spec) -> tuple[int, ...]:
    """The permutation that undoes `order_of`."""
    order = order_of(spec)
    return tuple(sorted(range(len(order)), key=order.__getitem__))


@functools.lru_cache(maxsize=65536)
def held_spec(spec: Spec) -> Spec:
    """The layout of an array for a tensor of this spec: that of the tensor, or without its holes."""
    dense = memory_order(spec.size, spec.stride) is not None and spec.covers_storage()
    if dense and not (spec.conj or spec.neg):
        return spec
    return make_spec(spec.dtype, spec.size, contiguous_strides(spec.size))


class JaxData(BackendData):
    """A handle on a JAX array. A PyTorch tensor that shares its memory is made when one is asked for."""

    __slots__ = ("_array", "_view")

    def __init__(self, device: BackendDevice, spec: Spec, array: Array) -> None:
        super().__init__(device, spec, None)
        self._array: Array = array
        self._view: torch.Tensor | None = None

    @classmethod
    def sharing(cls, tensor: torch.Tensor) -> JaxData:
        """A handle on the memory of a tensor, so that it need not be made an array again for each run."""
        spec = held_spec(spec_of(tensor))
        with all_bits():
            handle = cls(BackendDevice.of(tensor.device), spec, array_of(tensor, spec))
        handle._view = tensor if spec is spec_of(tensor) else None
        return handle

    @property
    def state(self) -> DataState:
        """Always data."""
        return DataState.TENSOR

    @property
    def array(self) -> Array:
        """The array, in the order of memory."""
        return self._array

    @property
    def shared(self) -> bool:
        """True when a PyTorch tensor shares the memory: then XLA may not reuse it."""
        return self._view is not None

    def tensor(self) -> torch.Tensor:
        """A tensor on the array's memory; the same one each time."""
        if self._view is None and self._array.size == 0:
            # Memory of PyTorch's own, which can grow: views of nothing may begin behind its end.
            self._view = torch.empty_strided(
                self.spec.size, self.spec.stride, dtype=self.spec.dtype, device=self.device.torch
            )
        if self._view is None:
            self._view = torch.from_dlpack(self._array.block_until_ready()).permute(inverse_of(self.spec))
        return self._view

    def replace(self, array: Array) -> None:
        """Hold another array of the same spec. Only for data that nobody shares."""
        self._array = array

    def assign(self, other: BackendData) -> None:
        """Hold what `other` holds. Raises when its spec is another."""
        if other.spec.size != self.spec.size or other.spec.dtype is not self.spec.dtype:
            raise BackendError(f"a handle on {self.spec} cannot hold {other.spec}")
        self._array = array_of(other, self.spec)
        self._view = None


def array_of(held: torch.Tensor | BackendData, spec: Spec) -> Array:
    """The data as an array in the order of memory that `spec` says; shared where that can be."""
    if isinstance(held, JaxData) and held.spec is spec:
        return held.array
    tensor = held.tensor() if isinstance(held, BackendData) else held
    tensor = tensor.detach().resolve_conj().resolve_neg().permute(order_of(spec)).contiguous()
    return jax.dlpack.from_dlpack(tensor)


def copied(array: Array) -> Array:
    """A copy in memory of its own."""
    return jnp.copy(array)


def jax_device(device: torch.device) -> Any:
    """JAX's name for a physical device."""
    platform = "gpu" if device.type == "cuda" else device.type
    try:
        return jax.devices(platform)[device.index or 0]
    except (RuntimeError, IndexError) as error:
        raise BackendError(
            f"JAX sees no device {device}", hint="pip install 'jax[cuda13]', or set device_type to 'cpu'"
        ) from error
