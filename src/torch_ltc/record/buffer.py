"""The memory behind a lazy storage.

One `Buffer` hangs on each lazy storage object, is shared by all its views and dies with it: it is the handle, the alias
group and the sign of life in one.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from torch_ltc.config import settings
from torch_ltc.errors import LtcError, PoisonedTensorError
from torch_ltc.lowering.backend_data import BackendData, alias_physical
from torch_ltc.native.library import extension
from torch_ltc.native.recording import native
from torch_ltc.program.instruction import Program
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.pytorch.private import untyped_storage

_identities = itertools.count(1)
storage_of = untyped_storage
# Addresses begin where no memory of a process is, so that following one ends the process instead of reading other data.
_FIRST_ADDRESS = 1 << 62
_ALIGNMENT = 64


class _AddressSpace:
    """Ranges of numbers in place of addresses, which libraries compare to find out which tensors share memory."""

    def __init__(self) -> None:
        self._next = _FIRST_ADDRESS
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> int:
        """The first number of a range that no other storage gets."""
        with self._lock:
            start = self._next
            self._next += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        return start


_addresses = _AddressSpace()


def physical_device() -> torch.device:
    """The device that programs run on."""
    if settings.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(settings.device_type, settings.device_ordinal)


class _Fields:
    """What a buffer knows, and the values of programs that it is, in pure Python."""

    # Defaults on the class and no __init__: one is built per recorded result, and this is the quickest way to build it.
    # Every attribute is annotated: see `_reserve_attributes`.
    number: int = -1
    spec: Spec
    views: dict[Spec, int] | None = None
    views_base: int = -1
    input: int = -1
    data: torch.Tensor | BackendData | None = None
    # What `remembered` made of the error that lost it.
    error: tuple[LtcError, weakref.ref[LtcError]] | None = None
    # The queued program that defines it or writes to it last.
    job: Future[None] | None = None
    # The program that made it, and the number of its value there.
    maker: tuple[Program, int] | None = None
    # Bytes that a recorded resize will make room for.
    grown_bytes: int = 0
    _identity: int = 0
    _address: int = 0
    _address_bytes: int = 0

    def value_of(self, spec: Spec, base: int) -> int:
        """The absolute number of the value that is this buffer seen as `spec` in the program that begins at `base`, or
        -1."""
        if self.number >= base and self.spec is spec:
            return self.number
        return self.views.get(spec, -1) if self.views is not None and self.views_base == base else -1

    def remember_view(self, spec: Spec, base: int, number: int) -> None:
        """Let later lookups of `spec` find value `number`."""
        if self.views_base != base or self.views is None:
            self.views = {}
            self.views_base = base
        self.views[spec] = number

    def view_numbers(self, base: int) -> list[int]:
        """The absolute numbers of the values that look at this buffer in the program that begins at `base`."""
        return list(self.views.values()) if self.views is not None and self.views_base == base else []

    def note_data(self) -> None:
        """It was given data without a program."""


if TYPE_CHECKING or native is None:  # noqa: SIM108
    _Base = _Fields
else:
    _Base = native.Buffer


class Buffer(_Base):
    """State of one storage.

    - `number` >= the recorder's base: a pending instruction defines it, as value `number`, with spec `spec`.
    - `number` is -1 and there is no `data`: nobody has written to it yet.
    - otherwise `data` holds its physical tensor, or a backend's handle on it, once the program that defines it has run.
    - `error`: the call that should have made it failed; every read says so.
    """

    __slots__ = ()

    @property
    def identity(self) -> int:
        """A number that no other buffer of this process has."""
        if not self._identity:
            self._identity = next(_identities)
        return self._identity

    def address(self, end_bytes: int = 0) -> int:
        """The number that stands for the address of this memory, of at least `end_bytes`; 0 when it is empty. It stays
        the same until the memory grows."""
        needed_bytes = max(self.spec.extent() * self.spec.dtype.itemsize, self.grown_bytes, end_bytes)
        if needed_bytes > self._address_bytes:
            self._address, self._address_bytes = _addresses.reserve(needed_bytes), needed_bytes
        return self._address

    @property
    def size_bytes(self) -> int:
        """Bytes of the physical storage, or what it will need."""
        if isinstance(self.data, torch.Tensor):
            return max(int(self.data.untyped_storage().nbytes()), self.grown_bytes)
        return max(self.spec.extent() * self.spec.dtype.itemsize, self.grown_bytes)

    def physical(self, spec: Spec, device: torch.device) -> torch.Tensor:
        """The physical tensor seen as spec `spec`. For the executor's thread, after the defining job has run."""
        data = self.data
        if data is None:
            # Never written: memory with whatever is in it, as eager's `empty` gives.
            base = self.spec
            data = self.data = torch.empty_strided(base.size, base.stride, dtype=base.dtype, device=device)
        elif isinstance(data, BackendData):
            data = data.tensor()
        if spec is self.spec:
            return data
        if spec.extent() > self.spec.extent():
            data = self.resizable(device)
        return alias_physical(data, spec)

    def resizable(self, device: torch.device) -> torch.Tensor:
        """The physical tensor, in memory that can be resized: what another library made is left. For the executor's
        thread."""
        data = self.physical(self.spec, device)
        if not data.untyped_storage().resizable():
            data = self.data = data.clone(memory_format=torch.preserve_format)
            if native is not None:
                native.disturb_eager()
        return data

    def held(self, spec: Spec, device: torch.device) -> torch.Tensor | BackendData:
        """As `physical`, but a backend's handle on the whole buffer is left as it is."""
        data = self.data
        if spec is self.spec and isinstance(data, BackendData):
            return data
        return self.physical(spec, device)


