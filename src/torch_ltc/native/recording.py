"""The hit path of the recorder in C++: `native` is the extension when recording uses it, else None."""

from __future__ import annotations

from typing import Any

from torch_ltc.config import settings
from torch_ltc.native.library import extension

__all__ = ["native"]

# Not by 'auto' yet: decision 0032 says what is left to do.
native: Any = extension if settings.native == "1" else None
