"""accelerate and transformers: the device that `Accelerator`, `Trainer`, `pipeline` and `device_map="auto"` choose.

accelerate's own variable, `ACCELERATE_TORCH_DEVICE`, goes before: where it is set, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

from torch_ltc.libraries.choice import DEVICE, choice
from torch_ltc.libraries.imports import when_imported
from torch_ltc.pytorch.patches import Patches

__all__ = ["adapt"]

# For as long as the process lives: without a choice each of them does what the library does.
_patches = Patches()


def adapt() -> None:
    """Change the libraries when they are imported."""
    when_imported("accelerate.state", _accelerate)
    when_imported("transformers.training_args", _training_arguments)
    when_imported("transformers.modeling_utils", _device_map)
    when_imported("transformers.pipelines.base", _pipeline)


def _accelerate(state: ModuleType) -> None:
    found: Any = state.PartialState.default_device

    def default_device(self: Any) -> Any:
        if choice.takes(asked_for_cpu=False):
            return DEVICE
        device = found.fget(self)
        choice.tell("accelerate", device)
        return device

    _patches.put(state.PartialState, "default_device", property(default_device, doc=found.__doc__))

    def creating(original: Callable[..., None]) -> Callable[..., None]:
        def create(self: Any, cpu: bool = False, **kwargs: Any) -> None:
            original(self, cpu and not choice.takes(asked_for_cpu=True), **kwargs)

        return create

    _patches.wrap(state.PartialState, "__init__", creating)


def _training_arguments(module: ModuleType) -> None:
    owner: Any = module.TrainingArguments
    found: Any = vars(owner)["_setup_devices"]

    def setup_devices(self: Any) -> Any:
        device = found.func(self)
        if device.type in ("cpu", "cuda") and choice.takes(asked_for_cpu=self.use_cpu):
            # Several GPUs would be used with replicas of the model.
            self._n_gpu = min(self._n_gpu, 1)
            return DEVICE
        if device.type != DEVICE.type and not self.use_cpu:
            choice.tell("transformers.Trainer", device)
        return device

    def asking(original: Callable[[], bool]) -> Callable[[], bool]:
        def is_available() -> bool:
            return choice.takes(asked_for_cpu=False) or original()

        return is_available

    _patches.wrap(module, "is_torch_bf16_gpu_available", asking)
    replacement: Any = cached_property(setup_devices)
    replacement.__set_name__(owner, "_setup_devices")
    _patches.put(owner, "_setup_devices", replacement)


def _device_map(module: ModuleType) -> None:
    def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
        def device_map_of(model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(device_map, str) and choice.takes(asked_for_cpu=False):
                return {"": DEVICE}
            chosen = original(model, device_map, *args, **kwargs)
            if isinstance(device_map, str) and DEVICE.type not in {str(one).split(":")[0] for one in chosen.values()}:
                choice.tell(f"device_map={device_map!r}", next(iter(chosen.values()), "cpu"))
            return chosen

        return device_map_of

    _patches.wrap(module, "_get_device_map", choosing)


def _pipeline(module: ModuleType) -> None:
    def creating(original: Callable[..., None]) -> Callable[..., None]:
        def create(self: Any, model: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
            free = device is None and getattr(model, "hf_device_map", None) is None
            if free and choice.takes(asked_for_cpu=False):
                device = DEVICE
            original(self, model, *args, device=device, **kwargs)
            if free and self.device.type != DEVICE.type:
                choice.tell("transformers.pipeline", self.device)

        return create

    _patches.wrap(module.Pipeline, "__init__", creating)
