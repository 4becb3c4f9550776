"""The device under the names of CUDA: `run --map-cuda`.

Entry points of PyTorch are replaced, not a function mode installed: a mode costs every recorded operation, and does not
see `torch.device("cuda")`, `torch.cuda.is_available()` or `torch.load`. Names are mapped where the script gives them.
What this package itself calls is left alone, because the physical device may be a GPU; and what PyTorch asks about CUDA
for its own purposes gets the true answer. Types as `torch.cuda.FloatTensor` are not mapped.
"""

from __future__ import annotations

import operator
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from torch_ltc.device import device_module as ltc
from torch_ltc.device.torch_functions import GeneratorType
from torch_ltc.pytorch.patches import Patches
from torch_ltc.pytorch.private import TensorBase, device_constructors
from torch_ltc.record.call_site import is_user_file

_OURS = "torch_ltc"
_Device = type(torch.device("cpu"))
# As far as a script looks at it, a GPU without special abilities.
_CAPABILITY = (0, 0)


def mapped(device: Any) -> Any:
    """The name of a device here: "cuda:0" becomes "ltc:0"; anything else stays."""
    if isinstance(device, str) and (device == "cuda" or device.startswith("cuda:")):
        return "ltc" + device[4:]
    if isinstance(device, _Device) and device.type == "cuda":
        return _Device("ltc") if device.index is None else _Device("ltc", device.index)
    return device


def _may_map(depth: int = 2) -> bool:
    """False for calls of this package and on its threads."""
    caller = str(sys._getframe(depth).f_globals.get("__name__", ""))
    if caller == _OURS or caller.startswith(_OURS + "."):
        return False
    return not threading.current_thread().name.startswith(_OURS)


def _by_script(depth: int = 2) -> bool:
    """True when the caller is neither PyTorch nor this package."""
    return is_user_file(sys._getframe(depth).f_code.co_filename)


@contextmanager
def cuda_names() -> Iterator[None]:
    """Inside, CUDA's names stand for the device."""
    with Patches() as patches:
        _map_factories(patches)
        _map_methods(patches)
        _map_device_class(patches)
        _map_files_and_generators(patches)
        _map_cuda_module(patches)
        _map_mixed_precision(patches)
        yield


# ---- arguments that name a device ---------------------------------------------------------------------------------


def _mapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with devices mapped among its arguments, at any place."""

    def call(*args: Any, **kwargs: Any) -> Any:
        others = tuple(map(mapped, args))
        device = mapped(kwargs.get("device"))
        # Few calls name CUDA: only these look at their caller.
        if (device is not kwargs.get("device") or any(map(operator.is_not, others, args))) and _may_map():
            return original(*others, **(kwargs | {"device": device} if "device" in kwargs else kwargs))
        return original(*args, **kwargs)

    return call


def _map_factories(patches: Patches) -> None:
    # PyTorch's own table knows its functions by identity, and finds the default device through it: the functions that
    # are replaced stay what is called in the end, so that it goes on working.
    makers = set(device_constructors())
    for owner in (torch, torch.fft, torch.nested):
        for name, value in list(vars(owner).items()):
            if not name.startswith("_") and callable(value) and _hashable(value) and value in makers:
                patches.wrap(owner, name, _mapping)
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"):
        patches.wrap(torch, name, _mapping)


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


def _map_methods(patches: Patches) -> None:
    patches.wrap(torch.Tensor, "to", _mapping)
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"):
        patches.wrap(torch.Tensor, name, _mapping)
    patches.wrap(torch.nn.Module, "to", _mapping)

    def moving(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not _may_map():
                return original(self, device, *args, **kwargs)
            # Other arguments say how to copy: here always in order.
            return self.to(_named(device))

        return call

    patches.wrap(torch.Tensor, "cuda", moving)
    patches.wrap(torch.nn.Module, "cuda", moving)
    patches.wrap(torch.nn.DataParallel, "__init__", _without_replicas)
    on_cuda: Any = TensorBase.is_cuda

    def is_cuda(self: torch.Tensor) -> bool:
        return bool(on_cuda.__get__(self)) or (self.device.type == "ltc" and _by_script())

    patches.put(torch.Tensor, "is_cuda", property(is_cuda, doc=on_cuda.__doc__))


def _without_replicas(original: Callable[..., None]) -> Callable[..., None]:
    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # As where there is no GPU: there is one device, and the module runs there as it is.
        self.device_ids = []

    return create


def _named(device: Any) -> Any:
    """The device that CUDA's functions mean by an index, a name, a device or None."""
    if device is None:
        return "ltc"
    return f"ltc:{device}" if isinstance(device, int) else mapped(device)


# ---- the class torch.device, files, generators --------------------------------------------------------------------


class _DeviceType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Device)


