"""accelerate and transformers: the device that `Accelerator`, `Trainer`, `pipeline` and `device_map="auto"` choose.

accelerate's own variable, `ACCELERATE_TORCH_DEVICE`, goes before: where it is set, nothing is changed; in a process
that `accelerate launch` or `torchrun` has started, `ltc` there means the device and its process group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

from torch_ltc.config import foreign_variable, local_rank
from torch_ltc.libraries.choice import choice
from torch_ltc.libraries.imports import when_imported
from torch_ltc.pytorch.patches import Patches
from torch_ltc.record.ordinal import ordinal

__all__ = ["adapt"]

# The backend of its process group, for tensors of both devices.
_GROUP = "cpu:gloo,ltc:ltc"
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
            return ordinal.device
        device = found.fget(self)
        choice.tell("accelerate", device)
        return device

    _patches.put(state.PartialState, "default_device", property(default_device, doc=found.__doc__))

    def creating(original: Callable[..., None]) -> Callable[..., None]:
        def create(self: Any, cpu: bool = False, **kwargs: Any) -> None:
            original(self, cpu and not choice.takes(asked_for_cpu=True), **kwargs)

        return create

    _patches.wrap(state.PartialState, "__init__", creating)

    def preparing(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: str | None = None) -> Any:
            if cpu or local_rank() is None or not _is_chosen():
                return original(self, cpu, sagemaker_dp, backend)
            # Of the kinds that accelerate knows this is the one of any accelerator: DDP on one device a process.
            return backend or _GROUP, state.DistributedType.MULTI_GPU

        return prepare

    def setting_device(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def set_device(self: Any) -> None:
            if self.backend is not None and _is_chosen() and not self._cpu:
                self.device = ordinal.device
            else:
                original(self)

        return set_device

    _patches.wrap(state.PartialState, "_prepare_backend", preparing)
    _patches.wrap(state.PartialState, "set_device", setting_device)


def _is_chosen() -> bool:
    """True where accelerate is to take this device, by a choice of ours or by its own variable."""
    return choice.takes(asked_for_cpu=False) or foreign_variable("ACCELERATE_TORCH_DEVICE").startswith("ltc")


def _training_arguments(module: ModuleType) -> None:
    owner: Any = module.TrainingArguments
    found: Any = vars(owner)["_setup_devices"]

    def setup_devices(self: Any) -> Any:
        device = found.func(self)
        if device.type in ("cpu", "cuda") and choice.takes(asked_for_cpu=self.use_cpu):
            # Several GPUs would be used with replicas of the model.
            self._n_gpu = min(self._n_gpu, 1)
            return ordinal.device
        if device.type != ordinal.device.type and not self.use_cpu:
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
                return {"": ordinal.device}
            chosen = original(model, device_map, *args, **kwargs)
            kinds = {str(one).split(":")[0] for one in chosen.values()}
            if isinstance(device_map, str) and ordinal.device.type not in kinds:
                choice.tell(f"device_map={device_map!r}", next(iter(chosen.values()), "cpu"))
            return chosen

        return device_map_of

    _patches.wrap(module, "_get_device_map", choosing)


def _pipeline(module: ModuleType) -> None:
    def creating(original: Callable[..., None]) -> Callable[..., None]:
        def create(self: Any, model: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
            free = device is None and getattr(model, "hf_device_map", None) is None
            if free and choice.takes(asked_for_cpu=False):
                device = ordinal.device
            original(self, model, *args, device=device, **kwargs)
            if free and self.device.type != ordinal.device.type:
                choice.tell("transformers.pipeline", self.device)

        return create

    _patches.wrap(module.Pipeline, "__init__", creating)
