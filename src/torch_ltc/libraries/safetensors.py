"""safetensors: `safe_open(..., device="ltc")`, and with it `load_file` and `load_model`.

The reader is not written in Python, and knows a list of devices. Tensors are read into host memory and copied.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from torch_ltc.libraries.imports import when_imported
from torch_ltc.pytorch.patches import Patches

__all__ = ["adapt"]

_patches = Patches()


def adapt() -> None:
    """Change the reader when the library is imported."""
    when_imported("safetensors", _wrap_reader)
    when_imported("safetensors.torch", _wrap_reader)


def _wrap_reader(module: ModuleType) -> None:
    original: Any = module.safe_open
    if isinstance(original, _Reader):
        return
    _patches.put(module, "safe_open", _Reader(original))


class _Reader:
    """Stands for the class `safe_open`."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.__doc__ = original.__doc__

    def __call__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        """Open a file: for other devices as the library does."""
        kind = str(device).split(":")[0]
        if kind != "ltc":
            return self._original(filename, framework, device, **options)
        return _File(self._original(filename, framework, "cpu", **options))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, (self._original, _File))


class _File:
    """An open file whose tensors are on the device."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._file.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.to("ltc")

    def get_tensors(self, *args: Any) -> dict[str, torch.Tensor]:
        """All tensors."""
        return {name: tensor.to("ltc") for name, tensor in self._file.get_tensors(*args).items()}

    def get_slice(self, name: str) -> _Slice:
        """A tensor, read where it is indexed."""
        return _Slice(self._file.get_slice(name))


class _Slice:
    """A part of a tensor that is read when it is indexed."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._part[index]
        return tensor.to("ltc")
