"""The device's kernels of PyTorch's collectives: recorded, and done as far as the caller can tell.

Importing this registers the backend `ltc` with `torch.distributed`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_ltc.config import settings
from torch_ltc.distributed.groups import groups, make_backend
from torch_ltc.distributed.operators import Collective, define
from torch_ltc.errors import GroupError
from torch_ltc.events import SyncReason
from torch_ltc.execute.executor import NOTHING, executor
from torch_ltc.execute.sync import cut, sync
from torch_ltc.pytorch.distributed import backend_of, box_work, has_cpu, register_backend, unbox_group
from torch_ltc.pytorch.patches import registers, replaces
from torch_ltc.pytorch.private import below_autograd
from torch_ltc.pytorch.table import DISTRIBUTED_BACKEND
from torch_ltc.record.call_site import current_source
from torch_ltc.record.recorder import recorder

_libraries: list[torch.library.Library] = []


def _kernel(collective: Collective, *given: Any) -> Any:
    """Record the collective. Its handle is done at once: whoever reads a result waits for the program."""
    values = collective.values(given)
    with below_autograd():
        collective.record(values)
    written = next(value for part, value in zip(collective.parts, values, strict=True) if part.written)
    returned = [box_work(written) if kind == "Work" else written for kind in collective.returns]
    return returned[0] if len(returned) == 1 else tuple(returned)


def _barrier(tensor: torch.Tensor, group: Any, device_ids: list[int], async_op: bool = True, timeout: int = -1) -> Any:
    """Return when all ranks have run what was recorded before: then, not before, files are written and so on."""
    mine = unbox_group(group)
    if backend_of(mine) is None:
        # A group for other devices: PyTorch takes the accelerator of the process when devices are named by number.
        there = torch.empty(1, device="cpu" if has_cpu(mine) else "cuda")
        return torch.ops.c10d.barrier.default(there, group, device_ids, async_op, timeout)
    physical = groups.physical(groups.name_of(mine))
    _in_order(lambda: physical.barrier().wait())
    return box_work([])


def _receive_from_any(tensors: list[torch.Tensor], group: Any, tag: int) -> Any:
    raise GroupError(
        "recv() from any rank cannot be recorded: who sent is known when it has run",
        hint="name the rank: recv(tensor, src=...)",
    )


def _in_order(work: Any) -> Any:
    """Run `work` after everything that was recorded, and wait for it."""
    with recorder.lock:
        cut(SyncReason.BARRIER)
        future = executor.submit(work, NOTHING, wait=False)
    return executor.result_of(future)


@replaces("torch.distributed.destroy_process_group")
@replaces("torch.distributed.distributed_c10d.destroy_process_group")
def _running_what_was_recorded(destroy: Any) -> Any:
    def destroy_process_group(group: Any = None) -> None:
        if groups.members():
            sync(wait=True)
        try:
            destroy(group)
        finally:
            groups.forget(group)

    return destroy_process_group


@replaces("torch.nn.parallel.DistributedDataParallel.__init__")
def _refusing_unused(init: Any) -> Any:
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.device_type == "ltc" and (self.find_unused_parameters or self.static_graph):
            # The reducer copies from pinned memory, for which PyTorch asks the device's hooks in C++.
            raise GroupError(
                "DistributedDataParallel with find_unused_parameters or static_graph needs the extension in C++",
                source=str(current_source()),
                hint="build it: ltc build",
            )

    return checked


@replaces("torch.nn.SyncBatchNorm.forward")
def _refusing_cpu(forward: Any) -> Any:
    def checked(self: Any, input: torch.Tensor) -> Any:
        if input.device.type == "ltc" and settings.device_type == "cpu" and self.training and _has_peers(self):
            raise GroupError(
                "SyncBatchNorm needs kernels that PyTorch has for GPUs alone, and programs of ltc run on the CPU here",
                source=str(current_source()),
                hint="use BatchNorm2d, whose buffers DistributedDataParallel broadcasts, or GroupNorm",
            )
        return forward(self, input)

    return checked


def _has_peers(module: Any) -> bool:
    """True when the layer would talk to other ranks."""
    return dist.is_initialized() and dist.get_world_size(module.process_group) > 1


@registers(DISTRIBUTED_BACKEND)
def _register() -> Callable[[], None]:
    """Define the operators, register the backend, and the device's kernels of PyTorch's operators."""
    if not _libraries:
        collectives, library = define()
        kernels = torch.library.Library("c10d", "IMPL")
        _libraries.extend((library, kernels))
        module: Any = kernels.m
        implement = module.impl
        with warnings.catch_warnings():
            # PyTorch's own kernels for this key hand the tensors to a backend in C++.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for collective in collectives:
                implement(collective.name, "PrivateUse1", functools.partial(_kernel, collective), False)
            implement("barrier", "PrivateUse1", _barrier, False)
            implement("recv_any_source_", "PrivateUse1", _receive_from_any, False)
        register_backend("ltc", make_backend, devices=["ltc"])
    return lambda: None
