"""Sparse, nested and quantized tensors.

Calls with sparse tensors run on the physical device; those of the COO layout are on the device (`device/sparse.py`).
Quantized ones live on the physical device. Strided nested ones are refused, with the way round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torch_ltc.device.fallback import run_eagerly
from torch_ltc.device.kernels import Kernel, make_kernel
from torch_ltc.errors import UnsupportedLayoutError
from torch_ltc.pytorch.private import COMPRESSED, OpOverload
from torch_ltc.record.call_site import current_source
from torch_ltc.record.operator import Operator

aten = torch.ops.aten


def run_on_physical_device(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Backend fallback of the other layouts: run the call eagerly."""
    operator = Operator(op)
    return run_eagerly(operator, operator.values(args, kwargs), "it takes tensors that are not plain strided ones")


def _refusing(what: str, hint: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedLayoutError(what, source=str(current_source()), hint=hint)

    return refuse


refuse_nested = _refusing(
    "a nested tensor with the strided layout was asked for, which the ltc device cannot hold",
    "use layout=torch.jagged, or make it on the CPU; nn.TransformerEncoder(..., enable_nested_tensor=False)",
)

KERNELS: dict[str, Any] = {
    "aten::_nested_tensor_from_tensor_list": refuse_nested,
    "aten::_nested_view_from_buffer": refuse_nested,
}


def embedding_bag_backward(*args: Any, **kwargs: Any) -> Any:
    """Kernel of `aten::_embedding_bag_backward`."""
    values = _BAG_BACKWARD.values(args, kwargs)
    if values[_BAG_SPARSE]:
        return run_eagerly(_BAG_BACKWARD, values, "its result is sparse")
    return _bag_backward(*args, **kwargs)


_BAG_BACKWARD = Operator(aten._embedding_bag_backward.default)
_BAG_SPARSE = [argument.name for argument in _BAG_BACKWARD.arguments].index("sparse")
_bag_backward = make_kernel(aten._embedding_bag_backward.default)
KERNELS["aten::_embedding_bag_backward"] = embedding_bag_backward


def _part(op: OpOverload) -> Kernel:
    """A part of a compressed sparse tensor, which PyTorch's kernel takes whatever device it is on."""
    return lambda tensor: op.redispatch(COMPRESSED, tensor)


PARTS: dict[str, Any] = {
    op.name(): _part(op)
    for op in (
        aten.crow_indices.default,
        aten.col_indices.default,
        aten.ccol_indices.default,
        aten.row_indices.default,
        aten.values.default,
    )
}
# Operators that are composed of their `out=` form for devices without a kernel, which takes no other layouts.
PRODUCTS: dict[str, Any] = {
    op.name(): functools.partial(run_on_physical_device, op)
    for op in (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
    )
}

__all__ = ["KERNELS", "PARTS", "PRODUCTS", "refuse_nested", "run_on_physical_device"]
