"""Python code of PyTorch's modules that must know the device: moving them, and one that asks what the device can do.

`nn.Module.to("ltc")` keeps parameters the objects they are, as moving to a GPU does.

PyTorch makes new parameters when a module moves to a device of this kind: tied weights come untied, and an optimizer
that was made before keeps the old ones. It can swap the contents of a parameter instead; that is asked for here, for
moves to and from the device only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.record.buffer import physical_device


def _involves_device(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    if any(parameter.device.type == "ltc" for parameter in module.parameters()):
        return True
    return convert(torch.empty(0, device="cpu")).device.type == "ltc"


def install_cross_entropy_options() -> None:
    """Let `linear_cross_entropy` choose its partial sums and their dtype for the physical device. In PyTorch 2.13."""
    name = "torch.nn.modules.linear_cross_entropy_options"
    if importlib.util.find_spec(name) is None:
        return
    options = importlib.import_module(name).LinearCrossEntropyOptions
    original = options._adjust

    @functools.wraps(original)
    def adjust(self: Any, *sizes_and_dtype: Any, device: torch.device | None = None, **given: Any) -> Any:
        lazy = device is not None and device.type == "ltc"
        return original(self, *sizes_and_dtype, device=physical_device() if lazy else device, **given)

    options._adjust = adjust


def install_module_moves() -> None:
    """Replace `nn.Module._apply`. Once per process."""
    original: Any = torch.nn.Module._apply
    future = torch.__future__

    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if future.get_swap_module_params_on_conversion() or not _involves_device(self, fn):
            return original(self, fn, recurse)
        future.set_swap_module_params_on_conversion(True)
        try:
            return original(self, fn, recurse)
        finally:
            future.set_swap_module_params_on_conversion(False)

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
