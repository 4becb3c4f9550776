"""Every optimizer of PyTorch's optimizer database, in every form that it has, on the device and on eager CPU."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from tests.ops.equality import differences

OPTIMIZERS: dict[str, OptimizerInfo] = {info.optim_cls.__name__: info for info in optim_db}
STEPS = 4
ONE_BY_ONE = ("Adafactor",)
"""Optimizers whose default form is the same on every device."""
SHAPES = ((3, 4), (4,), (), (2, 2, 3))

KNOWN_GAPS: dict[str, str] = {}
"""Optimizers that differ, with the reason of each."""


def optimizer_differences(info: OptimizerInfo) -> Iterator[str]:
    """A line for each parameter or state that differs from eager after some steps."""
    for sample in info.optim_inputs_func(device="cpu"):
        for flag, cpu_flags, atol in _forms(info):
            kwargs = {name: value for name, value in sample.kwargs.items() if name != "capturable"}
            name = f"{info.optim_cls.__name__}, {sample.desc}, {flag or 'default'}"
            try:
                expected = _trained(info, {**kwargs, **cpu_flags}, "cpu")
                actual = _trained(info, {**kwargs, **({flag: True} if flag else {})}, "ltc")
            except Exception as error:
                yield f"{name}: {type(error).__name__}: {error}"
                continue
            for line in differences("parameters and state", expected, actual, atol=atol):
                yield f"{name}: {line}"


def _forms(info: OptimizerInfo) -> Iterator[tuple[str, dict[str, bool], float]]:
    """The switch of a form on the device, the same on the CPU, and what may differ.

    The CPU's default form and that of other devices differ, one parameter at a time and all at once; and a form that
    keeps its step counter in a tensor of the device does not exist on the CPU, whose results are rounded otherwise.
    """
    all_at_once = "foreach" in info.supported_impls and info.optim_cls.__name__ not in ONE_BY_ONE
    yield "", {"foreach": True} if all_at_once else {}, 0.0
    if "foreach" in info.supported_impls:
        yield "foreach", {"foreach": True}, 0.0
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        yield "fused", {"fused": True}, 0.0
    if "capturable" in _options(info):
        yield "capturable", {}, 1e-5


def _options(info: OptimizerInfo) -> Sequence[str]:
    return info.optim_cls.__init__.__code__.co_varnames


def _trained(info: OptimizerInfo, kwargs: dict[str, Any], device: str) -> object:
    """Parameters and state of an optimizer after some steps with given gradients."""
    generator = torch.Generator().manual_seed(0)
    kwargs = {
        name: value.to(device) if isinstance(value, torch.Tensor) and kwargs.get("capturable") else copy.copy(value)
        for name, value in kwargs.items()
    }
    shapes = [shape for shape in SHAPES if len(shape) == 2] if info.optim_cls.__name__ == "Muon" else SHAPES
    parameters = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    optimizer = info.optim_cls(parameters, **kwargs)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((parameter - 0.5) ** 2).sum() for parameter in parameters)
        loss.backward()
        if info.only_supports_sparse_grads:
            for parameter in parameters:
                parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(STEPS):
        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    # Where a step counter is kept is a matter of the form.
    state = [
        {name: value for name, value in optimizer.state[each].items() if isinstance(value, torch.Tensor)}
        for each in parameters
    ]
    return [each.detach() for each in parameters], state


def sweep(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """The name of each optimizer with its differences."""
    for name in names:
        yield name, list(optimizer_differences(OPTIMIZERS[name]))
