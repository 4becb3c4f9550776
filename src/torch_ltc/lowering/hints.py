"""What symbolic sizes are in the program that is being compiled, found without asking PyTorch, which would guard it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_ltc.program.spec import Spec, make_spec


def hint_of(value: Any) -> Any:
    """What a number is, symbolic or not."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def hints_of(values: Iterable[Any]) -> tuple[int, ...]:
    """The same for several integers."""
    return tuple([hint_of(value) for value in values])


def hinted_spec(tensor: torch.Tensor) -> Spec:
    """The geometry of a tensor with hints in place of symbols."""
    return make_spec(
        tensor.dtype,
        hints_of(tensor.size()),
        hints_of(tensor.stride()),
        hint_of(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )
