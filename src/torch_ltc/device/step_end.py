"""The end of an optimizer's step, where a program ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_ltc import closures
from torch_ltc.config import settings
from torch_ltc.events import SyncReason
from torch_ltc.execute.executor import executor
from torch_ltc.execute.sync import cut
from torch_ltc.pytorch.patches import registers
from torch_ltc.pytorch.table import OPTIMIZER_HOOK
from torch_ltc.record.recorder import recorder


def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Run the program that ends with the step."""
    if settings.sync_after_optimizer and not recorder.empty:
        cut(SyncReason.OPTIMIZER)
        executor.raise_deferred()
        closures.run_step_closures()


@registers(OPTIMIZER_HOOK)
def _hook_optimizers() -> Callable[[], None]:
    return register_optimizer_step_post_hook(after_step).remove
