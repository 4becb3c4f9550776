"""torch_ltc: PyTorch's Lazy Tensor Core in Python.

`import torch_ltc` registers the device "ltc". Operations on its tensors are recorded; a sync turns what was recorded into one
program, which is looked up, compiled by a backend and run.
"""

from __future__ import annotations

import sys

import torch

from torch_ltc import closures, config, errors, events, metrics
from torch_ltc.backends.interpreter import InterpreterBackend
from torch_ltc.backends.torchscript import TorchScriptBackend
from torch_ltc.device import module as _module
from torch_ltc.device import registration as _registration
from torch_ltc.device.setup import set_up as _set_up
from torch_ltc.lowering.registry import registry as _registry
from torch_ltc.runtime.sync import sync

_registry.register(InterpreterBackend(), reference=True)
_registry.register(TorchScriptBackend())
_registration.register_name(_module)
sys.modules["torch.ltc"] = _module
_registration.register_device()
_set_up()

__version__ = "0.1.0"
__all__ = ["__version__", "closures", "config", "errors", "events", "metrics", "sync", "torch"]
