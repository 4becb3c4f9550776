"""Nested tensors of the device with the strided layout: their buffer is a tensor of the device.

Sizes, strides and offsets of the parts are plain tensors of the CPU, as on every device. PyTorch's own kernels make
nested tensors, look at parts of them and copy them, whatever device the buffer is on. Other calls on them run on the
physical device, and nested results are put on the device again.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torch_ltc.errors import UnsupportedLayoutError
from torch_ltc.native.library import extension
from torch_ltc.pytorch.private import NESTED, PLAIN, OpOverload
from torch_ltc.record.call_site import current_source

aten = torch.ops.aten


def is_on_device(value: object) -> bool:
    """True for a nested tensor of the device."""
    return isinstance(value, torch.Tensor) and value.is_nested and value.device.type == "ltc"


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor]:
    """The buffer: all of the memory, as one dimension."""
    buffer: torch.Tensor = aten.values.default.redispatch(NESTED, tensor)
    return (buffer,)


def put_together(like: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """A nested tensor in this buffer, with the sizes, strides and offsets of another one."""
    if buffer.device.type == "ltc" and extension is None:
        _refuse()
    sizes, strides, offsets = (op.redispatch(NESTED, like) for op in _PLACES)
    if sizes.dim() != 2:
        made: torch.Tensor = aten._nested_tensor_from_tensor_list.default([], dtype=like.dtype, device=buffer.device)
        return made
    # A nested tensor looks at a storage from its beginning.
    offsets = offsets + buffer.storage_offset()
    made = aten._nested_view_from_buffer.default.redispatch(PLAIN, buffer, sizes, strides, offsets)
    return made


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """A nested tensor is as large as its storage, and storages of the device have a size in the extension alone."""
    raise UnsupportedLayoutError(
        "nested tensors with the strided layout need the extension in C++ on the ltc device",
        source=str(current_source()),
        hint="`ltc build`, or layout=torch.jagged, or make it on the CPU",
    )


def _own(op: OpOverload, keys: Any) -> Any:
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


_PLACES = (
    aten._nested_tensor_size.default,
    aten._nested_tensor_strides.default,
    aten._nested_tensor_storage_offsets.default,
)
KERNELS: dict[str, Any] = {
    op.name(): _own(op, NESTED)
    for op in (
        *_PLACES, aten.values.default, aten.alias.default, aten.detach.default, aten.is_same_size.default,
        aten.unbind.int, aten.select.int, aten.narrow.default, aten.transpose.int, aten.view.default,
        aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.chunk.default,
        aten.split_with_sizes.default, aten.empty_like.default, aten.clone.default, aten._to_copy.default,
        aten.copy_.default,
    )
}  # fmt: skip
"""By the name of an operator, the kernel for nested tensors."""
PLAIN_KERNELS: dict[str, Any] = {
    op.name(): _own(op, PLAIN) if extension is not None else _refuse
    for op in (
        aten._nested_view_from_buffer.default, aten._nested_tensor_from_tensor_list.default,
        aten._nested_from_padded.default,
    )
}  # fmt: skip
"""By the name of an operator, the kernel for plain tensors of which nested ones are made."""
