"""Broadcasting, promotion of dtypes, and the strides that elementwise kernels give their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.program.spec import Spec, row_major
from torch_ltc.shapes.table import NoRule, require

_SMALL_HALF = 65_504.0
_LARGEST = {torch.float32: 3.4e38, torch.float64: 1.7e308, torch.bfloat16: 3.3e38, torch.float16: _SMALL_HALF}
_INTEGERS = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}
_promoted: dict[tuple[Any, ...], torch.dtype] = {}


def broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """The common size of two tensors."""
    if first == second or not second:
        return first
    if not first:
        return second
    if len(first) < len(second):
        first, second = second, first
    lead = len(first) - len(second)
    sizes = list(first)
    for i, length in enumerate(second, lead):
        have = sizes[i]
        if have != length:
            if have == 1:
                sizes[i] = length
            elif length != 1:
                raise NoRule
    return tuple(sizes)


def is_contiguous(spec: Spec) -> bool:
    """True for row-major tensors as PyTorch sees them: strides of dimensions of length 1 do not count."""
    if spec.contiguous:
        return True
    step = 1
    for length, stride in zip(reversed(spec.size), reversed(spec.stride), strict=True):
        if length != 1:
            if stride != step:
                return False
            step *= length
    return True


def is_channels_last(spec: Spec) -> bool:
    """True for images whose channels lie next to each other, as PyTorch sees them."""
    rank = len(spec.size)
    if rank not in (4, 5):
        return False
    step = 1
    for i in (1, *range(rank - 1, 1, -1), 0):
        if spec.size[i] != 1:
            if spec.stride[i] != step:
                return False
            step *= spec.size[i]
    return True


def is_dense(spec: Spec) -> bool:
    """True when the elements fill a piece of memory without holes or overlap, in any order."""
    if spec.contiguous:
        return True
    step = 1
    for stride, length in sorted((s, n) for s, n in zip(spec.stride, spec.size, strict=True) if n != 1):
        if stride != step:
            return False
        step *= length
    return True


def fits(number: Any, dtype: torch.dtype) -> bool:
    """True when a Python number is certainly accepted where a value of this dtype is meant."""
    kind = type(number)
    if kind is bool:
        return True
    if kind is int:
        limits = _INTEGERS.get(dtype)
        if limits is not None:
            return bool(limits[0] <= number <= limits[1])
    elif kind is not float:
        return False
    largest = _LARGEST.get(dtype)
    return largest is not None and bool(-largest <= number <= largest)


def promoted(first: Any, second: Any) -> torch.dtype:
    """The dtype in which two operands meet, each a `Spec` or a Python number, one of them a `Spec`."""
    if not isinstance(first, Spec):
        return with_number(second.dtype, first)
    if not isinstance(second, Spec):
        return with_number(first.dtype, second)
    if first.dtype is second.dtype:
        return first.dtype
    key = (first.dtype, not first.size, second.dtype, not second.size)
    found = _promoted.get(key)
    if found is None:
        found = _promoted[key] = torch.result_type(_stand_in(first), _stand_in(second))
    return found


def with_number(dtype: torch.dtype, number: Any) -> torch.dtype:
    """The dtype in which a tensor and a Python number meet."""
    kind = type(number)
    if dtype.is_floating_point or (kind is int and dtype is not torch.bool):
        found = dtype
    elif kind is bool:
        return dtype
    else:
        # What a float makes of integers is a setting of PyTorch.
        key = (dtype, kind, torch.get_default_dtype())
        kept = _promoted.get(key)
        if kept is None:
            kept = _promoted[key] = torch.result_type(torch.zeros(1, dtype=dtype), number)
        found = kept
    if not fits(number, found):
        raise NoRule
    return found


def _stand_in(spec: Spec) -> torch.Tensor:
    return torch.zeros(1 if spec.size else (), dtype=spec.dtype)


def elementwise_strides(size: tuple[int, ...], operands: Sequence[Spec]) -> tuple[int, ...]:
    """The strides that PyTorch's TensorIterator gives the result of these operands, which broadcast to `size`."""
    # Not torch._prims_common.compute_elementwise_output_strides: it takes 35 us where this takes 9, and imports SymPy.
    if all(is_row_major(operand) for operand in operands):
        return row_major(size)
    first = operands[0]
    if len(operands) > 1 and all(operand.size == size and is_contiguous(operand) for operand in operands):
        # No operand is broadcast, and all are row-major as PyTorch sees them: it lays the result out anew.
        require(all(operand.dtype is first.dtype for operand in operands))
        return row_major(size)
    # Where dtypes differ, some operands are cast before, which may change their layout.
    require(all(operand.dtype is first.dtype and not is_odd(operand) for operand in operands))
    if all(operand.size == size for operand in operands):
        if all(is_channels_last(operand) for operand in operands):
            return _in_order(size, (1, *range(len(size) - 1, 1, -1), 0))
        if all(operand.stride == first.stride for operand in operands) and is_dense(first):
            return first.stride
    return _in_order(size, _iteration_order(size, [_expanded(size, operand) for operand in operands]))


def is_row_major(spec: Spec) -> bool:
    """True when the strides are exactly those of a new tensor."""
    return spec.contiguous or spec.stride == row_major(spec.size)


def is_odd(spec: Spec) -> bool:
    """True for row-major tensors but for dimensions of length 1: kernels keep their strides or make them anew."""
    return is_contiguous(spec) and not is_row_major(spec)


def _expanded(size: tuple[int, ...], operand: Spec) -> tuple[int, ...]:
    lead = len(size) - len(operand.size)
    strides = [0] * lead
    for have, wanted, stride in zip(operand.size, size[lead:], operand.stride, strict=True):
        strides.append(0 if have == 1 and wanted != 1 else stride)
    return tuple(strides)


def _iteration_order(size: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[int]:
    """Dimensions from the innermost to the outermost: an insertion sort in which some dimensions cannot be told."""
    order = list(range(len(size) - 1, -1, -1))
    for i in range(1, len(order)):
        inner = i
        for outer in range(i - 1, -1, -1):
            comparison = _compare(size, strides, order[outer], order[inner])
            if comparison > 0:
                order[outer], order[inner] = order[inner], order[outer]
                inner = outer
            elif comparison < 0:
                break
    return order


def _compare(size: tuple[int, ...], strides: list[tuple[int, ...]], first: int, second: int) -> int:
    for stride in strides:
        one, other = stride[first], stride[second]
        if one == 0 or other == 0:
            continue
        if one != other:
            return -1 if one < other else 1
        if size[first] > size[second]:
            return 1
    return 0


def _in_order(size: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    strides = [0] * len(size)
    step = 1
    for i in order:
        strides[i] = step
        step *= size[i]
    return tuple(strides)
