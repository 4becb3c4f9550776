"""Channels last for convolutions on the CPU, as Inductor wants them.

Inductor runs convolutions with the channels last in memory, whatever was recorded. In a graph with forward and backward
it takes the recorded layout for what the backward of a convolution reads: every activation would be there three times.
So the graph itself says that images and weights have their channels last, and all that is computed of them follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from torch_ltc.program.instruction import Call, Program, Value
from torch_ltc.program.spec import Spec

__all__ = ["ChannelsLast"]

aten = torch.ops.aten
# The arguments of a convolution and of its backward that are images or weights.
_IMAGES = {
    aten.convolution.default: ("input", "weight"),
    aten.convolution_backward.default: ("grad_output", "input", "weight"),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Operators whose meaning depends on how their operand lies in memory.
_ADDRESS_MEMORY = ("as_strided", "view_as_complex", "view.dtype", "set_", "resize")


class ChannelsLast:
    """Knows which values of a program have their channels last though they were recorded contiguous."""

    def __init__(self, program: Program, specs: Mapping[int, Spec]) -> None:
        self._specs = specs
        self._values: set[int] = set()
        on_cpu = program.device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        names = [str(call.op).removeprefix("aten.") for call in program.calls]
        self._active = on_cpu and not program.symbols and not any(name.startswith(_ADDRESS_MEMORY) for name in names)

    def images(self, call: Call) -> Iterator[tuple[str, int]]:
        """The arguments of a convolution that have yet to be laid out: name and value number."""
        if not self._active or call.op not in _IMAGES:
            return
        names = [argument.name for argument in call.op._schema.arguments]
        for name, value in zip(names, call.args):
            given = value.number if name in _IMAGES[call.op] and isinstance(value, Value) else None
            if given is not None and given not in self._values and self._is_image(given):
                yield name, given

    def follow(self, call: Call) -> list[int]:
        """Note what a call does to the layout of its results; those that are to be contiguous again at once are
        returned: gradients of weights, which are used with the weights."""
        made = [number for number in call.numbers if number >= 0 and self._is_image(number)]
        if not self._active or not made:
            return []
        if call.op is aten.convolution_backward.default:
            weights = [number for number in call.numbers[1:2] if number in made]
            self._values.update(number for number in made if number not in weights)
            return weights
        if call.op in _IMAGES or not self._values.isdisjoint(call.operands):
            self._values.update(made)
        return []

    def differs(self, number: int) -> bool:
        """True for a value that does not lie in memory as it was recorded."""
        return number in self._values

    def _is_image(self, number: int) -> bool:
        spec = self._specs[number]
        return len(spec.size) == 4 and spec.dtype in _DTYPES and spec.contiguous and spec.numel > 0
