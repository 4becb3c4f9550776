"""Running one recorded call with PyTorch's own kernel: what a backend may do with a call that it cannot take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from torch_ltc.lowering.interface import Arguments
from torch_ltc.lowering.out_of_memory import make_room
from torch_ltc.program.instruction import Call, DeviceGenerator, PhysicalDevice, Scalar, Size, Value
from torch_ltc.program.spec import Spec
from torch_ltc.program.specialization import evaluated
from torch_ltc.pytorch.kernel_calls import call_kernel
from torch_ltc.pytorch.private import conj_view, neg_view

Lookup = Callable[[int], Any]


def fill(operand: object, value_of: Lookup, arguments: Arguments) -> Any:
    """The real argument behind a template's operand."""
    if isinstance(operand, Value):
        return value_of(operand.number)
    if isinstance(operand, Scalar):
        return arguments.scalars[operand.slot]
    if isinstance(operand, tuple):
        return [fill(item, value_of, arguments) for item in operand]
    if isinstance(operand, DeviceGenerator):
        return arguments.generator
    if isinstance(operand, PhysicalDevice):
        return arguments.device
    return operand


def flatten_results(out: Any, call: Call) -> list[Any]:
    """Everything the kernel returned, in order, lists opened."""
    if not call.returns:
        return []
    parts = out if len(call.returns) > 1 else (out,)
    flat: list[Any] = []
    for declared, part in zip(call.returns, parts, strict=True):
        if isinstance(declared, tuple):
            flat.extend(part)
        else:
            flat.append(part)
    return flat


def laid_out(result: torch.Tensor, spec: Spec | None) -> torch.Tensor:
    """A copy of the result with the spec that was recorded for it."""
    assert spec is not None
    base = torch.empty(spec.extent(), dtype=spec.dtype, device=result.device)
    view = base.as_strided(spec.size, spec.stride, spec.offset)
    view = conj_view(view) if spec.conj else view
    view = neg_view(view) if spec.neg else view
    return view.copy_(result)


def plain_call(call: Call, symbols: Mapping[str, int]) -> Call:
    """The call with integers in place of expressions over symbols."""

    def plain(operand: object) -> object:
        if isinstance(operand, Size):
            return evaluated(operand.expression, symbols)
        return tuple([plain(item) for item in operand]) if isinstance(operand, tuple) else operand

    named = {name: plain(operand) for name, operand in call.kwargs.items()}
    return replace(call, args=tuple([plain(operand) for operand in call.args]), kwargs=named)


def run_call(
    call: Call, value_of: Lookup, arguments: Arguments, kernel: Callable[..., Any] | None = None
) -> dict[int, Any]:
    """Run the call, or `kernel` in place of its operator; its results by value number."""
    args = [fill(operand, value_of, arguments) for operand in call.args]
    kwargs = {name: fill(operand, value_of, arguments) for name, operand in call.kwargs.items()}
    if kernel is not None:
        return _numbered(call, kernel(*args, **kwargs))
    return run_filled(call, args, kwargs)


def run_filled(call: Call, args: list[Any], kwargs: dict[str, Any]) -> dict[int, Any]:
    """Run the call on these arguments; its results by value number."""
    try:
        made = call_kernel(call.op, args, kwargs)
    except Exception as error:
        # A call that writes may have written already.
        if call.mutated or not make_room(error):
            raise
        made = call_kernel(call.op, args, kwargs)
    return _numbered(call, made)


def _numbered(call: Call, made: Any) -> dict[int, Any]:
    """What a kernel returned, laid out as recorded, by value number."""
    results = flatten_results(made, call)
    copied = call.layout.copied or ()
    return {
        number: laid_out(result, item.spec) if position in copied else result
        for position, (number, item, result) in enumerate(zip(call.numbers, call.flat_returns, results, strict=True))
        if number >= 0
    }
