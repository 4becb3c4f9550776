"""Lightning: `Trainer(accelerator="ltc")` and `Fabric(accelerator="ltc")`, with mixed precision and DDP.

The accelerator is in Lightning's registry. What goes with an accelerator, the strategy for one device and the plug-in
for mixed precision, Lightning chooses by the names of those that it knows: there the choice is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_ltc.libraries.choice import choice
from torch_ltc.libraries.imports import when_imported
from torch_ltc.native.library import extension
from torch_ltc.pytorch.patches import Patches
from torch_ltc.record.ordinal import ordinal

__all__ = ["adapt"]

NAME = "ltc"
# Each of the packages comes by itself, or as a part of `lightning`.
_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
_DDP = {
    "lightning.pytorch.strategies.ddp": "determine_ddp_device_ids",
    "pytorch_lightning.strategies.ddp": "determine_ddp_device_ids",
    "lightning.fabric.strategies.ddp": "_determine_ddp_device_ids",
    "lightning_fabric.strategies.ddp": "_determine_ddp_device_ids",
}
_patches = Patches()


class _LazyDevice:
    """What Lightning asks of an accelerator; a base class beside Lightning's own."""

    def setup_device(self, device: torch.device) -> None:
        """Take the device of this process, which Lightning has started for it."""
        torch.get_device_module(NAME).set_device(device)

    def teardown(self) -> None:
        """Nothing to do."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Memory figures."""
        figures: dict[str, Any] = torch.get_device_module(NAME).memory_stats()
        return figures

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """The numbers of the devices, each for a process of its own."""
        if devices in ("auto", -1, "-1"):
            return list(range(ordinal.count))
        if isinstance(devices, int) or (isinstance(devices, str) and devices.isdigit()):
            return list(range(int(devices)))
        return [int(one) for one in (devices.split(",") if isinstance(devices, str) else devices) if str(one).strip()]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """The devices. Without the extension each process has its own under the number 0."""
        return [torch.device(NAME, number if extension is not None else 0) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        """The number of devices of the machine."""
        return ordinal.count

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
    for name, method in _DDP.items():
        when_imported(name, lambda module, method=method: _patches.wrap(module.DDPStrategy, method, _numbering))  # type: ignore[misc]


def _numbering(original: Callable[[Any], list[int] | None]) -> Callable[[Any], list[int] | None]:
    """DDP of one device a process needs no numbers; for numbers Lightning makes a stream of CUDA's."""

    def device_ids(self: Any) -> list[int] | None:
        return None if self.root_device.type == NAME else original(self)

    return device_ids


def _register(connector: ModuleType, name: str) -> None:
    names = vars(connector)
    owner: Any = names[name]
    kind = type("LtcAccelerator", (_LazyDevice, connector.Accelerator), {"__doc__": "The lazy device `ltc`."})
    accelerators: Any = names.get("AcceleratorRegistry", names.get("ACCELERATOR_REGISTRY"))
    accelerators.register(NAME, kind, description="the lazy device of torch_ltc")
    strategies: Any = names.get("StrategyRegistry", names.get("STRATEGY_REGISTRY"))
    strategies.register(NAME, connector.SingleDeviceStrategy, description="one lazy device", device=ordinal.device)

    def choosing_strategy(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def choose(self: Any) -> Any:
            if not _is_ours(self) or self._num_nodes_flag > 1 or len(self._parallel_devices) > 1:
                return original(self)
            return connector.SingleDeviceStrategy(device=ordinal.device)

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
