"""Keeps Inductor's hands off the random numbers of other threads.

While PyTorch compiles, it saves the state of the CPU's generator, which all threads share, and puts it back at the end.
The user's thread draws meanwhile, and would draw the same numbers again. Nothing of what happens here draws, so that on
a thread that compiles for us nothing is saved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import utils as dynamo_utils
from torch._functorch import aot_autograd

__all__ = ["random_state_left_alone"]

_NAME = "preserve_rng_state"
_original: Any = getattr(dynamo_utils, _NAME)
_threads: set[int] = set()


@contextmanager
def _preserve_rng_state() -> Iterator[None]:
    if threading.get_ident() in _threads:
        yield
    else:
        with _original():
            yield


# Where compiling looks the name up.
for _module in (dynamo_utils, aot_autograd):
    setattr(_module, _NAME, _preserve_rng_state)


@contextmanager
def random_state_left_alone() -> Iterator[None]:
    """Inside the block, compiling on this thread does not put back the state of the CPU's generator."""
    thread = threading.get_ident()
    _threads.add(thread)
    try:
        yield
    finally:
        _threads.discard(thread)