def _map_device_class(patches: Patches) -> None:
    # PyTorch's class cannot be derived from. This one makes instances of it.
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = _Device(*args, **kwargs)
        return mapped(made) if made.type == "cuda" and _may_map() else made

    names = {"__new__": new, "__doc__": _Device.__doc__, "__module__": "torch", "__slots__": ()}
    patches.put(torch, "device", _DeviceType("device", (), names))


def _map_files_and_generators(patches: Patches) -> None:
    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            if map_location is None:
                # Tensors that were saved on a GPU.
                map_location = {"cuda": "ltc", "cuda:0": "ltc:0"}
            elif isinstance(map_location, dict):
                map_location = {origin: mapped(target) for origin, target in map_location.items()}
            return original(f, mapped(map_location), *args, **kwargs)

        return load

    patches.wrap(torch, "load", loading)
    generator: Any = torch.Generator

    def new(cls: type, device: Any = "cpu") -> Any:
        return generator(mapped(device) if _may_map() else device)

    patches.put(torch, "Generator", GeneratorType("Generator", (generator,), {"__new__": new, "__module__": "torch"}))


def _map_mixed_precision(patches: Patches) -> None:
    def opening(original: Callable[..., None]) -> Callable[..., None]:
        def create(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            if mapped(device_type) is not device_type and _may_map():
                # What a script for GPUs expects, which may scale its gradients for it.
                dtype = torch.get_autocast_gpu_dtype() if dtype is None else dtype
                device_type = mapped(device_type)
            original(self, device_type, dtype, *args, **kwargs)

        return create

    def scaling(original: Callable[..., None]) -> Callable[..., None]:
        def create(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
            original(self, mapped(device) if _may_map() else device, *args, **kwargs)

        return create

    def asking(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_enabled(device_type: str = "cuda") -> bool:
            return original(mapped(device_type))

        return is_enabled

    patches.wrap(torch.autocast, "__init__", opening)
    patches.wrap(torch.amp.GradScaler, "__init__", scaling)
    patches.wrap(torch, "is_autocast_enabled", asking)


# ---- torch.cuda ---------------------------------------------------------------------------------------------------


class Event:
    """A point in time. One that measures waits for all that was recorded before it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.timed = enable_timing
        self._at_s: float | None = None

    def record(self, stream: object = None) -> None:
        """Take the time."""
        if self.timed:
            ltc.synchronize()
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Sync, and return when everything has run."""
        ltc.synchronize()

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for: there is one stream."""

    def query(self) -> bool:
        """True: `record` has waited."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        if self._at_s is None or end._at_s is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end._at_s - self._at_s) * 1e3


def _device_properties(device: Any = None) -> types.SimpleNamespace:
    major, minor = _CAPABILITY
    return types.SimpleNamespace(
        name=ltc.get_device_name(),
        total_memory=ltc.get_memory_info()[1],
        major=major,
        minor=minor,
        multi_processor_count=1,
    )


def _device_context(device: Any) -> AbstractContextManager[None]:
    return ltc.device(_named(device))


# Functions of torch.cuda that torch.ltc has too, under the same name and with the same arguments.
_SAME = (
    "is_available", "device_count", "current_device", "is_initialized", "init", "synchronize", "empty_cache",
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state_all", "set_rng_state_all",
    "current_stream", "default_stream", "stream", "set_stream", "is_bf16_supported",
)  # fmt: skip
# The same, with a device as the only argument.
_SAME_OF_DEVICE = (
    "set_device", "get_device_name", "memory_allocated", "max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "memory_stats", "reset_peak_memory_stats",
)  # fmt: skip


def _cuda_functions() -> dict[str, Callable[..., Any]]:
    found = {name: getattr(ltc, name) for name in _SAME}
    found |= {name: _of_device(getattr(ltc, name)) for name in _SAME_OF_DEVICE}
    return found | {
        "synchronize": _of_device(ltc.synchronize),
        "get_rng_state": lambda device="cuda": ltc.get_rng_state(_named(device)),
        "set_rng_state": lambda state, device="cuda": ltc.set_rng_state(state, _named(device)),
        "mem_get_info": _of_device(ltc.get_memory_info),
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_properties": _device_properties,
        "memory_summary": lambda device=None, abbreviated=False: str(ltc.memory_stats()),
        "ipc_collect": lambda: None,
        "device": _device_context,
        "Event": Event,
        "Stream": ltc.Stream,
    }


def _of_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(device: Any = None) -> Any:
        return function(None if device is None else _named(device))

    return call


def _map_cuda_module(patches: Patches) -> None:
    for name, ours in _cuda_functions().items():
        original = getattr(torch.cuda, name)
        if isinstance(original, type):
            # Classes: what PyTorch itself makes of them is for real GPUs, and is made of the modules that define them.
            patches.put(torch.cuda, name, ours)
        else:
            patches.wrap(torch.cuda, name, _choosing(ours))


def _choosing(ours: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs) if _by_script() else original(*args, **kwargs)

        return call

    return around
