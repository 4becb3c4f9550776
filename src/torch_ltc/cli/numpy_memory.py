"""Memory that tensors of the device and NumPy arrays share, for `ltc run`.

On the CPU, `tensor.numpy()` and the tensor are one memory. A tensor of the device is not computed yet, so that its
array looks at a copy of the whole storage in host memory, and the two are kept equal: what was written to arrays is
copied to the device before the next call that uses the storage, what a call wrote to the storage is copied to the
arrays after it. Storages without a living array cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_ltc.execute.sync import touched
from torch_ltc.pytorch.private import no_torch_function, storage_use_count, untyped_storage
from torch_ltc.record.buffer import buffer_of

# Uses of the host storage when no array is left: that of `host`, and that of the object which is asked.
_UNUSED = 2
_FEW = 64

Versions = list[tuple["_Shared", torch.Tensor, int]]


class _Shared:
    """One storage of the device, and the host memory that its arrays see."""

    __slots__ = ("device", "host", "known")

    def __init__(self, tensor: torch.Tensor) -> None:
        length = untyped_storage(tensor).nbytes() // tensor.element_size()
        self.device = tensor.detach().data.as_strided((length,), (1,), 0)
        self.host = torch.empty(length, dtype=tensor.dtype, device="cpu")
        self.download()

    def download(self) -> None:
        """Copy what the device has to the arrays."""
        # The tensor may have been made in this mode, and can then be written to in it alone.
        with torch.inference_mode():
            self.host.copy_(self.device)
        self.known = self._bytes()

    def upload(self) -> None:
        """Copy what was written to the arrays to the device."""
        now = self._bytes()
        if now != self.known:
            with torch.inference_mode():
                self.device.copy_(self.host)
            self.known = now

    def array(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> Any:
        """An array of the host memory with the sizes and strides of a tensor of this storage."""
        seen = torch.empty(0, dtype=tensor.dtype, device="cpu")
        seen.set_(untyped_storage(self.host), tensor.storage_offset(), tensor.size(), tensor.stride())
        return make(seen)

    def in_use(self) -> bool:
        """True while an array of it lives."""
        return storage_use_count(untyped_storage(self.host)._cdata) > _UNUSED

    def _bytes(self) -> bytes:
        return self.host.view(torch.uint8).numpy().tobytes() if self.host.numel() else b""


def storage_of(tensor: torch.Tensor) -> int | None:
    """A number that the storage of a tensor has; None for a wrapper that a transform of torch.func made."""
    try:
        return int(untyped_storage(tensor)._cdata)
    except NotImplementedError:
        return None


class NumpyMemory:
    """All storages of the device that have arrays."""

    def __init__(self) -> None:
        self._shared: dict[int, _Shared] = {}
        self._most = _FEW

    def __bool__(self) -> bool:
        return bool(self._shared)

    def array(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> Any:
        """An array that shares its memory with `tensor`; `make` is PyTorch's `Tensor.numpy`."""
        with no_torch_function():
            if len(self._shared) >= self._most:
                self._prune()
            key = untyped_storage(tensor)._cdata
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(tensor)
            return shared.array(tensor, make)

    def before(self, tensors: Iterable[torch.Tensor]) -> Versions:
        """For the tensors of a call: bring them up to date. What is returned is for `after`."""
        found: Versions = []
        for tensor in tensors:
            key = storage_of(tensor)
            shared = None if key is None else self._shared.get(key)
            if key is None or shared is None:
                continue
            shared.upload()
            if shared.in_use():
                # A tensor that was made in inference mode does not count what is written to it.
                found.append((shared, tensor, -1 if tensor.is_inference() else tensor._version))
            else:
                del self._shared[key]
        return found

    def after(self, found: Versions, writes: bool) -> None:
        """Bring the arrays of storages that the call wrote to up to date, or of all if `writes`."""
        for shared in {shared for shared, tensor, old in found if writes or old < 0 or tensor._version != old}:
            shared.download()

    def upload_all(self) -> None:
        """Bring all tensors up to date, for code that is not seen call by call."""
        with no_torch_function():
            self._prune()

    def download_all(self) -> None:
        """Bring all arrays up to date whose storages may have been written to since."""
        with no_torch_function():
            for shared in self._shared.values():
                buffer = buffer_of(shared.device)
                if buffer.job is not None or touched(buffer):
                    shared.download()

    def _prune(self) -> None:
        """Forget the storages that have no array any more."""
        for key, shared in list(self._shared.items()):
            shared.upload()
            if not shared.in_use():
                del self._shared[key]
        self._most = max(_FEW, 2 * len(self._shared))
