"""DLPack: tensors of the device as arrays of other libraries, and back.

What another library gets is a copy of the value, on the physical device: the memory itself is written by programs that
run later, unseen. PyTorch's own functions give the tensor itself again, so that it stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.errors import DataAccessError
from torch_ltc.execute.sync import read
from torch_ltc.pytorch.patches import replaces
from torch_ltc.record.buffer import physical_device


def _is_ours(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "ltc"


def _check_exportable(tensor: torch.Tensor, copy: bool | None) -> None:
    """Raise what eager raises for tensors that a capsule cannot describe, and refuse a capsule without a copy."""
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if tensor.is_conj():
        raise BufferError("Can't export tensors with the conjugate bit set")
    if tensor.layout is not torch.strided:
        raise BufferError("Can't export tensors with layout other than torch.strided")
    if copy is False:
        raise DataAccessError(
            "a DLPack capsule without a copy was asked of a tensor on ltc: its memory is the physical device's, and "
            "programs that are not run yet may write it",
            hint="leave copy=False out",
        )


@replaces("torch.Tensor.__dlpack__")
def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    def __dlpack__(self: torch.Tensor, *, copy: bool | None = None, **options: Any) -> Any:
        if not _is_ours(self):
            return original(self, copy=copy, **options)
        _check_exportable(self, copy)
        return original(read(self, torch.clone, "DLPack"), **options)

    return __dlpack__


@replaces("torch.Tensor.__dlpack_device__")
def _of_physical(original: Callable[..., Any]) -> Callable[..., Any]:
    def __dlpack_device__(self: torch.Tensor) -> Any:
        return original(torch.empty(0, device=physical_device()) if _is_ours(self) else self)

    return __dlpack_device__


def _exporting_itself(original: Callable[..., Any]) -> Callable[..., Any]:
    # Not a capsule, but it is what takes a capsule's place in the newer protocol.
    def to_dlpack(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not _is_ours(tensor):
            return original(tensor, *args, **options)
        _check_exportable(tensor, None)
        return tensor.detach()

    return to_dlpack


for _path in (
    "torch.utils.dlpack.to_dlpack",
    "torch.to_dlpack",
    "torch._C._to_dlpack",
    "torch._C._to_dlpack_versioned",
):
    replaces(_path)(_exporting_itself)


def _importing_itself(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_dlpack(ext_tensor: Any, *, device: Any = None, copy: bool | None = None, **options: Any) -> Any:
        on_device = device is None or torch.device(device).type == "ltc"
        if not (_is_ours(ext_tensor) and on_device):
            given = {name: value for name, value in (("device", device), ("copy", copy)) if value is not None}
            return original(ext_tensor, **given, **options)
        _check_exportable(ext_tensor, None)
        return ext_tensor.clone() if copy else ext_tensor.detach()

    return from_dlpack


for _path in ("torch.utils.dlpack.from_dlpack", "torch.from_dlpack"):
    replaces(_path)(_importing_itself)
