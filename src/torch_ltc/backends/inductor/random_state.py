"""Keeps compiling from resetting the random state of other threads.

While PyTorch compiles, it saves the state of the CPU's generator, which all threads share, and puts it back at the end.
The user's thread draws meanwhile, and would draw the same numbers again. Nothing of what happens here draws, so that on
a thread that compiles for us nothing is saved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The table needs the entries of this backend first.
from torch_ltc.backends.inductor import private  # noqa: F401
from torch_ltc.pytorch.patches import replaces

__all__ = ["random_state_left_alone"]

_threads: set[int] = set()


# Both places where compiling looks the name up.
@replaces("torch._functorch.aot_autograd.preserve_rng_state")
@replaces("torch._dynamo.utils.preserve_rng_state")
def _unless_left_alone(original: Any) -> Any:
    @contextmanager
    def preserve_rng_state() -> Iterator[None]:
        if threading.get_ident() in _threads:
            yield
        else:
            with original():
                yield

    return preserve_rng_state


@contextmanager
def random_state_left_alone() -> Iterator[None]:
    """Inside the block, compiling on this thread does not put back the state of the CPU's generator."""
    thread = threading.get_ident()
    _threads.add(thread)
    try:
        yield
    finally:
        _threads.discard(thread)
