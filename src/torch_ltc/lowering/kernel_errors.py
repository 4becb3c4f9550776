"""The error classes of failing kernels: each has the class that eager raises as a base."""

from __future__ import annotations

from torch.linalg import LinAlgError

from torch_ltc.errors import (
    ExecutionError,
    ExecutionIndexError,
    ExecutionNotImplementedError,
    ExecutionValueError,
)

__all__ = ["ExecutionLinAlgError", "execution_error_class"]


class ExecutionLinAlgError(ExecutionError, LinAlgError):  # type: ignore[misc]  # torch does not type it
    """An `ExecutionError` where eager raises a `torch.linalg.LinAlgError`: either class catches it.

    When: a matrix is singular, or not positive definite. What to do: as for `ExecutionError`.
    """


_EXECUTION_ERRORS: tuple[tuple[type[Exception], type[ExecutionError]], ...] = (
    (IndexError, ExecutionIndexError),
    (ValueError, ExecutionValueError),
    (NotImplementedError, ExecutionNotImplementedError),
    (LinAlgError, ExecutionLinAlgError),
)


def execution_error_class(cause: BaseException) -> type[ExecutionError]:
    """The class of the error for a call whose kernel raised `cause`."""
    return next((made for eager, made in _EXECUTION_ERRORS if isinstance(cause, eager)), ExecutionError)
