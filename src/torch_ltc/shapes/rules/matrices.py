"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec
from torch_ltc.shapes.broadcasting import broadcast, fits, is_contiguous, is_row_major
from torch_ltc.shapes.table import contiguous, fresh_contiguous, require, rule, several


def product(first: Spec, second: Spec, rank: int) -> tuple[int, ...]:
    """The size of a product of matrices, or of batches of them."""
    require(len(first.size) == rank and len(second.size) == rank and first.dtype is second.dtype)
    require(first.size[-1] == second.size[-2] and first.size[:-2] == second.size[:-2])
    require(first.dtype.is_floating_point)
    return (*first.size[:-1], second.size[-1])


@rule("mm")
def mm(first: Spec, second: Spec) -> Returns:
    """A product of two matrices."""
    return fresh_contiguous(first.dtype, product(first, second, 2))


@rule("bmm")
def bmm(first: Spec, second: Spec) -> Returns:
    """Products of batches of matrices."""
    return fresh_contiguous(first.dtype, product(first, second, 3))


def _added(start: Spec, first: Spec, second: Spec, rank: int, beta: Any, alpha: Any) -> Returns:
    size = product(first, second, rank)
    require(start.dtype is first.dtype and fits(beta, first.dtype) and fits(alpha, first.dtype))
    require(len(start.size) <= rank and broadcast(size, start.size) == size)
    return fresh_contiguous(first.dtype, size)


@rule("addmm")
def addmm(start: Spec, first: Spec, second: Spec, beta: Any, alpha: Any) -> Returns:
    """A product of two matrices and a sum."""
    return _added(start, first, second, 2, beta, alpha)


@rule("baddbmm")
def baddbmm(start: Spec, first: Spec, second: Spec, beta: Any, alpha: Any) -> Returns:
    """Products of batches of matrices and a sum."""
    return _added(start, first, second, 3, beta, alpha)


@rule("mv")
def mv(matrix: Spec, vector: Spec) -> Returns:
    """A product of a matrix and a vector."""
    require(len(matrix.size) == 2 and vector.size == matrix.size[1:] and matrix.dtype is vector.dtype)
    require(matrix.dtype.is_floating_point)
    return fresh_contiguous(matrix.dtype, matrix.size[:1])


@rule("dot")
def dot(first: Spec, second: Spec) -> Returns:
    """A product of two vectors."""
    require(len(first.size) == 1 and first.size == second.size and first.dtype is second.dtype)
    require(first.dtype.is_floating_point)
    return fresh_contiguous(first.dtype, ())


@rule("linear")
def linear(operand: Spec, weight: Spec, bias: Spec | None) -> Returns:
    """A linear layer."""
    dtype = operand.dtype
    require(len(operand.size) >= 2 and len(weight.size) == 2 and operand.size[-1] == weight.size[1])
    require(weight.dtype is dtype and dtype.is_floating_point)
    require(bias is None or (bias.dtype is dtype and bias.size == weight.size[:1]))
    require(len(operand.size) == 2 or is_contiguous(operand))
    return fresh_contiguous(dtype, (*operand.size[:-1], weight.size[0]))


@rule("linear_backward")
def linear_backward(operand: Spec, gradient: Spec, weight: Spec, mask: Sequence[bool]) -> Returns:
    """The gradients of a linear layer."""
    dtype = operand.dtype
    require(gradient.dtype is dtype and weight.dtype is dtype and dtype.is_floating_point)
    require(len(operand.size) >= 2 and len(weight.size) == 2 and operand.size[-1] == weight.size[1])
    require(gradient.size == (*operand.size[:-1], weight.size[0]))
    # Of one column, a matrix is laid out by rows and by columns.
    require(is_row_major(operand) and is_row_major(weight) and operand.size[-1] > 1)
    return _gradients(dtype, mask, operand.size, weight.size, weight.size[:1])


def _gradients(dtype: torch.dtype, mask: Sequence[bool], *sizes: tuple[int, ...]) -> Returns:
    return several(*(contiguous(dtype, size) if wanted else None for size, wanted in zip(sizes, mask, strict=True)))


def _batches(first: Spec, second: Spec) -> tuple[int, ...]:
    rank = len(first.size)
    require(rank > 2)
    return product(first, second, rank)


@rule("matmul")
def matmul(first: Spec, second: Spec) -> Returns:
    """Products of batches of matrices."""
    return fresh_contiguous(first.dtype, _batches(first, second))


@rule("matmul_backward")
def matmul_backward(gradient: Spec, first: Spec, second: Spec, mask: Sequence[bool]) -> Returns:
    """The gradients of products of batches of matrices."""
    require(gradient.size == _batches(first, second) and gradient.dtype is first.dtype)
    made = (first.size, second.size)
    return several(
        *(contiguous(first.dtype, size) if wanted else None for size, wanted in zip(made, mask, strict=True))
    )
