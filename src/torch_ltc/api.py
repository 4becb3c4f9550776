"""The functions of `torch_ltc` itself, most of them under the names of `torch._lazy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.closures import run_step_closures
from torch_ltc.compile import jobs
from torch_ltc.config import settings
from torch_ltc.debug.entry_points import write_at_exit
from torch_ltc.errors import LtcError
from torch_ltc.events import SyncReason
from torch_ltc.execute import sync as runtime
from torch_ltc.execute.executor import executor
from torch_ltc.execute.sync import cut
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.registry import registry
from torch_ltc.pytorch.private import pytree
from torch_ltc.record.buffer import buffer_of


def sync(wait: bool = False) -> None:
    """End the step: queue everything that was recorded, and run the step closures.

    Returns as soon as the work is queued; with `wait`, when it has run. Never required: reading a value syncs by
    itself, and so does an optimizer's step. Raises the error of an operation that failed in an earlier program, once.
    """
    runtime.sync(wait)
    run_step_closures()


class use_backend:
    """Choose the backend that compiles programs: `use_backend("inductor")`, or for a block, `with use_backend(...):`.

    Takes a name, or a `Backend` object or class, which is registered first if it is not yet. Programs recorded before
    the call keep the backend they had. Tensors stay as they are.
    """

    def __init__(self, backend: str | Backend | type[Backend]) -> None:
        self._before = settings.backend
        cut(SyncReason.EXPLICIT)
        settings.backend = backend if isinstance(backend, str) else _registered(backend)
        self.name = settings.backend

    def __enter__(self) -> Backend:
        return registry.get(self.name)

    def __exit__(self, *raised: object) -> None:
        cut(SyncReason.EXPLICIT)
        settings.backend = self._before

    def __repr__(self) -> str:
        return f"use_backend({self.name!r})"


def _registered(backend: Backend | type[Backend]) -> str:
    name = getattr(backend, "name", "")
    known = registry.get(name) if name in registry.names() else None
    if known is not None and (known is backend or type(known) is backend):
        return name
    return registry.register(backend).name


def register_backend(backend: Backend | type[Backend]) -> Backend:
    """Make a backend known under its name. Packages do the same with an entry point "torch_ltc.backends"."""
    return registry.register(backend)


def wait_for_compiles() -> None:
    """Return when everything that was synced has run and nothing is being compiled or loaded any more.

    Never required: programs run in the interpreter until their compiled form is there. For measurements and tests, that
    want to see the one and not the other.
    """
    executor.drain()
    jobs.wait_for_jobs()


def _prepare_to_exit() -> None:
    executor.drain()
    write_at_exit()
    jobs.stop()
    for backend in registry.used():
        backend.prepare_to_exit()


def mark_step(device: str = "", wait: bool = False) -> None:
    """As `sync`, with the signature of `torch._lazy.mark_step`."""
    del device
    sync(wait)


def wait_device_ops(devices: Sequence[str] | None = None) -> None:
    """Return when everything that was synced has run."""
    del devices
    runtime.wait_device_ops()


def sync_multi(tensors: Sequence[torch.Tensor], devices: Sequence[str] | None = None) -> None:
    """Compute these tensors, and with them everything recorded so far; returns when it has run."""
    del devices
    if any(tensor.device.type == "ltc" for tensor in tensors):
        runtime.sync(wait=True)


def get_tensor_id(tensor: torch.Tensor) -> int:
    """A number that identifies the memory behind a tensor of the device, shared by its views."""
    if tensor.device.type != "ltc":
        raise LtcError(
            f"get_tensor_id takes tensors on ltc, got one on {tensor.device}", hint="move it with .to('ltc')"
        )
    return buffer_of(tensor).identity


def to_cpu(tensors: Any, devices: Sequence[str] | None = None) -> Any:
    """The structure of lists, tuples and dicts with the tensors of the device copied to the CPU, after one sync."""
    del devices
    leaves, structure = pytree.tree_flatten(tensors)
    if any(isinstance(leaf, torch.Tensor) and leaf.device.type == "ltc" for leaf in leaves):
        runtime.sync()
    moved = [leaf.cpu() if isinstance(leaf, torch.Tensor) and leaf.device.type == "ltc" else leaf for leaf in leaves]
    return pytree.tree_unflatten(moved, structure)


def save(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save` of the structure with its tensors copied to the CPU."""
    torch.save(to_cpu(tensors), *args, **kwargs)
