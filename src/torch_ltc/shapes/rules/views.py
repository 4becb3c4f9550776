"""Views: the same memory looked at in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec, make_spec, row_major
from torch_ltc.shapes.broadcasting import broadcast
from torch_ltc.shapes.table import list_of_views, require, rule, view, wrap

Sizes = Sequence[int]


def look(spec: Spec, size: Sizes, stride: Sizes, offset: int | None = None) -> Spec:
    """The geometry of a view."""
    return make_spec(spec.dtype, tuple(size), tuple(stride), spec.offset if offset is None else offset)


def _without_gap(spec: Spec, size: Sizes) -> tuple[int, ...]:
    """`size` with its one -1 worked out."""
    wanted = list(size)
    known = 1
    place = -1
    for i, length in enumerate(wanted):
        if length == -1:
            require(place < 0)
            place = i
        else:
            known *= length
    if place >= 0:
        require(known > 0 and spec.numel % known == 0)
        wanted[place] = spec.numel // known
        return tuple(wanted)
    require(known == spec.numel)
    return tuple(wanted)


def view_strides(spec: Spec, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides that show this memory in the wanted size, if there are any."""
    if spec.contiguous:
        return row_major(wanted)
    if not spec.size:
        return (1,) * len(wanted)
    strides = [0] * len(wanted)
    place = len(wanted) - 1
    base = spec.stride[-1]
    have = made = 1
    for i in range(len(spec.size) - 1, -1, -1):
        have *= spec.size[i]
        if i and (spec.size[i - 1] == 1 or spec.stride[i - 1] == have * base):
            continue
        # The end of a piece of memory that can be cut anew.
        while place >= 0 and (made < have or wanted[place] == 1):
            strides[place] = made * base
            made *= wanted[place]
            place -= 1
        if made != have:
            return None
        if i:
            base = spec.stride[i - 1]
            have = made = 1
    return tuple(strides) if place < 0 else None


@rule("view", "_unsafe_view")
def reshaped(spec: Spec, size: Sizes) -> Returns | None:
    """Another size."""
    wanted = _without_gap(spec, size)
    strides = view_strides(spec, wanted)
    return None if strides is None else view(look(spec, wanted, strides))


@rule("_reshape_alias")
def reshape_alias(spec: Spec, size: Sizes, stride: Sizes) -> Returns:
    """The geometry that is asked for."""
    return view(look(spec, size, stride))


@rule("as_strided")
def as_strided(spec: Spec, size: Sizes, stride: Sizes, offset: int | None) -> Returns:
    """The geometry that is asked for."""
    require(len(size) == len(stride) and min((*size, *stride, offset or 0, 0)) >= 0)
    return view(look(spec, size, stride, offset))


@rule("alias", "detach", "lift_fresh")
def alias(spec: Spec) -> Returns:
    """The same geometry."""
    return view(spec)


@rule("t")
def transposed(spec: Spec) -> Returns:
    """A matrix transposed; less than a matrix stays as it is."""
    require(len(spec.size) <= 2)
    return view(look(spec, spec.size[::-1], spec.stride[::-1]))


@rule("transpose.int")
def transpose(spec: Spec, first: int, second: int) -> Returns:
    """Two dimensions swapped."""
    size, stride = list(spec.size), list(spec.stride)
    first, second = wrap(first, len(size)), wrap(second, len(size))
    size[first], size[second] = size[second], size[first]
    stride[first], stride[second] = stride[second], stride[first]
    return view(look(spec, size, stride))


@rule("permute")
def permute(spec: Spec, order: Sizes) -> Returns:
    """Dimensions in another order."""
    rank = len(spec.size)
    places = [wrap(i, rank) for i in order]
    require(len(places) == rank and len(set(places)) == rank)
    return view(look(spec, [spec.size[i] for i in places], [spec.stride[i] for i in places]))


