"""Sets the device up: kernels, the sync after an optimizer step, and every change in PyTorch, which can be undone."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch_ltc import metrics
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import settings

# Modules that only replace something: importing them is enough.
from torch_ltc.device import (  # noqa: F401
    autocast,
    dlpack,
    grad_scaler,
    process_transfer,
    script_archives,
    serialize,
    step_end,
    switches,
    tensor_methods,
    torch_functions,
)
from torch_ltc.device.kernels import apply_forced_fallback
from torch_ltc.device.library import register_kernels
from torch_ltc.errors import LtcWarning
from torch_ltc.execute.eager_region import eager_regions
from torch_ltc.execute.sync import program_synced
from torch_ltc.native.library import extension
from torch_ltc.pytorch.patches import changes
from torch_ltc.record.recorder import recorder


def _count(entry: CachedProgram) -> None:
    metrics.count_ops(entry.op_counts)
    hits = recorder.take_hits()
    if hits:
        metrics.count("NativeHits", hits)
    if recorder.tree.forks:
        metrics.count("TrieForked", recorder.tree.forks)
        recorder.tree.forks = 0


def _forget_counts() -> None:
    recorder.tree.forks = 0
    recorder.take_hits()


def set_up() -> None:
    """Register the kernels and change PyTorch, at import."""
    with _objects_that_stay():
        register_kernels()
        program_synced.add(_count)
        metrics.on_reset(_forget_counts)
        apply_forced_fallback()
        install()
    if settings.eager_regions == "always":
        eager_regions.apply_setting()


@contextmanager
def _objects_that_stay() -> Iterator[None]:
    """Have the garbage collector look at what importing has made once, at the end.

    Imports leave so many new objects that the next collection of the oldest generation is a full one, of 0.1 s. It
    would fall into the user's first step, which makes thousands of nodes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.collect()


def install() -> None:
    """Change what the device needs changed in PyTorch, again after `uninstall()`; `import torch_ltc` does it.

    The page on compatibility lists the changes. A change that is in force already stays as it is.
    """
    changes.install(native=extension is not None)


def uninstall() -> None:
    """Undo what `import torch_ltc` changed in PyTorch, for tests: replaced attributes, hooks, kernels of other devices.

    The device keeps its name and its kernels, because PyTorch has no way back; tensors on it are not to be used until
    `install()`. Warns when another package has wrapped a replacement since: that one stays, and passes calls on.
    """
    left = changes.uninstall()
    if left:
        warnings.warn(
            f"{', '.join(left)} was wrapped by another package: our part of it stays, and passes calls on",
            LtcWarning,
            stacklevel=2,
        )
