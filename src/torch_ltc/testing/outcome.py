"""One run of a case of an operator on a device, and its outcome.

Owns the order of a run (seed, call, backward, then read) and the record of it: an `Outcome` holds plain CPU data, so
that two of them can be compared after both runs are over. Nothing is read before the backward pass is recorded: on a
lazy device forward and backward are then one program, as in training. Several calls can be made before the first is
read: they are then one program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ltc.errors import CompileError
from torch_ltc.testing.placement import Arguments, distinct, is_strided, storage_key, tensors_in, transform
from torch_ltc.testing.records import Variant

RECORDED_AT = re.compile(r" \([^()]*:\d+ in [^()]*(\([^()]*\))?\)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tensor as its user sees it, and its values on the CPU."""

    device: str
    dtype: torch.dtype
    layout: torch.layout
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int | None
    requires_grad: bool
    conjugate: bool
    negative: bool
    alias: int | None
    """The position of the first argument that it shares memory with."""
    values: torch.Tensor


@dataclass(slots=True)
class Outcome:
    """The outcome of a run: results, arguments after it, gradients, or the error of each stage."""

    result: Any = None
    arguments: list[Snapshot] = field(default_factory=list)
    gradients: list[Snapshot | None] = field(default_factory=list)
    forward_error: str | None = None
    backward_error: str | None = None
    refusal: str | None = None
    """The backend's reason not to compile the program."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the call, and around reading its results: keeps the error."""
        try:
            yield
        except Exception as error:
            self.forward_error = self._described(error)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward pass, and around reading its results: keeps the error."""
        try:
            yield
        except Exception as error:
            self.backward_error = self._described(error)

    def _described(self, error: Exception) -> str:
        if isinstance(error, CompileError):
            self.refusal = first_line(str(error))
        return describe(error)


@dataclass(frozen=True, slots=True)
class Call:
    """A call without its arguments and its device."""

    function: Callable[..., Any]
    variant: Variant
    seed: int
    differentiate: bool
    before_gradient: Callable[[Any], Any]
    """Applied to the result before the backward pass: leaves what is well defined of it (the sign of singular
    vectors, say, is not)."""


@dataclass(slots=True)
class Running:
    """A call that was made and not yet read: on a lazy device it may still be pending."""

    outcome: Outcome
    result: Any = None
    reachable: list[torch.Tensor] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)


def run(call: Call, arguments: Arguments, device: str) -> Outcome:
    """The outcome of `call` with `arguments`, which are already on `device`. Never raises an operator's error."""
    return finish(begin(call, arguments, device))


def begin(call: Call, arguments: Arguments, device: str) -> Running:
    """Makes the call and its backward pass, and reads nothing."""
    inputs = arguments.tensors()
    running = Running(Outcome(), leaves=[tensor for tensor in inputs if tensor.requires_grad])
    torch.manual_seed(call.seed)
    changed: list[torch.Tensor] = []
    with running.outcome.forward():
        running.result, changed = _invoke(call, arguments)
    running.reachable = distinct([*inputs, *changed])
    if call.differentiate and running.leaves and running.outcome.forward_error is None:
        with running.outcome.backward():
            running.gradients = _gradients(call, running.result, running.leaves, device)
    return running


def finish(running: Running) -> Outcome:
    """Reads everything that the call gave."""
    outcome, reachable = running.outcome, running.reachable
    if outcome.forward_error is None:
        with outcome.forward():
            outcome.result = observed(running.result, reachable)
            outcome.arguments = [snapshot(tensor, reachable) for tensor in reachable]
    if outcome.forward_error is None and outcome.backward_error is None:
        with outcome.backward():
            outcome.gradients = [None if each is None else snapshot(each, running.leaves) for each in running.gradients]
    return outcome


def _invoke(call: Call, arguments: Arguments) -> tuple[Any, list[torch.Tensor]]:
    """The result, and the tensors that the call was to change besides its arguments."""
    if call.variant is Variant.FUNCTION:
        return call.function(arguments.input, *arguments.args, **arguments.kwargs), []
    if call.variant is Variant.OUT:
        with torch.no_grad():
            return call.function(arguments.input, *arguments.args, **arguments.kwargs), []
    # A leaf that asks for gradients may not be changed in place, a copy of it may.
    target = arguments.input.clone() if arguments.input.requires_grad else arguments.input
    return call.function(target, *arguments.args, **arguments.kwargs), [target]


def _gradients(call: Call, result: Any, leaves: list[torch.Tensor], device: str) -> list[torch.Tensor | None]:
    outputs = [each for each in tensors_in(call.before_gradient(result)) if each.requires_grad]
    if not outputs:
        return []
    cotangents = [_cotangent(output, call.seed + index).to(device) for index, output in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True))


def _cotangent(output: torch.Tensor, seed: int) -> torch.Tensor:
    """Random weights for the elements of an output, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex64 if output.dtype.is_complex else torch.float32
    return torch.randn(output.shape, generator=generator, dtype=dtype).to(output.dtype)


def observed(tree: Any, inputs: list[torch.Tensor]) -> Any:
    """The same nesting with snapshots of its tensors."""
    return transform(tree, lambda leaf: snapshot(leaf, inputs) if isinstance(leaf, torch.Tensor) else leaf)


def snapshot(tensor: torch.Tensor, inputs: list[torch.Tensor]) -> Snapshot:
    """The tensor as it is now; reads its values, so a lazy device runs what is pending."""
    strided = is_strided(tensor)
    values = tensor.detach().cpu()
    if strided:
        values = values.resolve_conj().resolve_neg().contiguous()
    return Snapshot(
        device=tensor.device.type,
        dtype=tensor.dtype,
        layout=tensor.layout,
        shape=tuple(tensor.shape),
        stride=tensor.stride() if strided else None,
        offset=int(tensor.storage_offset()) if strided else None,
        requires_grad=tensor.requires_grad,
        conjugate=tensor.is_conj(),
        negative=tensor.is_neg(),
        alias=_alias(tensor, inputs) if strided else None,
        values=values,
    )


def _alias(tensor: torch.Tensor, inputs: list[torch.Tensor]) -> int | None:
    key = storage_key(tensor)
    sharing = (place for place, each in enumerate(inputs) if is_strided(each) and storage_key(each) == key)
    return next(sharing, None)


def describe(error: BaseException) -> str:
    """An error's class and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def first_line(refusal: str) -> str:
    """A backend's refusal in one line, without the line that recorded the call: it is this package's."""
    return RECORDED_AT.sub("", refusal.strip().splitlines()[0])
