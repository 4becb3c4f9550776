"""Replay of a program on the inputs of an earlier run: the base of the finders of NaN and of wrong results.

Owns copies of inputs, the random state that goes with them, a run call by call under observation, and the figures that
describe a tensor in a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.backends.interpreter import Interpretation, run_recorded_call
from torch_ltc.lowering.backend_data import BackendData, alias_physical
from torch_ltc.lowering.interface import Arguments, Held
from torch_ltc.program.instruction import Call, Program, Scalar, Value
from torch_ltc.program.spec import spec_of
from torch_ltc.source import Source

MOST_SHOWN = 4
Observer = Callable[[int, Call, list[Any], Callable[[], None]], None]


def tensor_of(held: Held) -> torch.Tensor | None:
    """The data as a tensor, None where it was lost."""
    if isinstance(held, BackendData):
        held = held.tensor()
    return held if isinstance(held, torch.Tensor) else None


def source_of(call: Call, arguments: Arguments) -> Source:
    """The line that recorded the call this time, or the first time where that is not known."""
    return arguments.sources.get(id(call), call.source)


class SavedInputs:
    """The inputs of a run as they were before it, and the random state. Those that share memory with one of `positions`
    are copied; the others must be as they were whenever `arguments` is called."""

    def __init__(self, program: Program, arguments: Arguments, positions: Sequence[int]) -> None:
        self._given = arguments
        tensors = {position: tensor_of(arguments.held[position]) for position in positions}
        bases: dict[int, torch.Tensor] = {}
        for tensor in tensors.values():
            if tensor is not None and tensor.untyped_storage()._cdata not in bases:
                storage = tensor.untyped_storage()
                bases[storage._cdata] = _bytes_of(storage.clone(), tensor.device)
        self.held: list[Held] = []
        for position, item in enumerate(arguments.held):
            seen = tensors.get(position, item)
            base = bases.get(seen.untyped_storage()._cdata) if isinstance(seen, torch.Tensor) else None
            # The copy alone is kept: a backend may reuse memory that nobody else holds.
            copied = base is not None and isinstance(seen, torch.Tensor)
            self.held.append(alias_physical(base, spec_of(seen)) if copied else item)  # type: ignore[arg-type]
        self._own = {base.untyped_storage()._cdata for base in bases.values()}
        self.state = arguments.generator.get_state() if program.random else None

    def arguments(self, count: int | None = None) -> Arguments:
        """The first `count` inputs, or all, in memory of their own where they were copied; and the generator in the
        state in which it was. A run may write to them."""
        bases: dict[int, torch.Tensor] = {}
        held: list[Held] = []
        for item in self.held[:count]:
            if isinstance(item, torch.Tensor) and (storage := item.untyped_storage())._cdata in self._own:
                if storage._cdata not in bases:
                    bases[storage._cdata] = _bytes_of(storage.clone(), item.device)
                item = alias_physical(bases[storage._cdata], spec_of(item))
            held.append(item)
        given = self._given
        if self.state is not None:
            given.generator.set_state(self.state)
        return Arguments(held, given.scalars, given.generator, given.device, given.sources)


def perturb(arguments: Arguments) -> None:
    """Perturb each floating-point input that may be written to by about the last bit of its numbers."""
    generator = torch.Generator().manual_seed(0)
    seen: set[int] = set()
    for tensor in arguments.inputs:
        if not isinstance(tensor, torch.Tensor) or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            continue
        if tensor.untyped_storage()._cdata not in seen:
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            tensor.copy_(comparable(tensor) * (1 + torch.finfo(tensor.dtype).eps * noise))
            seen.add(tensor.untyped_storage()._cdata)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class Replay(Interpretation):
    """A run of a program in the interpreter in which `observe` is called around each call: with its place, the call,
    the values by number, and what runs it."""

    def __init__(self, program: Program, observe: Observer) -> None:
        super().__init__(program)
        self._observe = observe
        self._places = {id(call): place for place, call in enumerate(program.calls)}
        self._run_call = self._observed

    def _observed(self, call: Call, values: list[Any], arguments: Arguments) -> None:
        self._observe(self._places[id(call)], call, values, lambda: run_recorded_call(call, values, arguments))


# ---- figures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a tensor in a message: its type and size as text, the range of its finite numbers (of their
    magnitudes, if they are complex), and the number of others."""

    spec: str
    low: float
    high: float
    nans: int
    infinities: int
    count: int

    @property
    def finite(self) -> bool:
        """True when there is neither a NaN nor an infinity."""
        return not (self.nans or self.infinities)

    def __str__(self) -> str:
        if self.count == 0:
            return f"{self.spec}, empty"
        parts = [self.spec]
        if self.nans + self.infinities < self.count:
            low, high = _short(self.low), _short(self.high)
            parts.append(low if self.low == self.high else f"{low} .. {high}")
        for number, name in ((self.nans, "NaN"), (self.infinities, "Inf")):
            if number:
                parts.append(f"{number} {name}" if number < self.count else f"all {name}")
        return ", ".join(parts)


Operand = Figures | bool | int | float | complex


def _short(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def figures(tensor: torch.Tensor) -> Figures:
    """The figures of a tensor."""
    name = f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.size()))}]"
    with torch.no_grad():
        plain = comparable(tensor.detach())
        nans, infinities = int(plain.isnan().sum()), int(plain.isinf().sum())
        if plain.dtype.is_complex:
            plain = plain.abs()
        finite = plain[plain.isfinite()] if nans or infinities else plain
        low, high = (float(edge) for edge in finite.aminmax()) if finite.numel() else (math.nan, math.nan)
    return Figures(name, low, high, nans, infinities, tensor.numel())


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in a type that PyTorch can count with: float32 for short floats, float64 for integers."""
    if tensor.dtype.is_complex:
        return tensor.resolve_conj().to(torch.complex64) if tensor.dtype is torch.complex32 else tensor.resolve_conj()
    if tensor.dtype.is_floating_point:
        return tensor.float() if tensor.dtype.itemsize < 4 else tensor
    return tensor.double()


def operands(
    call: Call, values: list[Any], arguments: Arguments, before: Mapping[int, Figures], bad: int
) -> tuple[Operand, ...]:
    """The arguments as a message shows them: tensors and numbers; of lists what stands where the bad result does.
    `before` has the figures of what the call has written to meanwhile."""
    shown: list[Operand] = []

    def add(operand: object) -> None:
        if isinstance(operand, Scalar):
            shown.append(arguments.scalars[operand.slot])  # type: ignore[arg-type]
        elif isinstance(operand, Value):
            value = values[operand.number]
            if operand.number in before:
                shown.append(before[operand.number])
            elif isinstance(value, torch.Tensor):
                shown.append(figures(value))
        elif isinstance(operand, (float, complex)):
            shown.append(operand)

    for operand in (*call.args, *call.kwargs.values()):
        if isinstance(operand, tuple):
            place = _place_in_list(call, bad)
            chosen = operand[place : place + 1] if place >= 0 and len(operand) > place else operand[:MOST_SHOWN]
            for item in chosen:
                add(item)
        else:
            add(operand)
    return tuple(shown[: 2 * MOST_SHOWN])


def _place_in_list(call: Call, number: int) -> int:
    """The place of the value in a list of results, or of operands that are written to; -1 where there is none."""
    for part in (call.numbers, *(operand for operand in call.args if isinstance(operand, tuple))):
        numbers = [item.number if isinstance(item, Value) else item for item in part]
        if number >= 0 and number in numbers and len(numbers) > 1:
            return numbers.index(number)
    return -1
