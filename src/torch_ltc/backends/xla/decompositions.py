"""Decompositions before the table of rules: PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from torch_ltc.lowering.decomposition_tables import core_aten
from torch_ltc.pytorch.private import OpOverload, get_decompositions

aten = torch.ops.aten

# Operators that the core ATen set keeps and that are not worth a rule.
_DECOMPOSED = (
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "batch_norm_backward",
    "dist",
    "narrow_copy",
    "native_batch_norm",
    "native_group_norm",
    "native_layer_norm",
    "rrelu_with_noise_backward",
)
# Operators that the core ATen set decomposes although one rule does it better.
_KEPT = (
    "_safe_softmax",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_unsafe_index",
    "_unsafe_index_put",
    "embedding_dense_backward",
    "index_add",
    "index_copy",
    "index_fill",
    "roll",
    "take",
    "tril",
    "triu",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
)


@cache
def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """The core ATen decompositions, with a few more and a few less."""
    table = dict(core_aten())
    packets = [getattr(aten, name) for name in _DECOMPOSED if hasattr(aten, name)]
    extra: Any = get_decompositions(packets)
    table.update(extra)
    for name in _KEPT:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            table.pop(getattr(packet, overload), None)
    return table
