"""Errors that leave a hook during backward.

Autograd's engine holds a guard on the device while it calls a tensor's hooks. When a hook raises, the guard ends with
the Python error still set, and asks the device's guard, which is Python, for its type: a Python call with an error set
ends the process. So the call takes the error away first, and it is raised again where the engine returns.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_taken: list[BaseException] = []
# Of all functions of Python's C interface the cheapest: ctypes raises whatever error is set when one returns.
_raise_pending: Any = ctypes.pythonapi.PyErr_Occurred
_raise_pending.restype = ctypes.c_void_p
_raise_pending.argtypes = ()


def take_pending_error() -> None:
    """Keep the error that is set, if there is one, for the end of the backward pass."""
    try:
        _raise_pending()
    except BaseException as error:
        _taken.append(error)


def install_backward() -> None:
    """Let backward raise the errors that were taken."""
    graph: Any = torch.autograd.graph
    run: Any = graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except SystemError:
            # The engine returned without a result and without an error.
            if not _taken:
                raise
            error = _taken.pop()
            _taken.clear()
        raise error

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
