"""The versions of PyTorch that the package was tested with."""

from __future__ import annotations

import warnings

import torch

from torch_ltc.errors import UnsupportedTorchError, UntestedTorchWarning

__all__ = ["CURRENT", "NEWEST", "OLDEST", "Version", "check_torch_version", "version_of"]

# Major and minor number.
Version = tuple[int, ...]
OLDEST: Version = (2, 11)
NEWEST: Version = (2, 15)


def version_of(text: str) -> Version:
    """The major and minor number of a text as "2.13.0+cpu"."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


CURRENT = version_of(torch.__version__)


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise when this PyTorch is too old, or lacks what the device is built on; warn when it is newer than the tested
    ones."""
    tested = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    if version_of(version) < OLDEST or not hasattr(torch._C, "_acc"):
        raise UnsupportedTorchError(
            f"torch_ltc needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, found {version}",
            hint=f"pip install '{tested}'",
        )
    if version_of(version) > NEWEST:
        warnings.warn(
            f"torch_ltc was tested with PyTorch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, found {version}"
            f"\n  try: pip install '{tested}' if something fails",
            UntestedTorchWarning,
            stacklevel=2,
        )
