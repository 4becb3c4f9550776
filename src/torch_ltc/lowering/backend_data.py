"""Devices as backends name them, and handles on data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from torch_ltc.errors import BackendError, DeviceMismatchError
from torch_ltc.program.spec import Spec, make_spec, spec_of
from torch_ltc.pytorch.private import conj_view, neg_view

DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, order=True)
class BackendDeviceType:
    """A kind of physical device."""

    name: str = "cpu"

    def __post_init__(self) -> None:
        if self.name not in DEVICE_TYPES:
            raise BackendError(f"there is no device type {self.name!r}", hint=f"one of: {', '.join(DEVICE_TYPES)}")

    def __str__(self) -> str:
        return self.name.upper()


@dataclass(frozen=True, slots=True, order=True)
class BackendDevice:
    """One physical device: its kind and its place among those of its kind."""

    type: BackendDeviceType = BackendDeviceType()
    ordinal: int = 0

    @classmethod
    def parse(cls, text: str) -> BackendDevice:
        """The device that "cpu", "cuda:1" or the printed form "CUDA1" names. Raises when there is none such."""
        name, colon, ordinal = text.strip().lower().partition(":")
        if not colon:
            letters = name.rstrip("0123456789")
            name, ordinal = letters, name[len(letters) :]
        if not (ordinal.isdigit() or (ordinal == "" and not colon)):
            raise BackendError(f"{text!r} names no device", hint="write 'cpu', 'cuda' or 'cuda:1'")
        return cls(BackendDeviceType(name), int(ordinal or 0))

    @classmethod
    def of(cls, device: torch.device) -> BackendDevice:
        """The same device in our terms."""
        return cls(BackendDeviceType(device.type), device.index or 0)

    @property
    def torch(self) -> torch.device:
        """The same device in PyTorch's terms."""
        return torch.device("cpu") if self.type.name == "cpu" else torch.device(self.type.name, self.ordinal)

    def __str__(self) -> str:
        return f"{self.type}{self.ordinal}"


def common_device(data: list[BackendData]) -> BackendDevice:
    """The one device that all of these are on. Raises when they are on several."""
    found = sorted({item.device for item in data})
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise DeviceMismatchError(f"data of one program must be on one device, got: {names}", hint="move it first")
    return found[0]


class DataState(enum.Enum):
    """The content of a handle."""

    PLACEHOLDER = "nothing yet: the result of a program that has not run"
    SCALAR = "one number, without memory on the device"
    TENSOR = "data in device memory"


class BackendData:
    """A handle on data of one device. Its spec is known before it holds anything.

    A backend with arrays of its own derives from this: it keeps the array, and `tensor()` makes a PyTorch tensor of it
    when one is asked for.
    """

    # A plain slots class: one is built per result of every run.
    __slots__ = ("device", "spec", "_held", "__weakref__")

    def __init__(
        self, device: BackendDevice, spec: Spec, held: torch.Tensor | bool | int | float | complex | None
    ) -> None:
        self.device = device
        self.spec = spec
        self._held = held

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> BackendData:
        """A handle on this tensor's memory."""
        return BackendData(BackendDevice.of(tensor.device), spec_of(tensor), tensor)

    @classmethod
    def from_scalar(cls, value: bool | int | float | complex, dtype: torch.dtype, device: BackendDevice) -> BackendData:
        """A handle on one number."""
        return BackendData(device, make_spec(dtype, (), ()), value)

    @property
    def state(self) -> DataState:
        """The content of the handle now."""
        if self._held is None:
            return DataState.PLACEHOLDER
        return DataState.TENSOR if isinstance(self._held, torch.Tensor) else DataState.SCALAR

    @property
    def has_value(self) -> bool:
        """True unless the handle is a placeholder."""
        return self.state is not DataState.PLACEHOLDER

    @property
    def size_bytes(self) -> int:
        """Bytes that the data takes, or will take."""
        return self.spec.extent() * self.spec.dtype.itemsize

    def assign(self, other: BackendData) -> None:
        """Hold what `other` holds. Raises when its size or dtype is another."""
        if other.spec.size != self.spec.size or other.spec.dtype is not self.spec.dtype:
            raise BackendError(f"a handle on {self.spec} cannot hold {other.spec}")
        if other.device != self.device:
            raise DeviceMismatchError(f"a handle on {self.device} cannot hold data of {other.device}", hint="copy it")
        held = other.tensor()
        if spec_of(held) is not self.spec:
            size, stride = self.spec.size, self.spec.stride
            held = torch.empty_strided(size, stride, dtype=self.spec.dtype, device=held.device).copy_(held)
        self._held = held

    def tensor(self) -> torch.Tensor:
        """The data as a PyTorch tensor, without a copy where that can be."""
        held = self._held
        if held is None:
            raise BackendError(f"this handle on {self.spec} holds nothing yet", hint="run the program that defines it")
        if not isinstance(held, torch.Tensor):
            held = torch.full((), held, dtype=self.spec.dtype, device=self.device.torch)
        return held

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec}, {self.device}, {self.state.name.lower()})"


def put_back(storage: torch.UntypedStorage, value: torch.UntypedStorage) -> None:
    """Give a storage the value that it had, also where it was resized since."""
    if storage.nbytes() != value.nbytes():
        storage.resize_(value.nbytes())
    storage.copy_(value)


def alias_physical(data: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A physical tensor of this spec on the storage of `data`."""
    tensor = torch.empty(0, dtype=spec.dtype, device=data.device)
    storage = data.untyped_storage()
    needed = spec.extent() * spec.dtype.itemsize
    if storage.nbytes() < needed:
        storage.resize_(needed)
    tensor.set_(storage, spec.offset, spec.size, spec.stride)
    if spec.conj:
        tensor = conj_view(tensor)
    if spec.neg:
        tensor = neg_view(tensor)
    return tensor
