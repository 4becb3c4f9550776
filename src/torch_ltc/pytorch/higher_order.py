"""Private interfaces of higher-order operators: those that take functions, as `torch.cond` and `flex_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS, _higher_order_ops

__all__ = ["implement", "pass_over"]

_passed_over: list[Any] = _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
_operators: dict[str, Any] = _higher_order_ops


def implement(operator: Any, **kernels: Callable[..., Any]) -> Callable[[], None]:
    """Give an operator kernels, by dispatch key; returns what takes them out again."""
    keys = {getattr(torch._C.DispatchKey, name): kernel for name, kernel in kernels.items()}
    for key, kernel in keys.items():
        operator.py_impl(key)(kernel)

    def take_out() -> None:
        for key in keys:
            del operator.py_kernels[key]
        operator._dispatch_cache.clear()

    return take_out


def pass_over(name: str) -> Callable[[], None]:
    """Have all operators go on below this dispatch key, those that are defined later too; returns what undoes it."""
    key = getattr(torch._C.DispatchKey, name)
    changed = [operator for operator in _operators.values() if key not in operator.py_kernels]
    _passed_over.append(key)
    for operator in changed:
        operator.fallthrough(key)

    def stop() -> None:
        _passed_over.remove(key)
        for operator in changed:
            operator.non_fallthrough_keys = operator.non_fallthrough_keys.add(key)

    return stop
