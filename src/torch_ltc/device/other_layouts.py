"""Sparse, nested and quantized tensors.

Sparse and nested tensors are on the device (`device/sparse.py`, `device/nested.py`), and calls on them run on the
physical device. Quantized ones live on the physical device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_ltc.device import nested
from torch_ltc.device.fallback import run_eagerly
from torch_ltc.device.kernels import Kernel, make_kernel
from torch_ltc.pytorch.private import OpOverload, operators_with_kernel
from torch_ltc.record.operator import Operator

aten = torch.ops.aten


def run_on_physical_device(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Backend fallback of the other layouts: run the call eagerly."""
    operator = Operator(op)
    return run_eagerly(operator, operator.values(args, kwargs), "it takes tensors that are not plain strided ones")


KERNELS: dict[str, Any] = {**nested.PLAIN_KERNELS}


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
    """Kernels for all operators that PyTorch has for such a layout of the CPU: composed of others, as for devices
    without kernels, most would end in one that takes plain tensors only."""
    names = operators_with_kernel(f"{layout}CPU")
    return {name: _on_physical_device(name) for name in names if name.startswith("aten::") and name not in own}


def _on_physical_device(name: str) -> Kernel:
    plain, _, overload = name.removeprefix("aten::").partition(".")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run_on_physical_device(getattr(getattr(aten, plain), overload or "default"), *args, **kwargs)

    return kernel


__all__ = ["KERNELS", "eager_kernels", "run_on_physical_device"]
