"""The path of the `nn.Module` that is being called, read off the stack.

No hook is installed in modules: a hook would cost every call of every module on every device.
"""

from __future__ import annotations

import weakref
from types import FrameType

import torch

from torch_ltc.pytorch.private import MODULE_CALL

__all__ = ["MODULE_CALL", "module_path"]

_MOST_MODULES = 65_536
# Paths by the identity of the module, which is only good while the module lives.
_paths: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}


def module_path(frame: FrameType) -> str:
    """The path of the module that this frame, one of `MODULE_CALL`, calls: as "Net.layers.0", from the outermost module
    that is being called."""
    module = frame.f_locals["self"]
    known = _paths.get(id(module))
    if known is not None and known[0]() is module:
        return known[1]
    return _found(module, _outermost(frame))


def _outermost(frame: FrameType) -> torch.nn.Module:
    outer: torch.nn.Module = frame.f_locals["self"]
    above = frame.f_back
    while above is not None:
        if above.f_code is MODULE_CALL:
            outer = above.f_locals["self"]
        above = above.f_back
    return outer


def _found(module: torch.nn.Module, root: torch.nn.Module) -> str:
    if len(_paths) >= _MOST_MODULES:
        _paths.clear()
    name = type(root).__name__
    try:
        named = list(root.named_modules())
    except Exception:
        # The user may have written it, or have modules that are not whole yet; a call must be recorded all the same.
        named = []
    for path, each in named:
        known = _paths.get(id(each))
        if known is None or known[0]() is not each:
            _paths[id(each)] = (weakref.ref(each), f"{name}.{path}" if path else name)
    known = _paths.get(id(module))
    if known is None or known[0]() is not module:
        # Called by a module that does not own it.
        _paths[id(module)] = known = (weakref.ref(module), type(module).__name__)
    return known[1]
