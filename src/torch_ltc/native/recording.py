"""The hit path of the recorder in C++: `native` is the extension when recording uses it, else None."""

from __future__ import annotations

from typing import Any

from torch_ltc.native.library import extension

__all__ = ["native"]

native: Any = extension
