"""Sparse, nested and quantized tensors.

Sparse tensors are on the device (`device/sparse.py`), and calls on them run on the physical device.
Quantized ones live on the physical device. Strided nested ones are refused, with the way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from torch_ltc.device.fallback import run_eagerly
from torch_ltc.device.kernels import Kernel, make_kernel
from torch_ltc.errors import UnsupportedLayoutError
from torch_ltc.pytorch.private import OpOverload, operators_with_kernel
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


def eager_kernels(layout: str, own: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Kernels for all operators that PyTorch has for a sparse layout of the CPU: composed of others, as for devices
    without kernels, most would end in one that takes no sparse tensors."""
    names = operators_with_kernel(f"{layout}CPU")
    return {name: _on_physical_device(name) for name in names if name.startswith("aten::") and name not in own}


def _on_physical_device(name: str) -> Kernel:
    plain, _, overload = name.removeprefix("aten::").partition(".")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run_on_physical_device(getattr(getattr(aten, plain), overload or "default"), *args, **kwargs)

    return kernel


__all__ = ["KERNELS", "eager_kernels", "refuse_nested", "run_on_physical_device"]
