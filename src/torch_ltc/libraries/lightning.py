"""Lightning: `Trainer(accelerator="ltc")` and `Fabric(accelerator="ltc")`, with mixed precision.

The accelerator is in Lightning's registry. What goes with an accelerator, the strategy for one device and the plug-in
for mixed precision, Lightning chooses by the names of those that it knows: there the choice is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_ltc.libraries.choice import DEVICE, choice
from torch_ltc.libraries.imports import when_imported
from torch_ltc.pytorch.patches import Patches

__all__ = ["adapt"]

NAME = "ltc"
# Each of the packages comes by itself, or as a part of `lightning`.
_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
_patches = Patches()


class _OneDevice:
    """What Lightning asks of an accelerator; a base class beside Lightning's own."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to do: there is one device."""

    def teardown(self) -> None:
        """Nothing to do."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Memory figures."""
        figures: dict[str, Any] = torch.get_device_module(NAME).memory_stats()
        return figures

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """The number of the one device, in a list."""
        if devices not in (1, "1", "auto", -1, "-1", [0], "0,"):
            raise ValueError(f"there is one device, ltc:0; got devices={devices!r}")
        return [0]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """The device, in a list."""
        return [torch.device(NAME, number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        """There is one device."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """The device runs wherever PyTorch does."""
        return True

    @staticmethod
    def name() -> str:
        """The name in Lightning's registry."""
        return NAME


def adapt() -> None:
    """Register with Lightning when it is imported."""
    for name, owner in _CONNECTORS.items():
        when_imported(name, lambda module, owner=owner: _register(module, owner))  # type: ignore[misc]


def _register(connector: ModuleType, name: str) -> None:
    names = vars(connector)
    owner: Any = names[name]
    kind = type("LtcAccelerator", (_OneDevice, connector.Accelerator), {"__doc__": "The lazy device `ltc`."})
    accelerators: Any = names.get("AcceleratorRegistry", names.get("ACCELERATOR_REGISTRY"))
    accelerators.register(NAME, kind, description="the lazy device of torch_ltc")
    strategies: Any = names.get("StrategyRegistry", names.get("STRATEGY_REGISTRY"))
    strategies.register(NAME, connector.SingleDeviceStrategy, description="one lazy device", device=DEVICE)

    def choosing_strategy(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def choose(self: Any) -> Any:
            return connector.SingleDeviceStrategy(device=DEVICE) if _is_ours(self) else original(self)

        return choose

    def choosing_precision(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def choose(self: Any) -> Any:
            own = vars(self)
            given = own.get("_precision_plugin_flag", own.get("_precision_instance"))
            precision = own.get("_precision_flag", own.get("_precision_input"))
            if _is_ours(self) and given is None and precision in ("16-mixed", "bf16-mixed"):
                return connector.MixedPrecision(precision, NAME)
            return original(self)

        return choose

    def _is_ours(self: Any) -> bool:
        return isinstance(self.accelerator, kind)

    choosing = "_choose_auto_accelerator"
    found = getattr(owner, choosing)

    def choose_accelerator() -> str:
        if choice.takes(asked_for_cpu=False):
            return NAME
        chosen: str = found()
        choice.tell("Lightning", chosen)
        return chosen

    _patches.wrap(owner, "_choose_strategy", choosing_strategy)
    _patches.wrap(owner, "_check_and_init_precision", choosing_precision)
    _patches.put(owner, choosing, staticmethod(choose_accelerator))
