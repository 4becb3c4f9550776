"""Shape of a tensor as plain, interned data.

A `Spec` is everything about a tensor but its memory: dtype, sizes, strides, storage offset and the two lazy bits
(conjugate, negative). Equal specs are one object, so that they compare by identity on the recording path.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_USUAL = frozenset((*_FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_MOST_DIMENSIONS = 64
_SpecKey = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, bool, bool]


class Spec:
    """One tensor shape. Make it with `spec_of` or `make_spec`; never directly, or identity comparison breaks."""

    # A plain slots class: it is built on every recording miss, and a frozen dataclass costs several times as much.
    __slots__ = (
        "dtype",
        "size",
        "stride",
        "offset",
        "conj",
        "neg",
        "contiguous",
        "plain",
        "native",
        "_extent",
        "_covers",
    )

    def __init__(self, key: _SpecKey) -> None:
        self.dtype, self.size, self.stride, self.offset, self.conj, self.neg = key
        # The same in C++, which holds this one in turn; made when the hit path first needs it.
        self.native: Any = None
        # Asked of every result at every run, computed when first asked for; -1 and None before.
        self._extent = -1
        self._covers: bool | None = None
        # "contiguous" as the fast tensor constructor sees it: row-major strides that multiply the sizes as they are.
        self.contiguous = self.offset == 0 and self.stride == row_major(self.size) and not (self.conj or self.neg)
        # "plain": it has elements, they are as they lie in memory, and most kernels take their dtype and number of
        # dimensions.
        usual = self.dtype in _USUAL and len(self.size) <= _MOST_DIMENSIONS
        self.plain = usual and not (self.conj or self.neg or 0 in self.size)

    @property
    def key(self) -> _SpecKey:
        """The plain tuple behind this spec."""
        return (self.dtype, self.size, self.stride, self.offset, self.conj, self.neg)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.size:
            count *= length
        return count

    def extent(self) -> int:
        """Number of storage elements that a tensor of this spec reaches, its offset included."""
        if self._extent < 0:
            reach = [(n - 1) * s for n, s in zip(self.size, self.stride, strict=True)]
            self._extent = self.offset if 0 in self.size else self.offset + 1 + sum(reach)
        return self._extent

    def covers_storage(self) -> bool:
        """True when the elements fill a storage from offset 0 without holes or overlap."""
        if self._covers is None:
            self._covers = self.offset == 0 and self.extent() == self.numel and not self.overlaps_itself()
        return self._covers

    def overlaps_itself(self) -> bool:
        """True when two elements certainly share one memory location (a stride of 0, as `expand` makes)."""
        return any(n > 1 and s == 0 for n, s in zip(self.size, self.stride, strict=True)) and 0 not in self.size

    def __repr__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.size))}]"
        if not self.contiguous:
            text += f" stride=({','.join(map(str, self.stride))})"
            if self.offset:
                text += f" offset={self.offset}"
            text += " conj" if self.conj else ""
            text += " neg" if self.neg else ""
        return text


_interned: dict[_SpecKey, Spec] = {}


def row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense row-major tensor of `size`, zero sizes multiplied as they are."""
    strides = [1] * len(size)
    step = 1
    for i in range(len(size) - 1, -1, -1):
        strides[i] = step
        step *= size[i]
    return tuple(strides)


def contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides PyTorch gives a fresh contiguous tensor of `size` (zero sizes count as one)."""
    return row_major(tuple(max(length, 1) for length in size))


def make_spec(
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
    conj: bool = False,
    neg: bool = False,
) -> Spec:
    """The interned spec of these sizes, strides and so on."""
    key = (dtype, size, stride, offset, conj, neg)
    spec = _interned.get(key)
    if spec is None:
        spec = _interned.setdefault(key, Spec(key))
    return spec


def spec_of(tensor: torch.Tensor) -> Spec:
    """The interned spec of this tensor."""
    offset: Any = tensor.storage_offset()
    size, stride, conj, neg = tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()
    # A torch.Size is found under the plain tuple that equals it, but must not become part of a spec.
    spec = _interned.get((tensor.dtype, size, stride, offset, conj, neg))
    return make_spec(tensor.dtype, tuple(size), stride, offset, conj, neg) if spec is None else spec


_swept_to = 0
"""How many specs the last sweep has left: they are looked at again when there are twice as many."""


def keep_bounded(bound: int) -> None:
    """Forget specs that nobody holds, once there are more than `bound`, and twice as many as were held before."""
    global _swept_to
    if len(_interned) <= max(bound, 2 * _swept_to):
        return
    specs = list(_interned.values())
    for spec in specs:
        if spec.native is not None and not spec.native.is_used():
            spec.native = None
    _interned.clear()
    _interned.update((spec.key, spec) for spec in held_elsewhere(specs))
    _swept_to = len(_interned)


def interned_count() -> int:
    """The number of distinct specs that are kept."""
    return len(_interned)


def _counts(items: list[Item]) -> list[int]:
    count = sys.getrefcount
    return [count(item) for item in items]


# The count of an object that only the list holds: measured, because interpreters differ in what they count.
_LIST_ALONE = _counts([object()])[0]


def held_elsewhere(items: list[Item]) -> list[Item]:
    """The items that something besides this list holds. They must be in no other list of the caller's."""
    return [item for item, count in zip(items, _counts(items), strict=True) if count > _LIST_ALONE]
