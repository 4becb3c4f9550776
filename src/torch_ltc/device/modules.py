"""`nn.Module.to("ltc")` keeps parameters the objects they are, as moving to a GPU does.

PyTorch makes new parameters when a module moves to a device of this kind: tied weights come untied, and an optimizer
that was made before keeps the old ones. It can swap the contents of a parameter instead; that is asked for here, for
moves to and from the device only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _involves_device(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    if any(parameter.device.type == "ltc" for parameter in module.parameters()):
        return True
    return convert(torch.empty(0)).device.type == "ltc"


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
