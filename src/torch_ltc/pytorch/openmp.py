"""The threads of OpenMP, on which PyTorch's CPU kernels run.

Each thread that calls a kernel has a pool of its own. With libgomp, which PyTorch's packages for Linux have, the pools
together must not have more threads than there are processors: else all of them sleep between kernels instead of
spinning, and small kernels take two to three times as long, in the whole process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["release_pool"]

_SOFT = 1


def release_pool() -> None:
    """End the OpenMP threads that belong to the calling thread, if it has any: its next kernel makes them again. Does
    nothing with another OpenMP than libgomp."""
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], object]:
    """`omp_pause_resource_all` of the libgomp that is loaded. Holds the GIL: without a pool it returns at once."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = sorted({line.split()[-1] for line in lines if "libgomp" in line})
    if len(loaded) != 1:
        return lambda kind: None
    pause: Callable[[int], object] | None = getattr(ctypes.PyDLL(loaded[0]), "omp_pause_resource_all", None)
    return pause or (lambda kind: None)
