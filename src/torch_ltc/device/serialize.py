"""Storages of the device as PyTorch's Python side sees them: copying, deepcopy, pickle, save and load.

A lazy storage has no memory of its own, so the methods that would touch it are replaced on `torch.UntypedStorage` by
ones that go through the buffer; for storages of other devices they are what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.device.tensors import storage_buffer, wrap_physical
from torch_ltc.errors import DataAccessError
from torch_ltc.execute.sync import read_buffer
from torch_ltc.native.recording import native
from torch_ltc.program.spec import Spec, make_spec, spec_of
from torch_ltc.pytorch.patches import replaces
from torch_ltc.record.buffer import Buffer, physical_device
from torch_ltc.record.ordinal import ordinal

_Storage = torch.UntypedStorage


def _buffer(storage: Any) -> Buffer | None:
    return storage_buffer(storage) if isinstance(storage, _Storage) else None


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


def _on_buffer(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Use the decorated function for storages of the device. It gets the buffer before the method's own arguments."""

    def add(ours: Callable[..., Any]) -> Callable[..., Any]:
        def around(theirs: Any) -> Any:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                buffer = storage_buffer(self)
                return theirs(self, *args, **kwargs) if buffer is None else ours(self, buffer, *args, **kwargs)

            return method

        replaces(f"torch.UntypedStorage.{name}")(around)
        return ours

    return add


@_on_buffer("__len__")
@_on_buffer("nbytes")
def _size_bytes(storage: Any, buffer: Buffer) -> int:
    return buffer.size_bytes


@_on_buffer("cpu")
def _cpu(storage: Any, buffer: Buffer) -> torch.UntypedStorage:
    return _to_cpu(buffer)


@_on_buffer("clone")
def _clone(storage: Any, buffer: Buffer) -> torch.UntypedStorage:
    return storage_from(_to_cpu(buffer))


@_on_buffer("tolist")
def _tolist(storage: Any, buffer: Buffer) -> Any:
    return _to_cpu(buffer).tolist()


@replaces("torch.UntypedStorage.__getitem__")
def _indexing(get_item: Any) -> Any:
    def getitem(self: Any, index: Any) -> Any:
        part = isinstance(index, slice)
        # With the extension PyTorch reads single bytes itself.
        buffer = storage_buffer(self) if part or native is None else None
        if buffer is None:
            return get_item(self, index)
        found = _to_cpu(buffer)[index]
        # A copy: there is no storage inside of a storage.
        return storage_from(found) if part else found

    return getitem


@_on_buffer("__repr__")
def _text(storage: Any, buffer: Buffer) -> str:
    return f"[torch.storage.UntypedStorage(device={ordinal.device}) of size {buffer.size_bytes}]"


@_on_buffer("__reduce__")
def _reduce(storage: Any, buffer: Buffer) -> Any:
    return (_storage_from_bytes, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(_to_cpu(buffer)),))


@_on_buffer("data_ptr")
def _data_ptr(storage: Any, buffer: Buffer) -> int:
    return buffer.address()


@_on_buffer("_write_file")
def _write_file(storage: Any, buffer: Buffer, *args: Any) -> Any:
    return _to_cpu(buffer)._write_file(*args)


@_on_buffer("_set_from_file")
def _set_from_file(storage: Any, buffer: Buffer, *args: Any) -> Any:
    loaded = torch.UntypedStorage(buffer.size_bytes, device="cpu")
    loaded._set_from_file(*args)
    return storage.copy_(loaded)


_ON_TENSORS = "work on the tensor, or on tensor.cpu()"


@_on_buffer("resize_")
def _resize(storage: Any, buffer: Buffer, size_bytes: int) -> Any:
    # Who empties a storage, as FSDP does, fills it again before it is read: its memory stays.
    if size_bytes not in (0, buffer.size_bytes):
        raise _refusal("resize_", _ON_TENSORS)
    return storage


def _refusal(name: str, hint: str) -> DataAccessError:
    what = f"UntypedStorage.{name} needs memory that a storage of the ltc device does not have"
    return DataAccessError(what, hint=hint)


def _refuse(name: str, hint: str) -> None:
    @_on_buffer(name)
    def refused(storage: Any, buffer: Buffer, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(name, hint)


for _name in ("fill_", "__setitem__", "byteswap"):
    _refuse(_name, _ON_TENSORS)
# The last two are what a queue or a pipe of `torch.multiprocessing` asks for.
for _name in ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_"):
    _refuse(_name, "share tensor.cpu() between processes, and move it with .to('ltc') in each of them")


@replaces("torch.TypedStorage._get_legacy_storage_class")
def _with_classes_of_the_cpu(original: Any) -> Any:
    # PyTorch looks for classes of typed storages in the module of the device; what it deprecates is not made anew.
    def legacy_storage_class(self: Any) -> Any:
        lazy = storage_buffer(self._untyped_storage) is not None
        return original(_typed_storage(torch.UntypedStorage(0, device="cpu"), self.dtype) if lazy else self)

    return legacy_storage_class


@replaces("torch.TypedStorage.__reduce__")
def _reducing_typed(original: Any) -> Any:
    def reduce(self: Any) -> Any:
        if _buffer(self._untyped_storage) is None:
            return original(self)
        return (_typed_storage, (self._untyped_storage, self.dtype))

    return reduce


@replaces("torch.UntypedStorage.to")
def _moving(move: Any) -> Any:
    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        target, buffer = torch.device(device), _buffer(self)
        if target.type == "ltc":
            return self if buffer is not None else storage_from(self.cpu())
        return move(self if buffer is None else _to_cpu(buffer), device=target, non_blocking=non_blocking)

    return to


@replaces("torch.UntypedStorage.copy_")
def _copying(copy: Any) -> Any:
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

    return copy_


@replaces("torch.UntypedStorage.__new__")
def _making(make: Any) -> Any:
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "ltc":
            return make(cls, *args, **kwargs)
        return storage_from(make(cls, *args))

    return staticmethod(new)


def _no_tag(storage: Any) -> str | None:
    """PyTorch's own tag names the device."""
    return None


def _onto_own_device(storage: Any, location: str) -> Any:
    """What was saved on a device of any number, onto the device of this process; None for other places."""
    return storage.to(device=ordinal.device) if location.partition(":")[0] == "ltc" else None


# Before PyTorch's own for devices of extensions, which has the number of the file.
torch.serialization.register_package(15, _no_tag, _onto_own_device)
