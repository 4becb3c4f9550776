"""The module that PyTorch loads at the end of `import torch` where torch_ltc is installed.

It makes the device's name known and stops there: torch_ltc itself is imported when the device is first touched, by
`torch.device("ltc")` on a tensor, `.to("ltc")`, or any attribute of `torch.ltc`.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch


class _Proxy(ModuleType):
    """Stands for `torch.ltc` until it is touched. What PyTorch asks of every device is answered without loading it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        importlib.import_module("torch_ltc")
        return getattr(sys.modules["torch.ltc"], name)

    def _lazy_init(self) -> None:
        """PyTorch calls this before the first tensor is made on the device."""
        importlib.import_module("torch_ltc")

    def is_available(self) -> bool:
        """The device runs wherever PyTorch does."""
        return True

    def device_count(self) -> int:
        """There is one, unless `torchrun` has started several processes here."""
        return int(self.__getattr__("device_count")()) if _is_local_rank() else 1

    def current_device(self) -> int:
        """The only one, or that of the process among several."""
        return int(self.__getattr__("current_device")()) if _is_local_rank() else 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing to do: when the device is loaded, it takes the seed that PyTorch has by then."""


def _is_local_rank() -> bool:
    """True in a process that `torchrun` has started: which device it has, and of how many, the package knows."""
    return "LOCAL_RANK" in os.environ  # noqa: TID251  the settings would load the package


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """`Tensor.pin_memory()`: a copy, as the package makes one where there is no GPU. Loaders pin their batches wherever
    there is an accelerator, and PyTorch asks the accelerator for the memory."""
    return tensor.clone()


# Until the package is loaded, which has a kernel of its own.
_kernels: list[Any] = []


def release() -> None:
    """Take the kernel out: the package is loaded."""
    while _kernels:
        _kernels.pop().m.reset()


def autoload() -> None:
    """Claim the name "ltc", unless another package has claimed the slot or there is a GPU.

    PyTorch takes the owner of the slot for the accelerator of the process, and its autograd engine then fails on CUDA
    tensors: on a machine with a GPU only an explicit `import torch_ltc` may do that.
    """
    if torch._C._get_privateuse1_backend_name() != "privateuseone" or torch.accelerator.is_available():
        return
    torch.utils.rename_privateuse1_backend("ltc")
    torch._register_device_module("ltc", _Proxy("torch.ltc"))
    torch.utils.generate_methods_for_privateuse1_backend()
    library: Any = torch.library.Library("aten", "IMPL")
    library.m.impl("aten::_pin_memory", "CPU", _pin_memory, False)
    _kernels.append(library)
