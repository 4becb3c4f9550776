"""The gradients of `aten::linear` and `aten::matmul`, which are recorded as composites, and so are they.

PyTorch has `aten::linear_backward` and `aten::matmul_backward` for nested tensors and some devices; on the CPU,
autograd goes through what the two are composed of. The formulas here make the same calls with the same operands, so
that the gradients are the same to the bit. They name no size where they can, so that they hold for all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ltc.program.spec import Spec
from torch_ltc.pytorch.private import OpOverload

aten = torch.ops.aten
# Calls an operator, or writes the call down.
Caller = Callable[..., Any]


def _run(op: OpOverload, *args: Any) -> Any:
    return op(*args)


def linear_backward(
    self: Any, grad_output: Any, weight: Any, output_mask: Sequence[bool], call: Caller = _run
) -> tuple[Any, Any, Any]:
    """Gradients of the input, the weight and the bias; None for those that `output_mask` does not ask for, and all
    of them when `grad_output` is undefined."""
    if grad_output is None:
        return None, None, None
    if output_mask[0] and not output_mask[1] and not is_folded(self):
        return _batched(self, grad_output, weight, output_mask, call)
    rows, flat = _as_rows(grad_output, call), _as_rows(self, call)
    for_input = for_weight = for_bias = None
    if output_mask[0]:
        for_input = _product(rows, weight, _is_transposed(flat), call)
        if self.dim() != 2:
            for_input = call(aten.view_as.default, for_input, self)
    if output_mask[1]:
        # The weight's transpose takes part in the product: it is laid out the other way round.
        columns = call(aten.t.default, rows)
        for_weight = _product(columns, flat, not _is_transposed(weight, of_transpose=True), call)
    if output_mask[2]:
        for_bias = _bias(self, grad_output, rows, call)
    return for_input, for_weight, for_bias


def is_folded(tensor: Any) -> bool:
    """True when `matmul` with a matrix takes all but the last dimension as one without a copy."""
    if tensor.is_contiguous():
        return True
    size, stride = tensor.size(), tensor.stride()
    return all(stride[i] == stride[i + 1] * size[i + 1] for i in range(len(size) - 2))


def _as_rows(tensor: Any, call: Caller) -> Any:
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() == 1:
        return call(aten.unsqueeze.default, tensor, 0)
    return call(aten.flatten.using_ints, tensor, 0, -2)


def _is_transposed(tensor: Any, of_transpose: bool = False) -> bool:
    """True for a matrix laid out by columns, as the derivative of `mm` looks at it."""
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    if of_transpose:
        size, stride = size[::-1], stride[::-1]
    return bool(stride[0] == 1 and stride[1] == size[0])


def _product(left: Any, right: Any, transposed: bool, call: Caller) -> Any:
    """`left @ right`; by the product of the transposes where the result should be laid out by columns."""
    right = call(aten.conj.default, right) if right.dtype.is_complex else right
    if not transposed:
        return call(aten.mm.default, left, right)
    product = call(aten.mm.default, call(aten.t.default, right), call(aten.t.default, left))
    return call(aten.t.default, product)


def _bias(self: Any, grad_output: Any, rows: Any, call: Caller) -> Any:
    if self.dim() == 1:
        return call(aten.clone.default, grad_output)
    if self.dim() == 2 or self.is_contiguous():
        return call(aten.sum.dim_IntList, rows, [0])
    return call(aten.sum.dim_IntList, grad_output, list(range(self.dim() - 1)))


def _batched(
    self: Any, grad_output: Any, weight: Any, output_mask: Sequence[bool], call: Caller
) -> tuple[Any, Any, Any]:
    """An input that would have to be copied, and a weight without a gradient: `matmul` multiplies batch by batch."""
    batch = 1
    for length in self.size()[:-2]:
        batch = batch * length
    weight = call(aten.conj.default, weight) if weight.dtype.is_complex else weight
    grads = call(aten.reshape.default, grad_output, [batch, grad_output.size(-2), grad_output.size(-1)])
    weights = call(aten.expand.default, weight, [batch, weight.size(0), weight.size(1)])
    for_input = call(aten.view_as.default, call(aten.bmm.default, grads, weights), self)
    for_bias = _bias(self, grad_output, grad_output, call) if output_mask[2] else None
    return for_input, None, for_bias


def matmul_backward(
    grad: Any, self: Any, other: Any, mask: Sequence[bool], call: Caller = _run
) -> tuple[Any | None, Any | None]:
    """Gradients of a product of two batches of matrices with the same batch sizes."""
    if grad is None:
        return None, None
    rows, left, right = (_as_batch(tensor, call) for tensor in (grad, self, other))
    for_self = for_other = None
    if mask[0]:
        for_self = call(aten.bmm.default, rows, _adjoint(right, call))
        for_self = for_self if self.dim() == 3 else call(aten.view_as.default, for_self, self)
    if mask[1]:
        for_other = call(aten.bmm.default, _adjoint(left, call), rows)
        for_other = for_other if other.dim() == 3 else call(aten.view_as.default, for_other, other)
    return for_self, for_other


def is_batch_product(left: Any, right: Any) -> bool:
    """True for batches of matrices with the same batch sizes."""
    dims, first, second = left.dim(), left.size(), right.size()
    return bool(dims > 2 and dims == right.dim() and first[:-2] == second[:-2] and first[-1] == second[-2])


def _as_batch(tensor: Any, call: Caller) -> Any:
    return tensor if tensor.dim() == 3 else call(aten.flatten.using_ints, tensor, 0, -3)


def _adjoint(tensor: Any, call: Caller) -> Any:
    turned = call(aten.transpose.int, tensor, 1, 2)
    return call(aten.conj.default, turned) if tensor.dtype.is_complex else turned


def layout_choices(op: OpOverload, operands: Sequence[Spec]) -> tuple[bool, ...]:
    """The choices of the formula of `op` by the layout of its operands: programs that differ in it run other calls."""
    if op is not aten.linear_backward.default:
        return ()
    self, _, weight = (Shaped(-1, spec) for spec in operands)
    folded = is_folded(self)
    size, stride = self.size(), self.stride()
    rows_by_columns = folded and len(size) > 1 and stride[-2] == 1 and stride[-1] == math.prod(size[:-1])
    return folded, self.is_contiguous(), rows_by_columns, _is_transposed(weight, of_transpose=True)


class Shaped:
    """A value as the formulas look at it: its number and its spec, no data."""

    def __init__(self, number: int, spec: Spec) -> None:
        self.number = number
        self.spec = spec
        self.dtype = spec.dtype

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.size)

    def size(self) -> tuple[int, ...]:
        """Sizes."""
        return self.spec.size

    def stride(self) -> tuple[int, ...]:
        """Strides."""
        return self.spec.stride

    def is_contiguous(self) -> bool:
        """As PyTorch says it: strides of dimensions of size 1 do not matter."""
        step = 1
        for length, stride in zip(reversed(self.spec.size), reversed(self.spec.stride), strict=True):
            if length != 1:
                if stride != step:
                    return False
                step *= length
        return True


# PyTorch's meta kernels for these do not look at the mask.
FORMULAS: dict[OpOverload, Caller] = {
    aten.linear_backward.default: linear_backward,
    aten.matmul_backward.default: matmul_backward,
}

__all__ = [
    "FORMULAS",
    "Caller",
    "Shaped",
    "is_batch_product",
    "is_folded",
    "layout_choices",
    "linear_backward",
    "matmul_backward",
]
