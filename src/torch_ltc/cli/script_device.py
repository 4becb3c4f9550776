"""The default device of a script that names none, and the other assumptions of such a script.

`torch.set_default_device` covers the functions that make tensors. A script that was written for the CPU also makes
tensors of arrays, reads them as arrays, and takes batches out of a `DataLoader`: here these follow the default device,
as long as that is ltc; the counters of optimizers do not. A script that names "cpu" gets the CPU, and may set another
default.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from torch_ltc.cli.output import note
from torch_ltc.pytorch.patches import Patches
from torch_ltc.pytorch.private import DataLoaderIterator, TensorBase, pytree

NAME = "ltc"
# Options of a loader that are errors without worker processes.
_OF_WORKERS: Mapping[str, Any] = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "multiprocessing_context": None,
    "worker_init_fn": None,
}


class _State:
    """True while a script runs."""

    active = False


def _is_default() -> bool:
    return torch.get_default_device().type == NAME


@contextmanager
def default_device() -> Iterator[None]:
    """Inside, tensors are made on the device unless the script says otherwise."""
    torch.set_default_device(NAME)
    _State.active = True
    try:
        with Patches() as patches:
            _follow_arrays(patches)
            _follow_loaders(patches)
            _keep_counters(patches)
            yield
    finally:
        _State.active = False
        torch.set_default_device(None)


def _in_worker() -> None:
    """In a process that was forked, as the workers of a loader are: the device cannot be used there."""
    if _State.active:
        # For the rest of the process. Another default cannot be set: the process may have been forked inside of a
        # `with torch.device(...)`.
        torch.device("cpu").__enter__()


os.register_at_fork(after_in_child=_in_worker)


# ---- arrays ---------------------------------------------------------------------------------------------------------


def _follow_arrays(patches: Patches) -> None:
    def moved(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = original(*args, **kwargs)
            return made.to(NAME) if _is_default() else made

        return make

    def copied(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device.type != NAME:
                return original(self, *args, **kwargs)
            array = original(self.cpu(), *args, **kwargs)
            # On the CPU the array and the tensor are one memory. A write that the tensor would not see must fail.
            array.flags.writeable = False
            return array

        return read

    base_new: Any = TensorBase.__new__

    # The class is among `args`: PyTorch's compiler compares signatures when it is loaded, and takes this one.
    def new(*args: Any, **kwargs: Any) -> Any:
        made = base_new(*args, **kwargs)
        return made.to(NAME) if args[0] is torch.Tensor and _is_default() else made

    patches.wrap(torch, "from_numpy", moved)
    patches.wrap(torch, "frombuffer", moved)
    patches.wrap(torch.Tensor, "numpy", copied)
    patches.wrap(torch.Tensor, "__array__", copied)
    patches.put(torch.Tensor, "__new__", new)


# ---- optimizers and loaders -----------------------------------------------------------------------------------------


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the CPU as the default device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_default():
            return original(*args, **kwargs)
        with torch.device("cpu"):
            return original(*args, **kwargs)

    return call


def _keep_counters(patches: Patches) -> None:
    """Optimizers count steps in tensors that they make without a device, and read them in every step."""
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and "_init_group" in vars(kind):
            patches.wrap(kind, "__init__", _on_cpu)
            patches.wrap(kind, "_init_group", _on_cpu)


def _follow_loaders(patches: Patches) -> None:
    """Items are made and put together on the CPU, in this process or in workers; batches come out on the device."""

    def prepared(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def create(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            if _is_default():
                _adapt(bound.arguments)
            original(*bound.args, **bound.kwargs)

        return create

    def to_device(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def following(self: Any) -> Any:
            if not _is_default():
                return original(self)
            with torch.device("cpu"):
                batch = original(self)
            return pytree.tree_map(_moved, batch, is_leaf=_moves_itself)

        return following

    patches.wrap(DataLoader, "__init__", prepared)
    patches.wrap(DataLoader, "__iter__", _on_cpu)
    patches.wrap(DataLoaderIterator, "__next__", to_device)


def _adapt(options: dict[str, Any]) -> None:
    """Change the options of a loader that the device cannot follow."""
    # Memory of the host that a GPU copies from; batches are on the device already.
    if options.get("pin_memory"):
        options["pin_memory"] = False
    options["dataset"] = _copied_to_cpu(options["dataset"])
    if options.get("num_workers") and _holds_device_tensors(options.get("dataset")):
        options.update({name: value for name, value in _OF_WORKERS.items() if name in options})
        note("a DataLoader works without worker processes: its data set is on the device, which they cannot use")


def _copied_to_cpu(data: Any) -> Any:
    """PyTorch's own data sets with their tensors copied to the CPU once; any other data set stays what it is.

    Taken out of tensors of the device one by one, every item is a call of its own with a constant index: each batch
    would be another program.
    """
    # Not of derived classes: they may have a state that the script goes on changing.
    if type(data) is TensorDataset:
        return TensorDataset(*(tensor.cpu() for tensor in data.tensors))
    if type(data) is Subset:
        return Subset(_copied_to_cpu(data.dataset), data.indices)
    if type(data) is ConcatDataset:
        return ConcatDataset([_copied_to_cpu(part) for part in data.datasets])
    return data


def _holds_device_tensors(value: Any, depth: int = 3) -> bool:
    """True for a data set with tensors of the device, in plain containers or in attributes of objects in it."""
    if isinstance(value, torch.Tensor):
        return value.device.type == NAME
    if depth == 0 or isinstance(value, str | bytes | type):
        return False
    if isinstance(value, Mapping):
        inside: list[Any] = list(value.values())
    elif isinstance(value, Sequence):
        # Items of a long list are of one kind.
        inside = list(value[:16]) if isinstance(value, list | tuple) else []
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    return any(_holds_device_tensors(item, depth - 1) for item in inside)


def _moves_itself(value: Any) -> bool:
    """True for packed sequences, and for the dictionaries of tokenizers."""
    return isinstance(value, Mapping | tuple) and hasattr(value, "to")


def _moved(leaf: Any) -> Any:
    return leaf.to(NAME) if isinstance(leaf, torch.Tensor) or _moves_itself(leaf) else leaf
