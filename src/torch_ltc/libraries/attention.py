"""`flex_attention` on the device: PyTorch's eager form of it is recorded, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torch_ltc.pytorch.patches import replaces

__all__: list[str] = []


@replaces("torch.nn.attention.flex_attention._validate_device")
def _validate_device(original: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[Tensor, Tensor, Tensor], None]:
    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        # The list of devices is of those that Inductor has kernels for.
        if query.device.type != "ltc":
            original(query, key, value)

    return validate
