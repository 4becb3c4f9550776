"""`torch.accelerator` for the device: its C++ side expects a caching allocator, which a lazy device does not have."""

from __future__ import annotations

import torch

from torch_ltc.device import device_module

_FUNCTIONS = (
    "get_device_capability",
    "empty_cache",
    "empty_host_cache",
    "get_memory_info",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "synchronize",
    "set_stream",
)
# Of `torch.accelerator.random`, which PyTorch has from 2.14 on.
_RANDOM_FUNCTIONS = ("get_rng_state", "get_rng_state_all", "initial_seed")


def install_accelerator_functions() -> None:
    """Make `torch.accelerator` ask the device's own module. The device is the accelerator of its process."""
    for name in _FUNCTIONS:
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, getattr(device_module, name))
    random = getattr(torch.accelerator, "random", None)
    for name in _RANDOM_FUNCTIONS:
        if hasattr(random, name):
            setattr(random, name, getattr(device_module, name))
