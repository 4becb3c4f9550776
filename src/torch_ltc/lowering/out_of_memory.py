"""Running out of memory: how an error says so, and who can give some back."""

from __future__ import annotations

import torch

from torch_ltc.hooks import Hook

__all__ = ["is_out_of_memory", "make_room", "memory_needed"]

# How an allocator says that there is no room; only CUDA's has an exception of its own.
_NO_ROOM = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "out of memory")

memory_needed = Hook[[], bool]("memory needed", "when the device has no memory left; true when some was given back")


def is_out_of_memory(error: BaseException | None) -> bool:
    """True when this error, or one that caused it, is an out-of-memory error."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_ROOM):
            return True
        error = error.__cause__
    return False


def make_room(error: BaseException) -> bool:
    """After this error: true when it is worth trying again, because memory was given back."""
    if not is_out_of_memory(error):
        return False
    # All of them: there is one more attempt.
    given = [give_back() for give_back in memory_needed]
    return any(given)
