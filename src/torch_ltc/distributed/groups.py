"""Process groups of the physical device, by the name of the group that the user made."""

from __future__ import annotations

from collections import Counter
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
)
from torch_ltc.record.call_site import current_source

_WORD = "why not"
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
class Note:
    """Texts in a group's store. Reading waits for nobody."""

    store: Any

    def write(self, key: str, text: str) -> None:
        """Write a text for the other ranks."""
        self.store.set(key, text)

    def read(self, key: str) -> str | None:
        """The text, if there is one."""
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else None

    def leave_word(self, text: str) -> None:
        """Say why this rank does not go on."""
        self.write(_WORD, text)

    def word(self) -> str | None:
        """What another rank has said so."""
        return self.read(_WORD)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A group as the user has it, and the one that runs its collectives."""

    group: ProcessGroup
    physical: ProcessGroup
    on_host: bool
    """True when it moves memory of the host alone."""


class Groups:
    """Physical groups by name: the name is part of the recorded program, the group is not."""

    def __init__(self) -> None:
        self._pairs: dict[str, _Pair] = {}
        # How many groups of each name there were: the same on all ranks.
        self._made: Counter[str] = Counter()

    def name_of(self, group: ProcessGroup) -> str:
        """The name under which the physical group is known from now on."""
        name = str(group.group_name)
        pair = self._pairs.get(name)
        if pair is None or pair.group is not group:
            # A group of the same name may have been destroyed.
            self._pairs[name] = _Pair(group, *self._physical(group))
            self._made[name] += 1
        return name

    def physical(self, name: str) -> ProcessGroup:
        """The group that runs the collectives of the group of this name."""
        pair = self._pairs.get(name)
        if pair is None:
            raise GroupError(f"the process group {name!r} has been destroyed", hint="sync before it is destroyed")
        return pair.physical

    def is_on_host(self, name: str) -> bool:
        """True when the group of this name moves memory of the host alone."""
        return name in self._pairs and self._pairs[name].on_host

    def members(self) -> list[tuple[str, ProcessGroup]]:
        """All groups that a collective was recorded on, with their names."""
        return [(name, pair.physical) for name, pair in self._pairs.items()]

    def notes(self, name: str) -> Note:
        """What the ranks of a group can read of each other."""
        return Note(dist.PrefixStore(f"ltc ranks {self._made[name]}", group_store(self._pairs[name].group)))

    def word_of_others(self, name: str) -> str | None:
        """Why another rank does not go on, if it has said so."""
        try:
            return self.notes(name).word()
        except Exception:
            # The store may be gone with the rank that had it.
            return None

    def forget(self, group: ProcessGroup | None) -> None:
        """Let go of a group, or of all."""
        kept = {} if group is None else {name: pair for name, pair in self._pairs.items() if pair.group is not group}
        self._pairs = kept

    def _physical(self, group: ProcessGroup) -> tuple[ProcessGroup, bool]:
        backend = backend_of(group)
        if backend is None:
            raise GroupError(
                f"the process group {str(group.group_name)!r} was made for other devices than ltc",
                source=str(current_source(2)),
                hint=_HINT,
            )
        on_host = isinstance(backend, dist.ProcessGroupGloo)
        return make_group(group.rank(), group.size(), backend, ("cpu", "cuda") if on_host else ("cuda",)), on_host


groups = Groups()
