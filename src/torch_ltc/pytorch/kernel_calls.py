"""Calls of PyTorch's kernels from Python, with their warnings.

Before torch 2.15 the warning of an operator that Python calls goes to whoever called Python: to the operator of the
user's that is being recorded, or, on a thread of the package, to the standard error output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_ltc.pytorch.private import forward_call, function_state, set_function_state

_NOTHING: Mapping[str, Any] = {}


def call_kernel(operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = _NOTHING) -> Any:
    """The result of the call; what it warns of is raised by Python's `warnings` before it returns."""
    result, error = forward_call(_attempt, (), (function_state(), operator, args, kwargs))
    if error is None:
        return result
    try:
        raise error
    finally:
        # The error refers to this frame, and must not be kept alive by it.
        del error


def _attempt(
    state: Any, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    # A kernel in Python may call functions on tensors of a class of its own.
    set_function_state(state)
    # Warnings are raised when this has returned: an exception under way would become an error of the interpreter.
    try:
        return operator(*args, **kwargs), None
    except Exception as error:
        return None, error
