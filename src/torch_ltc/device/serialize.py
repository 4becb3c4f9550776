"""Storages of the device as PyTorch's Python side sees them: copying, deepcopy, pickle, save and load.

A lazy storage has no memory of its own, so the methods that would touch it are replaced on `torch.UntypedStorage` by
ones that go through the buffer; for storages of other devices they are what they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.device.tensors import wrap_physical
from torch_ltc.errors import DataAccessError
from torch_ltc.execute.sync import read_buffer
from torch_ltc.program.spec import Spec, make_spec, spec_of
from torch_ltc.record.buffer import Buffer, physical_device

_Storage = torch.UntypedStorage


def _buffer(storage: Any) -> Buffer | None:
    return getattr(storage, "handle", None) if isinstance(storage, _Storage) else None


def _flat(buffer: Buffer) -> Spec:
    return make_spec(torch.uint8, (buffer.size_bytes,), (1,))


def _to_cpu(buffer: Buffer) -> torch.UntypedStorage:
    """The bytes of a buffer in a new CPU storage."""
    return read_buffer(buffer, _flat(buffer), lambda real: real.to("cpu", copy=True), "storage").untyped_storage()


def storage_from(source: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device with a copy of the bytes of a CPU storage."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(source)
    data = flat.to(physical_device(), copy=True)
    return wrap_physical(data, spec_of(data)).untyped_storage()


def _storage_from_bytes(flat: torch.Tensor) -> torch.UntypedStorage:
    return storage_from(flat.untyped_storage())


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _replace(name: str) -> Callable[[Callable[..., Any]], None]:
    """Use the decorated function for storages of the device. It gets the buffer before the method's own arguments."""

    def install(ours: Callable[..., Any]) -> None:
        theirs = getattr(_Storage, name)

        @functools.wraps(theirs)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            buffer = self.__dict__.get("handle")
            return theirs(self, *args, **kwargs) if buffer is None else ours(self, buffer, *args, **kwargs)

        setattr(_Storage, name, method)

    return install


def _refuse(name: str) -> None:
    @_replace(name)
    def refused(storage: Any, buffer: Buffer, *args: Any, **kwargs: Any) -> Any:
        raise DataAccessError(
            f"UntypedStorage.{name} needs memory that a storage of the ltc device does not have",
            hint="work on the tensor, or on tensor.cpu()",
        )


def install_storage_methods() -> None:
    """Teach `torch.UntypedStorage` about storages of the device."""

    @_replace("nbytes")
    def nbytes(storage: Any, buffer: Buffer) -> int:
        return buffer.size_bytes

    @_replace("__len__")
    def length(storage: Any, buffer: Buffer) -> int:
        return buffer.size_bytes

    @_replace("cpu")
    def cpu(storage: Any, buffer: Buffer) -> torch.UntypedStorage:
        return _to_cpu(buffer)

    @_replace("clone")
    def clone(storage: Any, buffer: Buffer) -> torch.UntypedStorage:
        return storage_from(_to_cpu(buffer))

    @_replace("tolist")
    def tolist(storage: Any, buffer: Buffer) -> Any:
        return _to_cpu(buffer).tolist()

    @_replace("__getitem__")
    def getitem(storage: Any, buffer: Buffer, index: Any) -> Any:
        return _to_cpu(buffer)[index]

    @_replace("__repr__")
    def text(storage: Any, buffer: Buffer) -> str:
        return f"[torch.storage.UntypedStorage(device=ltc:0) of size {buffer.size_bytes}]"

    @_replace("__reduce__")
    def reduce(storage: Any, buffer: Buffer) -> Any:
        return (_storage_from_bytes, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(_to_cpu(buffer)),))

    @_replace("data_ptr")
    def data_ptr(storage: Any, buffer: Buffer) -> int:
        # Libraries find shared storages by comparing pointers: a number that tells buffers apart, and no address.
        return buffer.identity << 6

    typed: Any = torch.TypedStorage.__reduce__

    @functools.wraps(typed)
    def typed_reduce(self: Any) -> Any:
        if _buffer(self._untyped_storage) is None:
            return typed(self)
        return (_typed_storage, (self._untyped_storage, self.dtype))

    torch.TypedStorage.__reduce__ = typed_reduce  # type: ignore[method-assign]
    for name in ("fill_", "resize_", "share_memory_", "__setitem__", "_write_file", "byteswap"):
        _refuse(name)
    _install_moves()


def _install_moves() -> None:
    move, copy = _Storage.to, _Storage.copy_

    @functools.wraps(move)
    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        target, buffer = torch.device(device), _buffer(self)
        if target.type == "ltc":
            return self if buffer is not None else storage_from(self.cpu())
        return move(self if buffer is None else _to_cpu(buffer), device=target, non_blocking=non_blocking)

    @functools.wraps(copy)
    def copy_(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        target, other = _buffer(self), _buffer(source)
        if target is None:
            return copy(self, source if other is None else _to_cpu(other), non_blocking)
        fresh = _buffer(storage_from(source.cpu()))
        assert fresh is not None
        read_buffer(
            target, _flat(target), lambda real: real.copy_(fresh.physical(_flat(fresh), real.device)), "storage"
        )
        return self

    make = _Storage.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "ltc":
            return make(cls, *args, **kwargs)
        return storage_from(make(cls, *args))

    _Storage.__new__ = staticmethod(new)  # type: ignore[method-assign]
    _Storage.to = to  # type: ignore[method-assign]
    _Storage.copy_ = copy_  # type: ignore[method-assign]
