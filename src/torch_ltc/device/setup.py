"""Sets the device up, once: kernels, the sync after an optimizer step, and what PyTorch's Python side must know."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_ltc import closures, metrics
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import settings
from torch_ltc.device.accelerator import install_accelerator_functions
from torch_ltc.device.backward_errors import install_backward
from torch_ltc.device.default_dtype import install_default_dtype
from torch_ltc.device.generator import install_generator
from torch_ltc.device.kernels import apply_forced_fallback
from torch_ltc.device.library import register_kernels
from torch_ltc.device.nn_modules import install_cross_entropy_options, install_module_moves
from torch_ltc.device.serialize import install_storage_methods
from torch_ltc.device.tensor_methods import install_tensor_methods
from torch_ltc.events import SyncReason
from torch_ltc.execute.executor import executor
from torch_ltc.execute.sync import cut, program_synced
from torch_ltc.record.recorder import recorder


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if settings.sync_after_optimizer and not recorder.empty:
        cut(SyncReason.OPTIMIZER)
        executor.raise_deferred()
        closures.run_step_closures()


def _count(entry: CachedProgram) -> None:
    metrics.count_ops(entry.op_counts)
    if recorder.tree.forks:
        metrics.count("TrieForked", recorder.tree.forks)
        recorder.tree.forks = 0


def _forget_forks() -> None:
    recorder.tree.forks = 0


def set_up() -> None:
    """Register everything."""
    register_kernels()
    install_storage_methods()
    install_tensor_methods()
    install_accelerator_functions()
    install_generator()
    register_optimizer_step_post_hook(_after_step)
    program_synced.add(_count)
    metrics.on_reset(_forget_forks)
    apply_forced_fallback()
    install_module_moves()
    install_backward()
    install_cross_entropy_options()
    install_default_dtype()
