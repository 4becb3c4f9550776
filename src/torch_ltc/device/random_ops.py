"""Random operators: they draw from the device's generator when their program runs.

A generator that the user hands in is used where it stands, at once: nothing tells us when they seed it again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.device.copies import copy_
from torch_ltc.device.fallback import run_eagerly
from torch_ltc.device.kernels import Kernel, record
from torch_ltc.device.views import out_kernel
from torch_ltc.native.library import extension
from torch_ltc.pytorch.private import OpOverload, PhysicalGenerator
from torch_ltc.record.operator import Operator

aten = torch.ops.aten
# In-place fills whose result does not depend on what the tensor held.
_FILLS = frozenset(
    {"uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_"}
)


def random_kernel(op: OpOverload) -> Kernel:
    """Kernel of an operator with a `generator` argument."""
    operator = Operator(op)
    fills = op._schema.name.removeprefix("aten::") in _FILLS and op._overloadname != "Tensor"
    resizing = out_kernel(operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = operator.values(args, kwargs)
        if values[operator.generator_position] is None:
            if fills:
                # Limits depend on dtype and numbers alone. A tensor without elements checks them, and draws nothing.
                filled: Any = values[0]
                op(_without_elements(filled.dtype), *values[1 : operator.generator_position])
            return resizing(*args, **kwargs) if operator.written else record(operator, values)
        if extension is not None:
            args, kwargs = tuple(map(_physical, args)), {name: _physical(value) for name, value in kwargs.items()}
            values = operator.values(args, kwargs)
            if values[operator.generator_position] is None:
                return kernel(*args, **kwargs)
        if not fills:
            return run_eagerly(operator, values, "it draws from a generator of the caller's")
        target: Any = values[0]
        generator: Any = values[operator.generator_position]
        drawn = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device=generator.device)
        op(drawn, *args[1:], **kwargs)
        return copy_(target, drawn)

    kernel.operator = operator  # type: ignore[attr-defined]
    return kernel


def _physical(value: Any) -> Any:
    """The physical generator of a generator, None for the device's own; whatever else it is stays as it is."""
    return extension.physical_generator(value) if isinstance(value, PhysicalGenerator) and extension else value


@functools.cache
def _without_elements(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)


def native_dropout(tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel of `aten::native_dropout`, by the same steps as on the CPU: PyTorch's kernels of it take no generator."""
    if tensor.numel() == 0 or not (train is None or train) or p == 0:
        mask = torch.ones_like(tensor, dtype=torch.bool)
        return tensor.clone(), mask
    if p == 1:
        return torch.zeros_like(tensor), torch.zeros_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p)
    return tensor.mul(mask).mul_(1.0 / (1.0 - p)), mask


def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`aten::dropout` as the CPU composes it; PyTorch would call a fused kernel with other rounding for this device."""
    if p < 0 or p > 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    noise = torch.empty_like(tensor).bernoulli_(1 - p)
    # The overload that PyTorch's own composition calls.
    kept: torch.Tensor = torch.ops.aten.div_.Scalar(noise, 1 - p)
    return tensor * kept


def randperm_generator(
    n: int,
    *,
    generator: torch.Generator | None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Kernel of `aten::randperm.generator`; PyTorch's composition of it loses the generator."""
    kind = torch.int64 if dtype is None else dtype
    generator = _physical(generator)
    if generator is None:
        return torch.randperm(n, dtype=kind, device=device)
    return torch.randperm(n, generator=generator, dtype=kind, device=settings.device_type).to("ltc")


KERNELS = {"aten::native_dropout": native_dropout, "aten::randperm.generator": randperm_generator}
COMPOSITES = {"aten::dropout": dropout}
