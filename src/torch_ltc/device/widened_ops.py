"""Operators whose CPU kernels lack dtypes that those of accelerators have.

Libraries choose calls by the type of the device: they take `ltc` for an accelerator and call these with dtypes that
they avoid on the CPU. Where programs run on the CPU, such a call is computed in a wider dtype, and its results are cast
to the dtype that an accelerator gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.device.kernels import Kernel, make_kernel
from torch_ltc.pytorch.private import OpOverload

aten = torch.ops.aten
_HALVES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# Products of a value and the number of bins are exact in float64, so that no value is put into another bin.
_INTEGERS = dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.float64)


def _widened(op: OpOverload, wider: Mapping[torch.dtype, torch.dtype]) -> Kernel:
    plain = make_kernel(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        wide = wider.get(dtype)
        if wide is None or settings.device_type != "cpu":
            return plain(*args, **kwargs)
        given = [a.to(wide) if isinstance(a, torch.Tensor) and a.dtype is dtype else a for a in args]
        result = plain(*given, **kwargs)
        if isinstance(result, torch.Tensor):
            return result.to(dtype)
        return tuple(part.to(dtype) if part.dtype is wide else part for part in result)

    return kernel


def _kernels(wider: Mapping[torch.dtype, torch.dtype], *ops: OpOverload) -> Iterable[tuple[str, Kernel]]:
    return [(op.name(), _widened(op, wider)) for op in ops]


KERNELS: dict[str, Kernel] = {
    **dict(_kernels(_INTEGERS, aten.histc.default)),
    **dict(
        _kernels(
            _HALVES,
            aten._upsample_bilinear2d_aa.default,
            aten._upsample_bilinear2d_aa_backward.default,
            aten._upsample_bicubic2d_aa.default,
            aten._upsample_bicubic2d_aa_backward.default,
            aten.avg_pool3d.default,
            aten.avg_pool3d_backward.default,
            aten.multi_margin_loss.default,
            aten.multi_margin_loss_backward.default,
            aten.multilabel_margin_loss_forward.default,
            aten.multilabel_margin_loss_backward.default,
        )
    ),
}

__all__ = ["KERNELS"]
