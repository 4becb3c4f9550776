"""Private interfaces of `torch.distributed` under names of our own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Work

from torch_ltc.pytorch.private import all_schemas

__all__ = ["PREMULTIPLIED_SUM", "ProcessGroup", "box_work", "collective_schemas", "make_group", "make_nccl"]
__all__ += ["backend_of", "group_store", "has_cpu", "reduction_of", "register_backend", "unbox_group", "unbox_work"]

register_backend: Callable[..., None] = dist.Backend.register_backend
# The objects of C++ that operators take and return, and the Python objects that stand for them.
unbox_group: Callable[[Any], ProcessGroup] = ProcessGroup.unbox
unbox_work: Callable[[Any], Work] = Work.unbox
_work_from: Callable[[Any], Any] = c10d._create_work_from_future  # type: ignore[attr-defined]
_make_group: Any = ProcessGroup


def collective_schemas() -> list[Any]:
    """The schemas of the operators that every process group calls."""
    return [schema for schema in all_schemas() if schema.name.startswith("c10d::")]


def box_work(result: object) -> Any:
    """The handle of a collective that need not be waited for; its future has this result."""
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(result)
    return _work_from(done).boxed()


def reduction_of(boxed: Any) -> int:
    """The number of a reduction: sum, average, ..."""
    unbox = getattr(ReduceOp, "unbox", None)
    return int(boxed.op()) if unbox is None else int(unbox(boxed).op)


_KINDS: Any = ReduceOp.RedOpType
PREMULTIPLIED_SUM = int(_KINDS.PREMUL_SUM)


def make_group(rank: int, size: int, backend: Any, devices: tuple[str, ...]) -> ProcessGroup:
    """A group of one backend, for tensors of these devices."""
    group = _make_group(rank, size)
    kind = ProcessGroup.BackendType.NCCL if "cpu" not in devices else ProcessGroup.BackendType.GLOO
    # First: PyTorch warns of a group without one when a backend is registered.
    group._set_default_backend(kind)
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)
    made: ProcessGroup = group
    return made


def make_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """NCCL's backend, with this timeout."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def group_store(group: ProcessGroup) -> Any:
    """The store that the ranks of a group share."""
    typed: Any = group
    return typed.get_group_store()


def has_cpu(group: ProcessGroup) -> bool:
    """True for a group that has a backend for tensors of the CPU."""
    typed: Any = group
    return any(device.type == "cpu" for device in typed._device_types)


def backend_of(group: ProcessGroup) -> Any:
    """What was made for the device when the group was, or None."""
    try:
        return group._get_backend(torch.device("ltc"))
    except RuntimeError:
        return None
