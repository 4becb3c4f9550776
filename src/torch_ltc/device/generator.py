"""`torch.Generator(device="ltc")`: a physical generator that says it belongs to the device.

PyTorch lets a device written in Python make no generator of its own. The class behind `torch.Generator` is replaced
by a subclass that makes ours; generators of other devices are made as before and are still instances of it.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.config import settings

_Original = torch._C.Generator


class _GeneratorType(type(_Original)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Original)


class DeviceGenerator(_Original):
    """A generator for `generator=` arguments of the device's random operators."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The lazy device."""
        return torch.device("ltc", 0)

    def __reduce__(self) -> Any:
        return (_restore, (self.get_state(),))


def _restore(state: torch.Tensor) -> DeviceGenerator:
    generator = DeviceGenerator(device=settings.device_type)
    generator.set_state(state)
    return generator


def install_generator() -> None:
    """Make `torch.Generator(device="ltc")` work."""

    def new(cls: type, device: Any = "cpu") -> Any:
        if torch.device(device).type == "ltc":
            return DeviceGenerator(device=settings.device_type)
        return _Original(device=device)

    names = {"__new__": new, "__doc__": _Original.__doc__, "__module__": "torch", "__slots__": ()}
    torch.Generator = _GeneratorType("Generator", (_Original,), names)  # type: ignore[misc]
