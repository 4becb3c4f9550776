"""Passes over all buffers of a program, which every execution makes: in C++ where the extension is there."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.native.library import extension
from torch_ltc.pytorch.private import data_pointer
from torch_ltc.record.buffer import Buffer

__all__ = ["Addresses", "plain_data", "renew", "set_jobs", "set_makers"]

_PLAIN = frozenset((torch.Tensor,))
_data, _error, _spec = operator.attrgetter("data"), operator.attrgetter("error"), operator.attrgetter("spec")


def plain_data(entry: CachedProgram, buffers: list[Buffer]) -> list[Any] | None:
    """The tensors that stand for the inputs of a program; None unless each is the whole of its buffer, a tensor, and
    not lost."""
    if extension is not None:
        found: list[Any] | None = extension.plain_data(buffers, entry.input_buffers, entry.input_specs)
        return found
    inputs = [buffers[position] for position in entry.input_buffers]
    held = list(map(_data, inputs))
    plain = (
        _PLAIN.issuperset(map(type, held))
        and not any(map(_error, inputs))
        and all(map(operator.is_, map(_spec, inputs), entry.input_specs))
    )
    return held if plain else None


def set_jobs(buffers: list[Buffer], job: Any) -> None:
    """The job that defines these buffers, or writes to them."""
    if extension is not None:
        extension.set_jobs(buffers, job)
        return
    for buffer in buffers:
        buffer.job = job


def set_makers(entry: CachedProgram, outputs: list[Buffer]) -> None:
    """Tell the outputs of a program what makes them."""
    if extension is not None:
        extension.set_makers(outputs, entry.origins)
        return
    for buffer, origin in zip(outputs, entry.origins, strict=True):
        buffer.maker = origin


def renew(last: list[weakref.ref[Buffer]], outputs: list[Buffer]) -> list[weakref.ref[Buffer]]:
    """Let `last` refer to these outputs; what it referred to before where that was another one."""
    if not last:
        last[:] = [weakref.ref(buffer) for buffer in outputs]
        return []
    if extension is not None:
        replaced: list[weakref.ref[Buffer]] = extension.renew(last, outputs)
        return replaced
    previous = []
    for position, (old, new) in enumerate(zip(last, outputs, strict=True)):
        if old() is not new:
            previous.append(old)
            last[position] = weakref.ref(new)
    return previous


class Addresses:
    """Where the tensors at some positions of a list lie."""

    __slots__ = ("_positions", "_expected", "_native")

    def __init__(self, tensors: list[Any], positions: Sequence[int]) -> None:
        self._positions = list(positions)
        self._native = None if extension is None else extension.Addresses(tensors, self._positions)
        self._expected = [data_pointer(tensors[position]) for position in self._positions]

    def same(self, tensors: list[Any]) -> bool:
        """True when they lie there in this list, too."""
        if self._native is not None:
            return bool(self._native.same(tensors))
        return [data_pointer(tensors[position]) for position in self._positions] == self._expected
