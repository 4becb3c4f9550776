"""Decompositions before the table of rules: PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from torch_ltc.lowering.decomposition_tables import core_aten
from torch_ltc.pytorch.private import DispatchKey, OpOverload, get_decompositions

aten = torch.ops.aten

# Operators that the core ATen set keeps and that are not worth a rule.
_DECOMPOSED = (
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "batch_norm_backward",
    "dist",
    "elu",
    "gelu",
    "hardtanh",
    "ldexp",
    "leaky_relu",
    "narrow_copy",
    "native_batch_norm",
    "native_group_norm",
    "native_layer_norm",
    "rrelu_with_noise_backward",
)
# Operators that the core ATen set decomposes although one rule does it better.
_KEPT = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_unsafe_index",
    "_unsafe_index_put",
    "embedding_dense_backward",
    "roll",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
)


def _pinv(*args: Any, **kwargs: Any) -> Any:
    """The pseudo-inverse by PyTorch's own composition of a singular value or eigenvalue decomposition."""
    return aten.linalg_pinv.atol_rtol_tensor._op_dk(DispatchKey.CompositeExplicitAutogradNonFunctional, *args, **kwargs)


def _addbmm(self: Any, batch1: Any, batch2: Any, **factors: Any) -> Any:
    """The sum of a batch of matrix products is one product of longer matrices."""
    batch, rows, inner = batch1.shape
    wide = batch1.transpose(0, 1).reshape(rows, batch * inner)
    return aten.addmm.default(self, wide, batch2.reshape(batch * inner, batch2.shape[2]), **factors)


@cache
def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """The core ATen decompositions, with a few more and a few less."""
    table = dict(core_aten())
    packets = [getattr(aten, name) for name in _DECOMPOSED if hasattr(aten, name)]
    extra: Any = get_decompositions(packets)
    table.update(extra)
    table[aten.addbmm.default] = _addbmm
    table[aten.linalg_pinv.atol_rtol_tensor] = _pinv
    for name in _KEPT:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            table.pop(getattr(packet, overload), None)
    return table
