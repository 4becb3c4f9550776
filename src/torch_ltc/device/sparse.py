"""Sparse tensors of the device with the COO layout: a tensor of indices and one of values, both on the device.

PyTorch's own kernels make them and take them apart, whatever device their parts are on. Calls on them run on the
physical device, and sparse results are put on the device again.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.pytorch.private import COORDINATES, SPARSE_KEY, OpOverload

aten = torch.ops.aten
_with_parts = aten._sparse_coo_tensor_with_dims_and_tensors.default
_without_parts = aten._sparse_coo_tensor_with_dims.default


def is_on_device(value: object) -> bool:
    """True for a sparse COO tensor of the device."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo and value.device.type == "ltc"


def _ask(op: OpOverload, tensor: torch.Tensor) -> Any:
    """What PyTorch's kernel says of a sparse tensor, without a look at its parts."""
    return op.redispatch(COORDINATES, tensor) if is_on_device(tensor) else op(tensor)


def put_together(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of these parts, of the size of another one and coalesced if that is."""
    coalesced = _ask(aten.is_coalesced.default, like)
    dims = _ask(aten.sparse_dim.default, like), _ask(aten.dense_dim.default, like)
    return make(*dims, list(like.size()), indices, values, device=values.device, is_coalesced=coalesced)


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and the values."""
    return _ask(aten._indices.default, tensor), _ask(aten._values.default, tensor)


def replace(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a sparse tensor of the device the size and the parts of another one."""
    target.data = tensor


def make(
    sparse_dim: int,
    dense_dim: int,
    size: Any,
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    is_coalesced: bool | None = None,
) -> torch.Tensor:
    """Kernel of `aten::_sparse_coo_tensor_with_dims_and_tensors`."""
    device = values.device if device is None else device
    values, indices = values.to(device, dtype), indices.to(device)
    options = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": device, "is_coalesced": is_coalesced}
    made: torch.Tensor = _with_parts._op_dk(SPARSE_KEY, sparse_dim, dense_dim, size, indices, values, **options)
    return made


def make_empty(
    sparse_dim: int,
    dense_dim: int,
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Kernel of `aten::_sparse_coo_tensor_with_dims`."""
    options = {"dtype": dtype or torch.get_default_dtype(), "layout": torch.sparse_coo, "device": device}
    made: torch.Tensor = _without_parts._op_dk(SPARSE_KEY, sparse_dim, dense_dim, size, **options)
    return made


def empty(size: Any, *, memory_format: torch.memory_format | None = None, **options: Any) -> torch.Tensor:
    """Kernel of `aten::empty.memory_format`."""
    return make_empty(len(size), 0, size, **options)


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Kernel of `aten::copy_`; eager has none from one layout to another."""
    if target.layout is not source.layout or target.layout is not torch.sparse_coo:
        raise RuntimeError(
            "copy_() between dense and sparse Tensors is not implemented! Found self type = "
            f"{target.type()} and src type = {source.type()}"
        )
    given = to_copy(source, dtype=target.dtype, device=target.device)
    if is_on_device(target):
        replace(target, given)
    else:
        target.copy_(given)
    return target


def to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Kernel of `aten::_to_copy`: copies of the parts, which is recorded when they stay on the device."""
    indices, values = (part.to(device, copy=True) for part in parts(source))
    return put_together(source, indices, values.to(dtype))


KERNELS: dict[str, Any] = {
    "aten::_sparse_coo_tensor_with_dims_and_tensors": make,
    "aten::_sparse_coo_tensor_with_dims": make_empty,
    "aten::empty.memory_format": empty,
    "aten::copy_": copy_,
    "aten::_to_copy": to_copy,
}


def _plain(op: OpOverload) -> Any:
    return lambda *args: op.redispatch(COORDINATES, *args)


KERNELS.update(
    (op.name(), _plain(op))
    for op in (
        aten._indices.default, aten._values.default, aten.indices.default, aten.values.default, aten._nnz.default,
        aten._coalesced_.default, aten.is_coalesced.default, aten.sparse_dim.default, aten.dense_dim.default,
        aten._dimI.default, aten._dimV.default,
    )
)  # fmt: skip
