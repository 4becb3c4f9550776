"""PyTorch's profiler, made to look at the device's threads as well."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.pytorch.private import ProfilerConfig

__all__ = ["profile"]


def profile(**options: Any) -> torch.profiler.profile:
    """`torch.profiler.profile(**options)` that also sees what runs beside the thread that starts it: programs on the
    worker's thread, compiling on the compiler's."""
    # Without it, PyTorch warns that it forgets the events of earlier cycles.
    options.setdefault("acc_events", True)
    config: Any = options.pop("experimental_config", None)
    if config is None:
        config = ProfilerConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=config, **options)
