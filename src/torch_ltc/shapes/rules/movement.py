"""Data that moves: joining, choosing, counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.shapes.table import NoRule, fresh, fresh_contiguous, require, rule, view, wrap

Sizes = Sequence[int]


@rule("cat")
def cat(parts: Sequence[Spec], dimension: int) -> Returns:
    """Tensors one after the other."""
    # A vector without elements may stand beside anything.
    joined = [part for part in parts if part.size != (0,)]
    require(joined)
    first = joined[0]
    dimension = wrap(dimension, len(first.size))
    before, after = first.size[:dimension], first.size[dimension + 1 :]
    length = 0
    for part in joined:
        size = part.size
        require(part.dtype is first.dtype and part.plain and len(size) == len(first.size))
        require(size[:dimension] == before and size[dimension + 1 :] == after)
        require(part.contiguous or _is_no_image(part))
        length += size[dimension]
    require(all(part.dtype is first.dtype for part in parts))
    return fresh_contiguous(first.dtype, (*before, length, *after))


def _is_no_image(spec: Spec) -> bool:
    """True when channels certainly do not lie next to each other."""
    if len(spec.size) not in (4, 5):
        return True
    return spec.stride[-1] == 1 and spec.size[-1] > 1 and spec.size[1] > 1 and spec.stride[1] > 1


@rule("_padded_dense_to_jagged_forward")
def padded_dense_to_jagged(padded: Spec, offsets: Sequence[Spec], total: int | None) -> Returns:
    """Sequences one after the other without their padding; the offsets must end with the total, which is data."""
    if total is None or total < 0:
        raise NoRule
    require(len(offsets) == 1 and len(padded.size) >= 2)
    require(offsets[0].size == (padded.size[0] + 1,) and offsets[0].dtype in (torch.int32, torch.int64))
    return fresh_contiguous(padded.dtype, (total, *padded.size[2:]))


@rule("stack")
def stack(parts: Sequence[Spec], dimension: int) -> Returns:
    """Tensors along a new dimension."""
    first = parts[0]
    dimension = wrap(dimension, len(first.size) + 1)
    require(first.contiguous and all(part is first for part in parts))
    return fresh_contiguous(first.dtype, (*first.size[:dimension], len(parts), *first.size[dimension:]))


@rule("gather")
def gather(spec: Spec, dimension: int, index: Spec, sparse: bool) -> Returns:
    """An element for each index."""
    rank = len(spec.size)
    require(rank and len(index.size) == rank and index.dtype is torch.int64 and index.contiguous)
    dimension = wrap(dimension, rank)
    require(all(index.size[i] <= spec.size[i] for i in range(rank) if i != dimension))
    return fresh_contiguous(spec.dtype, index.size)


@rule("index.Tensor")
def index_rows(spec: Spec, indices: Sequence[Spec | None]) -> Returns:
    """Rows by one tensor of indices."""
    require(spec.contiguous and len(spec.size) >= 1 and len(indices) == 1)
    index = indices[0]
    require(index is not None and index.dtype is torch.int64 and index.contiguous)
    assert index is not None
    return fresh_contiguous(spec.dtype, (*index.size, *spec.size[1:]))


# Loops over elements and rows call these two with another number each time: half the time of the meta kernel.
@rule("select.int")
def select(spec: Spec, dimension: int, index: int) -> Returns:
    """One position of a dimension."""
    size, stride = spec.size, spec.stride
    require(spec.plain)
    dimension = wrap(dimension, len(size))
    offset = spec.offset + wrap(index, size[dimension]) * stride[dimension]
    after = dimension + 1
    return view(make_spec(spec.dtype, size[:dimension] + size[after:], stride[:dimension] + stride[after:], offset))


@rule("slice.Tensor")
def slice_positions(spec: Spec, dimension: int, start: int | None, end: int | None, step: int) -> Returns:
    """Some positions of a dimension."""
    size, stride = spec.size, spec.stride
    require(spec.plain and step > 0)
    dimension = wrap(dimension, len(size))
    positions = range(*slice(start, end, step).indices(size[dimension]))
    offset = spec.offset + positions.start * stride[dimension]
    after = dimension + 1
    sizes = (*size[:dimension], len(positions), *size[after:])
    return view(make_spec(spec.dtype, sizes, (*stride[:dimension], stride[dimension] * step, *stride[after:]), offset))


@rule("slice_backward")
def slice_backward(gradient: Spec, size: Sizes, dimension: int, start: int, end: int, step: int) -> Returns:
    """The gradient where the slice was, zeros elsewhere."""
    dimension = wrap(dimension, len(size))
    require(step > 0)
    length = len(range(*slice(start, end, step).indices(size[dimension])))
    require(gradient.size == (*size[:dimension], length, *size[dimension + 1 :]))
    return fresh_contiguous(gradient.dtype, size)


@rule("select_backward")
def select_backward(gradient: Spec, size: Sizes, dimension: int, index: int) -> Returns:
    """The gradient where the choice was, zeros elsewhere."""
    dimension = wrap(dimension, len(size))
    wrap(index, size[dimension])
    require(gradient.size == (*size[:dimension], *size[dimension + 1 :]))
    return fresh_contiguous(gradient.dtype, size)


@rule("tril", "triu")
def triangle(spec: Spec, diagonal: int) -> Returns:
    """One half of a matrix."""
    require(spec.contiguous and len(spec.size) >= 2)
    return fresh(spec)


@rule("flip")
def flip(spec: Spec, dimensions: Sizes) -> Returns:
    """Dimensions turned round."""
    require(spec.contiguous and spec.size)
    require(len({wrap(i, len(spec.size)) for i in dimensions}) == len(dimensions))
    return fresh(spec)


@rule("repeat")
def repeat(spec: Spec, repeats: Sizes) -> Returns:
    """The tensor several times."""
    lead = len(repeats) - len(spec.size)
    require(lead >= 0 and min(repeats, default=1) > 0)
    size = (*(1 for _ in range(lead)), *spec.size)
    return fresh_contiguous(spec.dtype, [n * times for n, times in zip(size, repeats, strict=True)])


@rule("arange", "arange.start", "arange.start_step")
def arange(*args: Any) -> Returns:
    """Whole numbers in order."""
    *bounds, dtype, layout, _, _ = args
    require(all(type(bound) is int for bound in bounds) and 0 not in bounds[2:])
    require(dtype in (None, torch.int64) and layout in (None, torch.strided))
    return fresh_contiguous(torch.int64, (len(range(*bounds)),))
