"""The default dtype: what it was when a program was recorded decides what its calls return.

PyTorch's own functions that change it run everything that is pending first, and known programs are forgotten: they were
recorded under the old one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.compile.program_cache import executables
from torch_ltc.compile.specialization_cache import specializations
from torch_ltc.events import SyncReason
from torch_ltc.execute.executor import executor
from torch_ltc.execute.sync import cut
from torch_ltc.record.recorder import recorder
from torch_ltc.shapes.inference import clear_inference_cache


def _forget_everything() -> None:
    """Run what is pending and forget what is known."""
    with recorder.lock:
        cut(SyncReason.DTYPE)
    executor.drain()
    with recorder.lock:
        recorder.tree.clear()
        recorder.reset()
        executables.clear()
        specializations.clear()
        clear_inference_cache()


def install_default_dtype() -> None:
    """Let the functions that change the default dtype tell the device."""
    module: Any = torch
    for name in ("set_default_dtype", "set_default_tensor_type"):
        setattr(module, name, _telling(getattr(module, name)))


def _telling(change: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(change)
    def changed(*args: Any, **kwargs: Any) -> None:
        if not recorder.empty or recorder.tree.size > 1:
            _forget_everything()
        change(*args, **kwargs)

    return changed
