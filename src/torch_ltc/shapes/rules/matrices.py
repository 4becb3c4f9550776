"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec
from torch_ltc.shapes.broadcasting import broadcast, fits, is_contiguous, is_row_major
from torch_ltc.shapes.table import contiguous, fresh_contiguous, masked, require, rule, rules


def _product(first: Spec, second: Spec, rank: int) -> tuple[int, ...]:
    """The size of a product of matrices, or of batches of them."""
    require(len(first.size) == rank and len(second.size) == rank and first.dtype is second.dtype)
    require(first.size[-1] == second.size[-2] and first.size[:-2] == second.size[:-2])
    require(first.dtype.is_floating_point)
    return (*first.size[:-1], second.size[-1])


def _add_products(name: str, added: str, rank: int) -> None:
    def product(first: Spec, second: Spec) -> Returns:
        return fresh_contiguous(first.dtype, _product(first, second, rank))

    def sum_with_product(start: Spec, first: Spec, second: Spec, beta: Any, alpha: Any) -> Returns:
        size = _product(first, second, rank)
        require(start.dtype is first.dtype and fits(beta, first.dtype) and fits(alpha, first.dtype))
        require(len(start.size) <= rank and broadcast(size, start.size) == size)
        return fresh_contiguous(first.dtype, size)

    rules.add(name, product)
    rules.add(added, sum_with_product)


_add_products("mm", "addmm", 2)
_add_products("bmm", "baddbmm", 3)


def _add_vector_product(name: str, rank: int) -> None:
    def product(first: Spec, vector: Spec) -> Returns:
        require(len(first.size) == rank and vector.size == first.size[-1:] and first.dtype is vector.dtype)
        require(first.dtype.is_floating_point)
        return fresh_contiguous(first.dtype, first.size[:-1])

    rules.add(name, product)


_add_vector_product("mv", 2)
_add_vector_product("dot", 1)


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
    require(gradient.dtype is dtype and linear(operand, weight, None))
    require(gradient.size == (*operand.size[:-1], weight.size[0]))
    # Of one column, a matrix is laid out by rows and by columns.
    require(is_row_major(operand) and is_row_major(weight) and operand.size[-1] > 1)
    sizes = (operand.size, weight.size, weight.size[:1])
    return masked(mask, *(contiguous(dtype, size) for size in sizes))


def _batches(first: Spec, second: Spec) -> tuple[int, ...]:
    rank = len(first.size)
    require(rank > 2)
    return _product(first, second, rank)


@rule("matmul")
def matmul(first: Spec, second: Spec) -> Returns:
    """Products of batches of matrices."""
    return fresh_contiguous(first.dtype, _batches(first, second))


@rule("matmul_backward")
def matmul_backward(gradient: Spec, first: Spec, second: Spec, mask: Sequence[bool]) -> Returns:
    """The gradients of products of batches of matrices."""
    require(gradient.size == _batches(first, second) and gradient.dtype is first.dtype)
    return masked(mask, contiguous(first.dtype, first.size), contiguous(first.dtype, second.size))
