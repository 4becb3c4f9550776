"""Functions and classes of PyTorch that must know the device: generators, `torch.accelerator`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.device import device_module
from torch_ltc.pytorch.entries import Patch, table
from torch_ltc.pytorch.patches import replaces
from torch_ltc.pytorch.private import PhysicalGenerator
from torch_ltc.record.buffer import physical_device
from torch_ltc.record.ordinal import ordinal

# ---- modules ------------------------------------------------------------------------------------------------------


@replaces("torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions._adjust")
def _for_physical_device(original: Any) -> Any:
    def adjust(self: Any, *sizes_and_dtype: Any, device: torch.device | None = None, **given: Any) -> Any:
        lazy = device is not None and device.type == "ltc"
        return original(self, *sizes_and_dtype, device=physical_device() if lazy else device, **given)

    return adjust


@replaces("torch._C._select_conv_backend")
def _of_physical_kernels(original: Any) -> Any:
    def select(*args: Any, **kwargs: Any) -> Any:
        return original(*map(_physical_like, args), **{name: _physical_like(value) for name, value in kwargs.items()})

    return select


def _physical_like(value: Any) -> Any:
    """A tensor of the device as an empty one of the physical device that looks the same; everything else as it is."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "ltc":
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=physical_device())
    return made.requires_grad_(value.requires_grad)


# ---- generators ---------------------------------------------------------------------------------------------------


class DeviceGenerator(PhysicalGenerator):
    """A generator for `generator=` arguments of the device's random operators: a physical one that says it belongs to
    the device. PyTorch lets a device written in Python make no generator of its own."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The lazy device."""
        return ordinal.device

    def __reduce__(self) -> Any:
        return (_restore, (self.get_state(),))


def _restore(state: torch.Tensor) -> DeviceGenerator:
    generator = DeviceGenerator(device=settings.device_type)
    generator.set_state(state)
    return generator


class GeneratorType(type(PhysicalGenerator)):  # type: ignore[misc]
    """Type of a class in the place of `torch.Generator`: every generator is an instance of it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PhysicalGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, PhysicalGenerator)


@replaces("torch.Generator")
def _making_device_generators(original: Any) -> Any:
    def new(cls: type, device: Any = "cpu") -> Any:
        if torch.device(device).type == "ltc":
            return DeviceGenerator(device=settings.device_type)
        return original(device=device)

    names = {"__new__": new, "__doc__": original.__doc__, "__module__": "torch", "__slots__": ()}
    return GeneratorType("Generator", (original,), names)


# ---- torch.accelerator: the device is the accelerator of its process ----------------------------------------------


def _from_device_module(name: str) -> Callable[[Any], Any]:
    asked = getattr(device_module, name)

    def around(original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            return asked(*args, **kwargs)

        return function

    return around


for _patch in table.entries(Patch):
    if _patch.path.startswith("torch.accelerator."):
        replaces(_patch.path)(_from_device_module(_patch.path.rpartition(".")[2]))
