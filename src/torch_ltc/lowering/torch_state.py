"""Global PyTorch state that compiled code depends on: to be the same in a process that compiles for this one.

The texts of the versions are part of the key under which compiled programs are kept on disk.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache

import torch

from torch_ltc.lowering.gil import yield_gil
from torch_ltc.pytorch.private import (
    cudnn_benchmark,
    cudnn_deterministic,
    cudnn_enabled,
    mkldnn_enabled,
    set_cudnn_benchmark,
    set_cudnn_deterministic,
    set_cudnn_enabled,
    set_mkldnn_enabled,
)

__all__ = ["TorchState", "device_text", "versions_text"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True, slots=True)
class TorchState:
    """Modes of PyTorch, as they are for the calling thread."""

    threads: int
    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warns: bool
    matmul_precision: str
    mkldnn: bool
    cudnn: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool

    @classmethod
    def current(cls) -> TorchState:
        """As they are now."""
        return cls(
            threads=torch.get_num_threads(),
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
            mkldnn=bool(mkldnn_enabled()),
            cudnn=bool(cudnn_enabled()),
            cudnn_benchmark=bool(cudnn_benchmark()),
            cudnn_deterministic=bool(cudnn_deterministic()),
        )

    def enter(self) -> None:
        """Make this process like the other, for good."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        torch.set_float32_matmul_precision(self.matmul_precision)
        set_mkldnn_enabled(self.mkldnn)
        set_cudnn_enabled(self.cudnn)
        set_cudnn_benchmark(self.cudnn_benchmark)
        set_cudnn_deterministic(self.cudnn_deterministic)


@cache
def versions_text() -> str:
    """PyTorch, Python, and the files of this package as they are: whoever works on it must not meet old programs."""
    parts = [f"torch {torch.__version__} {torch.version.git_version}", f"python {platform.python_version()}"]
    parts.append(f"{platform.system()} {platform.machine()}")
    for folder, _, names in sorted(os.walk(_PACKAGE)):
        yield_gil()
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                status = os.stat(path)
                parts.append(f"{os.path.relpath(path, _PACKAGE)} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(parts)


@cache
def device_text(device: torch.device) -> str:
    """The device that a program was compiled for."""
    if device.type != "cuda":
        return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    properties = torch.cuda.get_device_properties(device)
    return f"cuda {properties.name} {properties.major}.{properties.minor} {torch.version.cuda}"
