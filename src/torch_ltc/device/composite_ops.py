"""Composite operators that are recorded as one call each: fewer and larger records.

PyTorch's own autograd has a derivative for them (it needs them for nested tensors), which is used here. A backend
that runs or decomposes them computes what CPU eager's composition does, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.device.kernels import Kernel, make_kernel
from torch_ltc.device.registration import composed, with_derivative
from torch_ltc.program.composite_gradients import is_batch_product, is_folded, linear_backward, matmul_backward
from torch_ltc.pytorch.private import dispatch_modes, forward_ad, function_transforms

aten = torch.ops.aten
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_linear = make_kernel(aten.linear.default)
_linear_backward = make_kernel(aten.linear_backward.default)
_matmul = make_kernel(aten.matmul.default)
_matmul_backward = make_kernel(aten.matmul_backward.default)


def _are_plain(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True for tensors of this device and of one dtype that nobody looks at on the way to its kernels: no subclass, no
    mode, no function transform, no derivative forwards."""
    if type(first) not in _PLAIN or type(second) not in _PLAIN or first.dtype is not second.dtype:
        return False
    # `device` costs several times as much; one of the tensors is on this device.
    if first.is_cpu or second.is_cpu or first.is_meta or second.is_meta:
        return False
    # Keys that a call is redispatched with do not have those of a transform, and its tensors would get to kernels.
    return not dispatch_modes() and not function_transforms() and forward_ad._current_level < 0


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Autograd's kernel of `aten::linear`: one call in all usual cases."""
    if not _is_usual_linear(input, weight, bias):
        return composed(aten.linear.default, input, weight, bias)
    if torch.is_grad_enabled():
        if weight.is_complex():
            # PyTorch before 2.13 has no derivative for these.
            return composed(aten.linear.default, input, weight, bias)
        return with_derivative(aten.linear.default, input, weight, bias)
    return _linear(input, weight, bias)


def _is_usual(input: torch.Tensor, weight: torch.Tensor) -> bool:
    sizes, shape = input.size(), weight.size()
    if len(sizes) < 2 or len(shape) != 2 or sizes[-1] != shape[1] or not _are_plain(input, weight):
        return False
    # Whether eager copies an input that is laid out otherwise, or multiplies batch by batch, depends on what requires a
    # gradient, which is not known where the program runs.
    return len(sizes) == 2 or is_folded(input)


def _is_usual_bias(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    return bias.dim() == 1 and bias.size(0) == weight.size(0) and _are_plain(bias, weight)


def _without_autograd(record: Kernel, is_usual: Callable[..., bool], op: Any) -> Kernel:
    """The device's kernel: below the one of autograd, which has looked at the call, and in inference mode, where nobody
    has."""

    def kernel(*args: Any) -> Any:
        if torch.is_inference_mode_enabled() and not is_usual(*args):
            return composed(op, *args)
        return record(*args)

    # What is recorded once is found in C++ from then on.
    setattr(kernel, "operator", getattr(record, "operator"))  # noqa: B009, B010  a function's attribute
    return kernel


def _is_usual_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return _is_usual(input, weight) and (bias is None or _is_usual_bias(bias, weight))


def _is_usual_matmul(self: torch.Tensor, other: torch.Tensor) -> bool:
    return is_batch_product(self, other) and _are_plain(self, other)


def linear_backward_with_graph(self: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, mask: Any) -> Any:
    """Autograd's kernel of `aten::linear_backward`: decomposed when it is differentiated itself, else one call."""
    if torch.is_grad_enabled() or not _are_plain(self, grad):
        return linear_backward(self, grad, weight, mask)
    return _linear_backward(self, grad, weight, mask)


def matmul(self: torch.Tensor, other: torch.Tensor) -> Any:
    """Autograd's kernel of `aten::matmul`: one call for batches of matrices, else decomposed as PyTorch does."""
    if self.dim() == 2 and other.dim() == 2:
        return aten.mm.default(self, other)
    with_gradient = torch.is_grad_enabled()
    # PyTorch's derivative of the whole operator is not for complex numbers; and where both gradients are those of one
    # tensor, it adds them in another order than the composition's.
    differs = with_gradient and (self is other or self.is_complex())
    if differs or not _is_usual_matmul(self, other):
        return composed(aten.matmul.default, self, other)
    if with_gradient:
        return with_derivative(aten.matmul.default, self, other)
    return _matmul(self, other)


def matmul_backward_with_graph(grad: torch.Tensor, self: torch.Tensor, other: torch.Tensor, mask: Any) -> Any:
    """Autograd's kernel of `aten::matmul_backward`: decomposed when it is differentiated itself, else one call."""
    if torch.is_grad_enabled() or not _are_plain(grad, self):
        return matmul_backward(grad, self, other, mask)
    return _matmul_backward(grad, self, other, mask)


# In place of the kernels that every operator gets.
KERNELS: dict[str, Kernel] = {
    "aten::linear_backward": _linear_backward,
    "aten::matmul_backward": _matmul_backward,
}


def _zeros(size: Any, **options: Any) -> torch.Tensor:
    """Zeros that can be written to: autograd adds to gradients that nobody else holds."""
    return torch.zeros(size, **{name: value for name, value in options.items() if value is not None})


# Beside PyTorch's compositions.
COMPOSED: dict[str, Kernel] = {
    "aten::linear": _without_autograd(_linear, _is_usual_linear, aten.linear.default),
    "aten::matmul": _without_autograd(_matmul, _is_usual_matmul, aten.matmul.default),
    "aten::_efficientzerotensor": _zeros,
}
AUTOGRAD: dict[str, Kernel] = {
    "aten::linear": linear,
    "aten::linear_backward": linear_backward_with_graph,
    "aten::matmul": matmul,
    "aten::matmul_backward": matmul_backward_with_graph,
}
# PyTorch has no kernel for these on the CPU.
EVERYWHERE: dict[str, Kernel] = {
    "aten::linear_backward": linear_backward,
    "aten::matmul_backward": matmul_backward,
}
