"""Process groups of the physical device, by the name of the group that the user made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_ltc.config import settings
from torch_ltc.errors import GroupError
from torch_ltc.pytorch.distributed import (
    ProcessGroup,
    backend_of,
    group_store,
    make_group,
    make_nccl,
    timeout_of,
)
from torch_ltc.record.call_site import current_source

_HINT = 'init_process_group("ltc"), or "cpu:gloo,ltc:ltc" for tensors of the CPU too'


def make_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """What moves the data of the physical device between processes: NCCL between GPUs, else gloo."""
    if _uses_nccl(size):
        torch.cuda.set_device(settings.device_ordinal)
        return make_nccl(store, rank, size, timeout)
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _uses_nccl(size: int) -> bool:
    """NCCL takes one process per GPU: where several share one, gloo copies through the host's memory."""
    if settings.device_type != "cuda" or not dist.is_nccl_available():
        return False
    return size == 1 or torch.cuda.device_count() > 1


@dataclass(frozen=True, slots=True)
class _Pair:
    """A group as the user has it, and the one that runs its collectives."""

    group: ProcessGroup
    physical: ProcessGroup


class Groups:
    """Physical groups by name: the name is part of the recorded program, the group is not."""

    def __init__(self) -> None:
        self._pairs: dict[str, _Pair] = {}

    def name_of(self, group: ProcessGroup) -> str:
        """The name under which the physical group is known from now on."""
        name = str(group.group_name)
        pair = self._pairs.get(name)
        if pair is None or pair.group is not group:
            # A group of the same name may have been destroyed.
            self._pairs[name] = _Pair(group, self._physical(group))
        return name

    def physical(self, name: str) -> ProcessGroup:
        """The group that runs the collectives of the group of this name."""
        pair = self._pairs.get(name)
        if pair is None:
            raise GroupError(f"the process group {name!r} has been destroyed", hint="sync before it is destroyed")
        return pair.physical

    def members(self) -> list[tuple[str, ProcessGroup]]:
        """All groups that a collective was recorded on, with their names."""
        return [(name, pair.physical) for name, pair in self._pairs.items()]

    def make_side_group(self, name: str) -> Any:
        """A gloo backend between the same ranks, for small data of the host. All of them must ask for it."""
        group = self._pairs[name].group
        store = dist.PrefixStore(f"ltc side of {name}", group_store(group))
        return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout_of(backend_of(group)))

    def forget(self, group: ProcessGroup | None) -> None:
        """Let go of a group, or of all."""
        kept = {} if group is None else {name: pair for name, pair in self._pairs.items() if pair.group is not group}
        self._pairs = kept

    def _physical(self, group: ProcessGroup) -> ProcessGroup:
        backend = backend_of(group)
        if backend is None:
            raise GroupError(
                f"the process group {str(group.group_name)!r} was made for other devices than ltc",
                source=str(current_source(2)),
                hint=_HINT,
            )
        devices = ("cpu", "cuda") if isinstance(backend, dist.ProcessGroupGloo) else ("cuda",)
        return make_group(group.rank(), group.size(), backend, devices)


groups = Groups()
