"""Methods of `torch.Tensor` that must know the device: `.data = `, `repr`, data pointers, copy on write, copies."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.execute.pending import uncomputed
from torch_ltc.execute.sync import read, sync
from torch_ltc.program.spec import spec_of
from torch_ltc.pytorch.patches import replaces
from torch_ltc.record.buffer import Buffer, find_buffer


@replaces("torch.Tensor.data")
def _dropping_number(descriptor: Any) -> Any:
    # Assigning `.data` changes what a tensor looks at without telling us; the value number it carries would be stale.
    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        self.__dict__.pop("_ltc", None)
        descriptor.__set__(self, value)

    return property(descriptor.__get__, set_data, doc=descriptor.__doc__)


@replaces("torch.Tensor.data_ptr")
def _comparable_pointer(original: Any) -> Any:
    # Libraries compare pointers to find tensors that share memory. Nothing can be read at these.
    def data_ptr(self: torch.Tensor) -> int:
        buffer: Buffer | None = None
        if self.device.type == "ltc":
            buffer = find_buffer(self)
        if buffer is None:
            pointer: int = original(self)
            return pointer
        spec = spec_of(self)
        size_bytes = spec.dtype.itemsize
        return buffer.address(spec.extent() * size_bytes) + spec.offset * size_bytes if spec.numel else 0

    return data_ptr


def _of_physical(original: Any) -> Any:
    # Copy on write is the physical memory's: `_lazy_clone` is recorded like any other call. It changes the storage of
    # what it clones, too, so that everything pending must have run.
    def ask(tensor: torch.Tensor) -> Any:
        if tensor.device.type != "ltc":
            return original(tensor)
        sync(wait=True)
        return read(tensor, original, "storage")

    return ask


for _path in ("torch._C._is_cow_tensor", "torch._C._data_address"):
    replaces(_path)(_of_physical)


# The value number is a cache that belongs to this very tensor: it must not travel with a copy.
@replaces("torch._utils._get_obj_state")
def _state_without_number(state: Any) -> Any:
    def get_state(obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            obj.__dict__.pop("_ltc", None)
        return state(obj)

    return get_state


@replaces("torch.Tensor.__deepcopy__")
def _copy_without_number(deepcopy: Any) -> Any:
    def deep_copy(self: torch.Tensor, memo: Any) -> Any:
        self.__dict__.pop("_ltc", None)
        return deepcopy(self, memo)

    return deep_copy


# How many hooks were added to leaves so far. A replay runs no hook that its recording has not run, and a tensor without
# hooks has nothing that could be looked at.
leaf_hooks = {"count": 0}


def _counting(original: Any) -> Any:
    def register(self: torch.Tensor, hook: Any) -> Any:
        if self.is_leaf:
            leaf_hooks["count"] += 1
        return original(self, hook)

    return register


for _path in ("torch.Tensor.register_hook", "torch.Tensor.register_post_accumulate_grad_hook"):
    replaces(_path)(_counting)


@replaces("torch._tensor_str._tensor_str")
def _reading_once(text: Any) -> Any:
    # One read of the whole tensor instead of a dozen recorded operations and reads.
    def tensor_str(self: torch.Tensor, indent: int) -> Any:
        if self.device.type != "ltc":
            return text(self, indent)
        if settings.tensor_repr == "pending":
            state = uncomputed(self)
            if state:
                return f"<{state}>"
        return text(read(self, lambda real: real.to("cpu", copy=True), "print"), indent)

    return tensor_str