def _reserve_attributes() -> None:
    """Make room in every buffer for all of its attributes.

    CPython gives the instances of a class room for the attributes that the first ones had; an instance that gets more
    is given a dictionary. In Python 3.11 making it may run the garbage collector, and with that other threads: one that
    sets an attribute of the same instance meanwhile makes a second dictionary on the same memory. The worker and the
    user's thread both set attributes.
    """
    first = Buffer()
    for name in _Fields.__annotations__:
        setattr(first, name, None)


if native is None:
    _reserve_attributes()
else:
    native.set_buffer_class(Buffer)


def new_buffer(spec: Spec, number: int = -1, data: torch.Tensor | None = None) -> Buffer:
    """A buffer with this spec: defined by a pending value, holding data, or neither."""
    buffer = Buffer()
    buffer.number = number
    buffer.spec = spec
    if data is not None:
        buffer.data = data
        buffer.note_data()
    return buffer


def find_buffer(tensor: torch.Tensor) -> Buffer | None:
    """The buffer of a lazy tensor; None when its storage was made by code that does not know the device."""
    if native is not None:
        found: Buffer | None = native.find_buffer(tensor)
        return found
    return getattr(storage_of(tensor), "handle", None)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a subclass that computes on tensors of its own: its storage is there for its views alone."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def buffer_of(tensor: torch.Tensor) -> Buffer:
    """The buffer of a lazy tensor."""
    buffer = find_buffer(tensor)
    if buffer is None:
        storage: Any = storage_of(tensor)
        if (extension is not None and extension.is_own_storage(storage)) or _is_wrapper(tensor):
            # Made by `torch.UntypedStorage(..., device="ltc")`, or of a tensor that wraps others: nobody has written to
            # it yet.
            attach(tensor, new_buffer(make_spec(torch.uint8, (storage.nbytes(),), (1,))))
            return buffer_of(tensor)
        raise LtcError(
            "this ltc tensor has no buffer: its storage was made by code that does not know the device.\n"
            "  try: make the tensor on the CPU and move it with .to('ltc')"
        )
    return buffer


def attach(tensor: torch.Tensor, buffer: Buffer) -> None:
    """Make `buffer` the memory of this tensor's storage."""
    if native is not None:
        native.attach(tensor, buffer)
        return
    storage: Any = storage_of(tensor)
    storage.handle = buffer


def remembered(error: LtcError) -> tuple[LtcError, weakref.ref[LtcError]]:
    """The error that lost a buffer as the buffer refers to it: a copy, and a weak reference to the error itself.

    A buffer that kept an error that was raised would keep the user's variables for ever, itself among them: a storage
    is no place that Python's garbage collector looks into.
    """
    return error.untraced(), weakref.ref(error)


def poisoned(error: LtcError) -> PoisonedTensorError:
    """The error that reading a lost tensor raises, made from the one that lost it."""
    lost = PoisonedTensorError(f"this tensor was never computed, because an earlier call failed:\n  {error}")
    lost.__cause__ = error
    return lost
