"""Methods of `torch.Tensor` that must know the device: `.data = `, `repr`, data pointers, and what is copied along."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.errors import DataAccessError
from torch_ltc.execute.pending import uncomputed
from torch_ltc.execute.sync import read

_base = torch._C.TensorBase


def _refusal(what: str) -> DataAccessError:
    return DataAccessError(
        f"{what} was asked of a tensor on ltc: its memory is the physical device's, and may not be computed yet",
        hint="use tensor.cpu() and take it from there",
    )


def _set(name: str, value: Any) -> None:
    setattr(torch.Tensor, name, value)


def _install_data_setter() -> None:
    # Assigning `.data` changes what a tensor looks at without telling us; the value number it carries would be stale.
    descriptor: Any = _base.data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        self.__dict__.pop("_ltc", None)
        descriptor.__set__(self, value)

    _set("data", property(descriptor.__get__, set_data, doc=descriptor.__doc__))


def _install_refusals() -> None:
    pointer: Any = _base.data_ptr
    dlpack: Any = torch.Tensor.__dlpack__

    @functools.wraps(pointer)
    def data_ptr(self: torch.Tensor) -> Any:
        if self.device.type == "ltc":
            raise _refusal("data_ptr()")
        return pointer(self)

    @functools.wraps(dlpack)
    def to_dlpack(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "ltc":
            raise _refusal("a DLPack capsule")
        return dlpack(self, *args, **kwargs)

    capsule: Any = torch._C._to_dlpack

    @functools.wraps(capsule)
    def c_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "ltc":
            raise _refusal("a DLPack capsule")
        return capsule(tensor, *args, **kwargs)

    for owner, name in ((torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"), (torch._C, "_to_dlpack")):
        setattr(owner, name, c_dlpack)
    _set("data_ptr", data_ptr)
    _set("__dlpack__", to_dlpack)


def _install_state() -> None:
    # The value number is a cache that belongs to this very tensor: it must not travel with a copy.
    state: Any = torch._utils._get_obj_state
    deepcopy: Any = torch.Tensor.__deepcopy__

    @functools.wraps(state)
    def get_state(obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            obj.__dict__.pop("_ltc", None)
        return state(obj)

    @functools.wraps(deepcopy)
    def deep_copy(self: torch.Tensor, memo: Any) -> Any:
        self.__dict__.pop("_ltc", None)
        return deepcopy(self, memo)

    torch._utils._get_obj_state = get_state
    _set("__deepcopy__", deep_copy)


def _install_text() -> None:
    # One read of the whole tensor instead of a dozen recorded operations and reads.
    text: Any = torch._tensor_str._tensor_str

    @functools.wraps(text)
    def tensor_str(self: torch.Tensor, indent: int) -> Any:
        if self.device.type != "ltc":
            return text(self, indent)
        if settings.tensor_repr == "pending":
            state = uncomputed(self)
            if state:
                return f"<{state}>"
        return text(read(self, lambda real: real.to("cpu", copy=True), "print"), indent)

    torch._tensor_str._tensor_str = tensor_str


def install_tensor_methods() -> None:
    """Replace the methods. Once per process."""
    _install_data_setter()
    _install_refusals()
    _install_state()
    _install_text()
