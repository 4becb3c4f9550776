"""Global switches of PyTorch that change what a kernel computes: their values, and the functions that set them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["GETTERS", "SETTERS", "TorchState", "changes_by"]

# Not in every version.
_OF_SOME_VERSIONS = ("cudnn_depthwise_kernel", "cublaslt_prefer_grouped_gemm", "native_aot_enabled")
# Of each of these `torch._C` has a function that reads it (`_get_`) and one that sets it (`_set_`).
_FLAGS = (
    "deterministic_fill_uninitialized_memory",
    "mkldnn_enabled",
    "mkldnn_deterministic",
    "nnpack_enabled",
    "qengine",
    "cpu_allow_fp16_reduced_precision_reduction",
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    *(name for name in _OF_SOME_VERSIONS if hasattr(torch._C, f"_get_{name}")),
)
# Switches of kernels that compiled programs call, too, and that leave no trace in the programs.
_OF_LIBRARIES = (
    "linalg_preferred_backend",
    "blas_preferred_backend",
    "rocm_fa_preferred_backend",
    "sm_carveout_experimental",
    "native_aot_unconditional_masked",
)
_PRECISIONS = tuple((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))

GETTERS = (*(f"torch._C._get_{name}" for name in _FLAGS), "torch._C._get_fp32_precision_getter")
# Functions that the rest of PyTorch calls by these names to set one of them.
SETTERS = (
    *(f"torch._C._set_{name}" for name in (*_FLAGS, *_OF_LIBRARIES)),
    "torch._C._set_deterministic_algorithms",
    "torch._C._set_float32_matmul_precision",
    "torch._C._set_fp32_precision_setter",
    "torch._C._set_cublas_allow_tf32",
    "torch._C._set_cudnn_allow_tf32",
    "torch._C._set_onednn_allow_tf32",
)


def _changes_determinism(mode: bool, *, warn_only: bool = False) -> bool:
    return (mode, warn_only) != (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _changes_precision(backend: str, op: str, precision: str) -> bool:
    return torch._C._get_fp32_precision_getter(backend, op) != precision


def _changes_dtype(d: torch.dtype) -> bool:
    return torch.get_default_dtype() is not d


_CHANGES: dict[str, Callable[..., bool]] = {
    "torch._C._set_deterministic_algorithms": _changes_determinism,
    "torch._C._set_fp32_precision_setter": _changes_precision,
    "torch.set_default_dtype": _changes_dtype,
}


def changes_by(setter: str) -> Callable[..., bool]:
    """A function that says, of the arguments of the function with this path, whether that would change anything; where
    nothing is known, that it would."""
    known = _CHANGES.get(setter)
    getter: Callable[[], Any] | None = None
    if setter.rpartition("._set_")[2] in (*_FLAGS, *_OF_LIBRARIES):
        getter = getattr(torch._C, setter.rpartition(".")[2].replace("_set_", "_get_", 1), None)
    if known is None and getter is not None:

        def known(*values: Any) -> bool:
            return getter() not in (values, values[0])

    return known or _always


def _always(*values: Any, **named: Any) -> bool:
    return True


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # Set by kind of operation and library: PyTorch has no one word for it then.
        return None


@dataclass(frozen=True, slots=True)
class TorchState:
    """The global switches at one moment."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warns: bool
    matmul_precision: str | None
    precisions: tuple[str, ...]
    flags: tuple[object, ...]

    @classmethod
    def current(cls) -> TorchState:
        """As they are now."""
        precision = torch._C._get_fp32_precision_getter
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_precision=_matmul_precision(),
            precisions=(precision("generic", "all"), *(precision(*place) for place in _PRECISIONS)),
            flags=tuple(getattr(torch._C, f"_get_{name}")() for name in _FLAGS),
        )

    @property
    def fills_memory(self) -> bool:
        """True when new memory is filled with one value."""
        return self.deterministic and bool(self.flags[_FLAGS.index("deterministic_fill_uninitialized_memory")])

    def enter(self) -> None:
        """Set them all, for good."""
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        if self.matmul_precision is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
        for place, value in zip((("generic", "all"), *_PRECISIONS), self.precisions, strict=True):
            if torch._C._get_fp32_precision_getter(*place) != value:
                torch._C._set_fp32_precision_setter(*place, value)
        for name, flag in zip(_FLAGS, self.flags, strict=True):
            set_flag = getattr(torch._C, f"_set_{name}")
            if isinstance(flag, tuple):
                set_flag(*flag)
            else:
                set_flag(flag)
