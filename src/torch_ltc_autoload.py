"""What PyTorch loads at the end of `import torch` where torch_ltc is installed.

It makes the device's name known and stops there: torch_ltc itself is imported when the device is first touched, by
`torch.device("ltc")` on a tensor, `.to("ltc")`, or any attribute of `torch.ltc`.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch


class _Proxy(ModuleType):
    """Stands for `torch.ltc` until it is touched."""

    def __getattr__(self, name: str) -> Any:
        # What PyTorch asks of every device module while it sets itself up must not load the package.
        if name.startswith("__") or name == "_is_in_bad_fork":
            raise AttributeError(name)
        importlib.import_module("torch_ltc")
        return getattr(sys.modules["torch.ltc"], name)

    def _lazy_init(self) -> None:
        """PyTorch calls this before the first tensor is made on the device."""
        importlib.import_module("torch_ltc")


def autoload() -> None:
    """Claim the name "ltc", unless another package has claimed the slot or there is a GPU.

    PyTorch takes the owner of the slot for the accelerator of the process, and its autograd engine then fails on CUDA
    tensors: on a machine with a GPU only an explicit `import torch_ltc` may do that.
    """
    if torch._C._get_privateuse1_backend_name() != "privateuseone" or torch.accelerator.is_available():
        return
    torch.utils.rename_privateuse1_backend("ltc")
    torch._register_device_module("ltc", _Proxy("torch.ltc"))
