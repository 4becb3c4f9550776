"""Texts of the versions and of the physical device: parts of the key under which compiled programs are on disk."""

from __future__ import annotations

import os
import platform
from functools import cache

import torch

from torch_ltc.lowering.gil import yield_gil

__all__ = ["device_text", "versions_text"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


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
