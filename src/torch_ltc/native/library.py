"""Finds and loads the extension, once, at import: beside the package as `pip install` built it, or as `ltc build` did.

`extension` is the module, or None when the package does without. The setting `native` decides, and `state()` says what
was decided and why.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

from torch_ltc.config import native_folder, settings
from torch_ltc.errors import LtcError
from torch_ltc.native.compiler import library_name
from torch_ltc.private_files import is_private_folder, is_trusted

__all__ = ["INSTALLED", "NAME", "check_required", "extension", "find", "state"]

log = logging.getLogger("torch_ltc")
NAME = "torch_ltc._native"
# Where `pip install` puts the library. Whoever can write here can change the package itself: no need to look who did.
INSTALLED = Path(__file__).parent / "built"


def find() -> tuple[Path | None, str]:
    """The library for this PyTorch, Python and these sources; or None, and why there is none."""
    folder = Path(native_folder())
    if not INSTALLED.is_dir() and not folder.is_dir():
        return None, "it is not built: `ltc build` does it"
    name = library_name()
    if (INSTALLED / name).is_file():
        return INSTALLED / name, ""
    path = folder / name
    if not path.is_file():
        return None, "it is not built for this version of PyTorch and of the package: `ltc build` does it"
    if not is_private_folder(str(folder)) or not is_trusted(os.stat(path)):
        return None, f"{path} is not loaded: others may write to it"
    return path, ""


def _load() -> tuple[Any, str]:
    """The extension, or None; and where it comes from, or why there is none."""
    if settings.native == "0":
        return None, "LTC_NATIVE=0"
    path, why = find()
    if path is None:
        return None, why
    try:
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
        spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        log.warning("the native extension cannot be loaded: %s", error)
        return None, f"{path} cannot be loaded: {error}"
    sys.modules[NAME] = module
    return module, str(path)


extension, _reason = _load()


def state() -> str:
    """What runs, and why, in one line."""
    return f"used, from {_reason}" if extension is not None else f"not used: {_reason}"


def check_required() -> None:
    """Raise when the setting asks for the extension and there is none."""
    if settings.native == "1" and extension is None:
        raise LtcError(
            f"LTC_NATIVE=1 asks for the native extension, but {_reason}", hint="ltc build, or unset LTC_NATIVE"
        )
