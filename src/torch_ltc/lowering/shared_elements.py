"""Which elements of tensors share memory: whether a write to one shows in another, where kernels go one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.lowering.program_builder import hints_of

# The width of a step, the fewest and the most of them.
_Steps = tuple[int, int, int]
# Larger tensors that lie in one another in different orders are taken to share elements.
_MOST_ELEMENTS = 1 << 16


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """True when two elements may lie at one place, as those of `expand`, `unfold` and `as_strided`. Sizes may be
    symbols: then the answer is a guard."""
    strides: Sequence[Any] = tensor.stride()
    sizes: Sequence[Any] = tensor.size()
    widths, steps = hints_of(sizes), hints_of(strides)
    if 0 in widths:
        return False
    reach: Any = 0
    for d in sorted(range(len(steps)), key=lambda d: (steps[d], widths[d])):
        if widths[d] == 1:
            continue
        if not strides[d] > reach:
            return True
        reach += (sizes[d] - 1) * strides[d]
    return False


def reads_what_it_writes(args: Sequence[Any], written: Sequence[int], in_order: bool) -> bool:
    """True for a call that may take elements of a tensor after it wrote to them, at other places: the functional form
    has the old ones there. `written` are positions; with `in_order` element after element of the target is made, each
    of those at its place."""
    return any(_crosses(target, other, in_order) for target, other in _pairs(args, written))


def _pairs(args: Sequence[Any], written: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor that is written to, with each other one of the same call; of lists with those at its place."""
    for position in written:
        targets = args[position]
        for place, target in enumerate(targets if isinstance(targets, list) else [targets]):
            for value in args:
                other = value[place : place + 1] if isinstance(value, list) and isinstance(targets, list) else value
                for item in other if isinstance(other, list) else [other]:
                    if isinstance(item, torch.Tensor) and isinstance(target, torch.Tensor) and item is not target:
                        yield target, item


@dataclass(frozen=True, slots=True)
class _Layout:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


def _crosses(target: torch.Tensor, other: torch.Tensor, in_order: bool) -> bool:
    if target.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    count = max(target.dim(), other.dim())
    first, second = _layout(target, count), _layout(other, count)
    if first == second or first.end <= second.offset or second.end <= first.offset:
        return False
    if 0 in first.size or 0 in second.size:
        return False
    in_order = in_order and all(m in (1, n) for n, m in zip(first.size, second.size, strict=True))
    dims = list(zip(first.size, second.size, first.stride, second.stride, strict=True))
    if any(n > 1 and m > 1 and s != t for n, m, s, t in dims):
        return _meet(first, second, in_order)
    if in_order and first.size == second.size and second.offset > first.offset:
        # Each is read before it is written to.
        return False
    steps = [(s if n > 1 else t, 1 - m, n - 1) for n, m, s, t in dims if n > 1 or m > 1]
    return _reachable(second.offset - first.offset, sorted(steps, reverse=True))


def _layout(tensor: torch.Tensor, count: int) -> _Layout:
    """Plain numbers, with leading dimensions of one element up to `count`. With symbols their values become guards."""
    size, stride = (tuple(map(int, items)) for items in (tensor.size(), tensor.stride()))
    missing = count - len(size)
    return _Layout((1,) * missing + size, (0,) * missing + stride, int(tensor.storage_offset()))


def _reachable(distance: int, steps: Sequence[_Steps]) -> bool:
    """True when steps of these widths, of each as many as it allows, may come to `distance`. Widest first."""
    if not steps:
        return distance == 0
    (width, fewest, most), *narrower = steps
    if width == 0:
        return _reachable(distance, narrower)
    low = sum(w * few for w, few, _ in narrower)
    high = sum(w * many for w, _, many in narrower)
    first, last = max(fewest, -((high - distance) // width)), min(most, (distance - low) // width)
    return any(_reachable(distance - n * width, narrower) for n in range(first, last + 1))


def _meet(first: _Layout, second: _Layout, in_order: bool) -> bool:
    """As `_reachable`, for layouts of other strides, element by element."""
    if max(math.prod(first.size), math.prod(second.size)) > _MOST_ELEMENTS:
        return True
    order = sorted(range(len(first.size)), key=lambda d: -first.stride[d])
    read = _addresses(second, order, first.size if in_order else second.size)
    written = {address: place for place, address in enumerate(_addresses(first, order, first.size))}
    if not in_order:
        return not written.keys().isdisjoint(read)
    return any(written.get(address, place) < place for place, address in enumerate(read))


def _addresses(layout: _Layout, order: Sequence[int], size: Sequence[int]) -> list[int]:
    """Where the elements lie, repeated up to `size`, with the dimensions nested in this order."""
    found = [layout.offset]
    for d in order:
        step = layout.stride[d] if layout.size[d] > 1 else 0
        found = [address + step * i for address in found for i in range(size[d])]
    return found
