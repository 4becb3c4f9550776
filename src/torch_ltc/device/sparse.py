"""Sparse tensors of the device: their indices and values are tensors of the device.

PyTorch's own kernels make them and take them apart, whatever device their parts are on. Calls on them run on the
physical device, and sparse results are put on the device again.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from torch_ltc.device.registration import composed
from torch_ltc.pytorch.private import COMPRESSED, COORDINATES, SPARSE_KEY, OpOverload

aten = torch.ops.aten
_with_parts = aten._sparse_coo_tensor_with_dims_and_tensors.default
_without_parts = aten._sparse_coo_tensor_with_dims.default


_COO_PARTS = (aten._indices.default, aten._values.default)
_ROW_PARTS = (aten.crow_indices.default, aten.col_indices.default, aten.values.default)
_COLUMN_PARTS = (aten.ccol_indices.default, aten.row_indices.default, aten.values.default)
_PARTS: dict[torch.layout, tuple[OpOverload, ...]] = {
    torch.sparse_coo: _COO_PARTS,
    torch.sparse_csr: _ROW_PARTS,
    torch.sparse_bsr: _ROW_PARTS,
    torch.sparse_csc: _COLUMN_PARTS,
    torch.sparse_bsc: _COLUMN_PARTS,
}


def is_sparse(value: object) -> bool:
    """True for a sparse tensor of any device."""
    return isinstance(value, torch.Tensor) and value.layout in _PARTS


def is_on_device(value: object) -> bool:
    """True for a sparse tensor of the device."""
    return is_sparse(value) and value.device.type == "ltc"  # type: ignore[attr-defined]


def _ask(op: OpOverload, tensor: torch.Tensor) -> Any:
    """What PyTorch's kernel says of a sparse tensor, without a look at its parts."""
    return op.redispatch(COORDINATES if tensor.layout is torch.sparse_coo else COMPRESSED, tensor)


def put_together(like: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of these parts, of the layout and the size of another one, and coalesced if that is."""
    size = list(like.size())
    if like.layout is not torch.sparse_coo:
        compressed, plain, values = parts
        return torch.sparse_compressed_tensor(
            compressed, plain, values, size=size, layout=like.layout, check_invariants=False
        )
    indices, values = parts
    coalesced = _ask(aten.is_coalesced.default, like)
    dims = _ask(aten.sparse_dim.default, like), _ask(aten.dense_dim.default, like)
    return make(*dims, size, indices, values, device=values.device, is_coalesced=coalesced)


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices and the values."""
    return tuple([_ask(op, tensor) for op in _PARTS[tensor.layout]])


def replace(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a sparse tensor of the device the size and the parts of another one."""
    if target.layout is torch.sparse_coo:
        target.data = tensor
        return
    # Compressed tensors keep their parts when their data is set, in PyTorch.
    if target.size() != tensor.size() or parts(target)[-1].size() != parts(tensor)[-1].size():
        aten.resize_as_sparse_.default.redispatch(COMPRESSED, target, tensor)
    for own, given in zip(parts(target), parts(tensor), strict=True):
        own.copy_(given)


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
    """Kernel of `aten::copy_` for tensors with coordinates."""
    if target.layout is not source.layout:
        # PyTorch's own would name types that the device does not have.
        raise RuntimeError(
            "copy_() between dense and sparse Tensors is not implemented! Found self type = "
            f"{target.type()} and src type = {source.type()}"
        )
    return _copy(COORDINATES, target, source, non_blocking)


def copy_compressed_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Kernel of `aten::copy_` for compressed tensors, of which there is one at least."""
    return _copy(COMPRESSED, target, source, non_blocking)


def _copy(keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """PyTorch's own kernel compares the two, and copies part by part; parts of one device."""
    if target.layout is source.layout and target.device != source.device:
        source = to_copy(source, device=target.device)
        if not is_on_device(target):
            return target.copy_(source)
    copied: torch.Tensor = aten.copy_.default.redispatch(keys, target, source, non_blocking)
    return copied


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
    *indices, values = [part.to(device, copy=True) for part in parts(source)]
    return put_together(source, *indices, values.to(dtype))


def check_parts(
    indices: torch.Tensor,
    values: torch.Tensor,
    size: Any,
    is_coalesced: bool | None = None,
    check_pinning: bool | None = None,
) -> None:
    """Kernel of `aten::_validate_sparse_coo_tensor_args`: PyTorch has one for the order of indices on its own devices
    alone."""
    check = aten._validate_sparse_coo_tensor_args.default
    composed(check, indices, values, size, None, check_pinning)
    if is_coalesced:
        check(indices.cpu(), torch.empty(values.shape, dtype=values.dtype, device="cpu"), size, True)


def _checked(op: OpOverload) -> Any:
    """The kernel of a composition that would call the check without a look at the device."""

    def kernel(
        indices: torch.Tensor, values: torch.Tensor, size: Any, *, is_coalesced: bool | None = None, **options: Any
    ) -> Any:
        check = is_coalesced and torch.sparse.check_sparse_tensor_invariants.is_enabled()
        if check:
            check_parts(indices, values, size, is_coalesced)
        with torch.sparse.check_sparse_tensor_invariants(enable=False) if check else nullcontext():
            return composed(op, indices, values, size, is_coalesced=is_coalesced, **options)

    return kernel


CHECKS: dict[str, Any] = {"aten::_validate_sparse_coo_tensor_args": check_parts}
CHECKED: dict[str, Any] = {
    op.name(): _checked(op) for op in (aten.sparse_coo_tensor.indices_size, aten._sparse_coo_tensor_unsafe.default)
}
KERNELS: dict[str, Any] = {
    **CHECKED,
    "aten::_sparse_coo_tensor_with_dims_and_tensors": make,
    "aten::_sparse_coo_tensor_with_dims": make_empty,
    "aten::empty.memory_format": empty,
    "aten::copy_": copy_,
    "aten::_to_copy": to_copy,
}


def _plain(op: OpOverload, keys: Any) -> Any:
    return lambda *args: op.redispatch(keys, *args)


KERNELS.update(
    (op.name(), _plain(op, COORDINATES))
    for op in (
        *_COO_PARTS, aten.indices.default, aten.values.default, aten._nnz.default, aten._coalesced_.default,
        aten.is_coalesced.default, aten.sparse_dim.default, aten.dense_dim.default, aten._dimI.default,
        aten._dimV.default,
    )
)  # fmt: skip
COMPRESSED_KERNELS: dict[str, Any] = {
    "aten::copy_": copy_compressed_,
    "aten::_to_copy": to_copy,
    **{
        op.name(): _plain(op, COMPRESSED)
        for op in (
            *_ROW_PARTS, *_COLUMN_PARTS, aten._nnz.default, aten.sparse_dim.default, aten.dense_dim.default,
        )
    },
}  # fmt: skip
