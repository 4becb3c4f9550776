"""Block masks of `flex_attention` in scripts that know the CPU alone: they go where the queries are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as attention

from torch_ltc.pytorch.patches import Patches
from torch_ltc.record.ordinal import ordinal

__all__ = ["follow_block_masks"]


def follow_block_masks(patches: Patches) -> None:
    """Have `flex_attention` take a block mask on the CPU for queries on the device."""

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        def flex_attention(
            query: torch.Tensor, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, *args: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            if block_mask is not None and not query.is_cpu and block_mask.kv_num_blocks.is_cpu:
                # By this object of the device, as a library moves things: what a script moves stays.
                block_mask = block_mask.to(ordinal.device)
            return original(query, key, value, score_mod, block_mask, *args, **kwargs)

        return flex_attention

    patches.wrap(attention, "flex_attention", following)