@rule("expand")
def expand(spec: Spec, size: Sizes, implicit: bool) -> Returns:
    """Dimensions of length 1 repeated."""
    lead = len(size) - len(spec.size)
    require(lead >= 0)
    wanted, strides = list(size), [0] * len(size)
    for i in range(len(size) - 1, -1, -1):
        have = spec.size[i - lead] if i >= lead else 1
        step = spec.stride[i - lead] if i >= lead else 0
        if i < lead:
            require(wanted[i] >= 0)
            # What PyTorch gives dimensions in front, which were not there.
            step = wanted[i + 1] * strides[i + 1] if spec.size else 0
        elif wanted[i] == -1:
            wanted[i] = have
        if have != wanted[i]:
            require(have == 1)
            step = 0
        strides[i] = step
    require(broadcast(tuple(wanted), spec.size) == tuple(wanted))
    return view(look(spec, wanted, strides))


@rule("select.int")
def select(spec: Spec, dimension: int, index: int) -> Returns:
    """One place of a dimension."""
    dimension = wrap(dimension, len(spec.size))
    index = wrap(index, spec.size[dimension])
    size = spec.size[:dimension] + spec.size[dimension + 1 :]
    stride = spec.stride[:dimension] + spec.stride[dimension + 1 :]
    return view(look(spec, size, stride, spec.offset + index * spec.stride[dimension]))


@rule("slice.Tensor")
def sliced(spec: Spec, dimension: int, start: int | None, end: int | None, step: int) -> Returns:
    """A stretch of a dimension."""
    dimension = wrap(dimension, len(spec.size))
    require(step > 0)
    begin, stop, _ = slice(start, end, step).indices(spec.size[dimension])
    length = max(0, (stop - begin + step - 1) // step)
    size, stride = list(spec.size), list(spec.stride)
    offset = spec.offset + begin * stride[dimension]
    size[dimension] = length
    stride[dimension] *= step
    return view(look(spec, size, stride, offset))


@rule("unsqueeze")
def unsqueeze(spec: Spec, dimension: int) -> Returns:
    """A new dimension of length 1."""
    dimension = wrap(dimension, len(spec.size) + 1)
    inside = dimension < len(spec.size)
    step = spec.size[dimension] * spec.stride[dimension] if inside else 1
    size = (*spec.size[:dimension], 1, *spec.size[dimension:])
    return view(look(spec, size, (*spec.stride[:dimension], step, *spec.stride[dimension:])))


@rule("squeeze", "squeeze.dim", "squeeze.dims")
def squeeze(spec: Spec, dimensions: Any = None) -> Returns:
    """Without dimensions of length 1."""
    rank = len(spec.size)
    if dimensions is None:
        chosen = set(range(rank))
    else:
        require(rank)
        given = (dimensions,) if isinstance(dimensions, int) else dimensions
        chosen = {wrap(i, rank) for i in given}
        require(len(chosen) == len(given))
    kept = [i for i in range(rank) if spec.size[i] != 1 or i not in chosen]
    return view(look(spec, [spec.size[i] for i in kept], [spec.stride[i] for i in kept]))


def parts(spec: Spec, dimension: int, lengths: Sizes) -> list[Spec]:
    """Views of these lengths, one after the other."""
    offset, found = spec.offset, []
    for length in lengths:
        size = (*spec.size[:dimension], length, *spec.size[dimension + 1 :])
        found.append(look(spec, size, spec.stride, offset))
        offset += length * spec.stride[dimension]
    return found


@rule("split.Tensor", "unsafe_split.Tensor")
def split(spec: Spec, length: int, dimension: int) -> Returns:
    """Parts of one length; the last may be shorter."""
    dimension = wrap(dimension, len(spec.size))
    require(length > 0)
    total = spec.size[dimension]
    return list_of_views(parts(spec, dimension, [min(length, total - i) for i in range(0, total, length)]))


@rule("split_with_sizes", "unsafe_split_with_sizes")
def split_with_sizes(spec: Spec, lengths: Sizes, dimension: int) -> Returns:
    """Parts of these lengths."""
    dimension = wrap(dimension, len(spec.size))
    require(sum(lengths) == spec.size[dimension] and min(lengths) >= 0)
    return list_of_views(parts(spec, dimension, lengths))


@rule("unbind.int")
def unbind(spec: Spec, dimension: int) -> Returns:
    """All places of a dimension."""
    dimension = wrap(dimension, len(spec.size))
    size = spec.size[:dimension] + spec.size[dimension + 1 :]
    stride = spec.stride[:dimension] + spec.stride[dimension + 1 :]
    step = spec.stride[dimension]
    return list_of_views(look(spec, size, stride, spec.offset + i * step) for i in range(spec.size[dimension]))
