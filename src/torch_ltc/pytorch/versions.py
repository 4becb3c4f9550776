"""The versions of PyTorch that the package was tested with."""

from __future__ import annotations

import torch

from torch_ltc.errors import UnsupportedTorchError

__all__ = ["CURRENT", "NEWEST", "OLDEST", "Version", "check_torch_version", "version_of"]

# Major and minor number.
Version = tuple[int, ...]
OLDEST: Version = (2, 11)
NEWEST: Version = (2, 13)


def version_of(text: str) -> Version:
    """The major and minor number of a text as "2.13.0+cpu"."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


CURRENT = version_of(torch.__version__)


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise unless this PyTorch is one the device was tested with."""
    if not OLDEST <= version_of(version) <= NEWEST or not hasattr(torch._C, "_acc"):
        raise UnsupportedTorchError(
            f"torch_ltc needs PyTorch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, found {version}",
            hint=f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'",
        )
