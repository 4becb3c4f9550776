"""torch_ltc: PyTorch's Lazy Tensor Core in Python.

`import torch_ltc` registers the device "ltc". Operations on its tensors are recorded; a sync turns what was recorded
into one program, which is looked up, compiled by a backend and run.
"""

import atexit
import importlib
import sys
from importlib import metadata as _metadata

from torch_ltc.cli.startup import is_command as _is_command
from torch_ltc.cli.startup import messages_of_import as _messages_of_import

with _messages_of_import():
    import torch_ltc.config as _config  # noqa: F401  refuses variables that cannot be
    import torch_ltc.pytorch as _pytorch  # noqa: F401  refuses a PyTorch that it does not know
    from torch_ltc.native import library as _library

    if not _is_command("build"):
        _library.check_required()

# isort: split
from torch_ltc import closures, computation, config, debug, errors, events, ir_cache, metrics
from torch_ltc.api import (
    _prepare_to_exit,
    get_tensor_id,
    mark_step,
    register_backend,
    save,
    sync,
    sync_multi,
    to_cpu,
    use_backend,
    wait_device_ops,
    wait_for_compiles,
)
from torch_ltc.backends.interpreter import InterpreterBackend as _InterpreterBackend
from torch_ltc.backends.null import NullBackend as _NullBackend
from torch_ltc.backends.torchscript import TorchScriptBackend as _TorchScriptBackend
from torch_ltc.closures import add_step_closure, run_step_closures
from torch_ltc.debug.entry_points import doctor, report
from torch_ltc.debug.explain import explain
from torch_ltc.device import device_module as _module
from torch_ltc.device import registration as _registration
from torch_ltc.device.prefetch import Prefetch, prefetch
from torch_ltc.device.setup import install, uninstall
from torch_ltc.device.setup import set_up as _set_up
from torch_ltc.distributed import collectives as _collectives  # noqa: F401  registers the backend
from torch_ltc.distributed import rank_check as _rank_check  # noqa: F401  adds its hook
from torch_ltc.execute.async_item import AsyncItem, async_item
from torch_ltc.execute.no_sync import allow_sync, no_sync
from torch_ltc.extract_compiled_graph import extract_compiled_graph
from torch_ltc.libraries import attention as _attention  # noqa: F401  changes attention of nested tensors
from torch_ltc.libraries import dynamo as _dynamo  # noqa: F401  changes torch.compile
from torch_ltc.libraries import flex_attention as _flex_attention  # noqa: F401  changes flex_attention
from torch_ltc.libraries import huggingface as _huggingface
from torch_ltc.libraries import lightning as _lightning
from torch_ltc.libraries import safetensors as _safetensors
from torch_ltc.libraries.choice import use_in_libraries
from torch_ltc.libraries.export import export_program
from torch_ltc.libraries.notebook import load_ipython_extension, unload_ipython_extension
from torch_ltc.lowering.interface import Backend, Form
from torch_ltc.lowering.registry import registry as _registry
from torch_ltc.replay.function import JitFunction, jit

try:
    __version__ = _metadata.version("torch-ltc")
except _metadata.PackageNotFoundError:  # a source tree on the path
    __version__ = "unknown"

__all__ = [
    "__version__",
    "AsyncItem",
    "Backend",
    "Form",
    "JitFunction",
    "Prefetch",
    "add_step_closure",
    "allow_sync",
    "async_item",
    "closures",
    "computation",
    "config",
    "debug",
    "doctor",
    "errors",
    "events",
    "explain",
    "export_program",
    "extract_compiled_graph",
    "get_tensor_id",
    "install",
    "ir_cache",
    "jit",
    "load_ipython_extension",
    "mark_step",
    "metrics",
    "no_sync",
    "prefetch",
    "register_backend",
    "report",
    "run_step_closures",
    "save",
    "sync",
    "sync_multi",
    "to_cpu",
    "uninstall",
    "unload_ipython_extension",
    "use_backend",
    "use_in_libraries",
    "wait_device_ops",
    "wait_for_compiles",
]


def __getattr__(name: str) -> object:
    # Few programs need it, and it takes a while to load.
    if name == "testing":
        return importlib.import_module("torch_ltc.testing")
    raise AttributeError(f"module 'torch_ltc' has no attribute {name!r}")


_registry.register(_InterpreterBackend(), reference=True, origin="built-in")
_registry.register(_TorchScriptBackend(), origin="built-in", measured="equal")
_registry.register(_NullBackend(), origin="built-in")
_registry.promise("inductor", "torch_ltc.backends.inductor:InductorBackend", measured="close")
_registry.promise("xla", "torch_ltc.backends.xla:XlaBackend")
config.settings.watch("backend", lambda: _registry.check(config.settings.backend))
config.settings.watch("numerics", lambda: _registry.check(config.settings.backend, config.settings.numerics))
with _messages_of_import():
    _registry.check(config.settings.backend, config.settings.numerics)
_registration.register_name(_module)
sys.modules["torch.ltc"] = _module
_registration.register_device()
atexit.register(_prepare_to_exit)
_set_up()
_huggingface.adapt()
_lightning.adapt()
_safetensors.adapt()
