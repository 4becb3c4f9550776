"""The versions that a bug report needs."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import torch

__all__ = ["versions"]

# Packages that have a part in what programs do, where they are installed.
_PACKAGES = ("numpy", "jax", "jaxlib", "triton", "transformers")


def versions() -> dict[str, str]:
    """Versions of the package, of PyTorch, of Python, of the system, and of packages that matter."""
    # Asked of the package, which may be used without being installed.
    own = str(getattr(sys.modules.get("torch_ltc"), "__version__", "unknown"))
    found = {"torch_ltc": own, "torch": str(torch.__version__), "python": sys.version.split()[0]}
    found["system"] = platform.platform()
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = str(torch.version.cuda)
    return found
