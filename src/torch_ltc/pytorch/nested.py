"""Private interfaces of nested tensors with the jagged layout, and of autograd inside of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths
from torch.nested._internal.sdpa import _validate_sdpa_input

__all__ = ["check_attention", "from_values", "with_autograd"]

# Raises what `scaled_dot_product_attention` of nested tensors raises for its arguments.
check_attention: Callable[..., None] = _validate_sdpa_input
# What `_AutoDispatchBelowAutograd` hides.
_AUTOGRAD = [
    getattr(torch._C.DispatchKey, name) for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
]


def from_values(values: torch.Tensor, like: Any) -> torch.Tensor:
    """The nested tensor with these values and the sequences of another one."""
    made: torch.Tensor = nested_view_from_values_offsets_lengths(
        values, like.offsets(), like.lengths(), min_seqlen=like._maybe_min_seqlen, max_seqlen=like._maybe_max_seqlen
    )
    return made


@contextmanager
def with_autograd() -> Iterator[None]:
    """A context for kernels, which run below autograd: in it, autograd sees calls again."""
    hidden = [key for key in _AUTOGRAD if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in hidden:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key in hidden:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
