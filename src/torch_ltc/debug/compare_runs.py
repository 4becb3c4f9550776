"""Differences between two runs of one program: in results, and in inputs that were written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.backends.interpreter import memory_roots
from torch_ltc.debug.replay import comparable, tensor_of
from torch_ltc.lowering.interface import Backend, Outcome
from torch_ltc.lowering.tolerance import Tolerance, program_tolerance
from torch_ltc.program.instruction import Call, Program

_UNWRITTEN = ("aten::empty", "aten::new_empty")
# A result may be off by this multiple of the movement that perturbed inputs cause.
_MARGIN = 16
# Results that say nothing: scratch memory, and random state that a kernel keeps for itself.
_UNDEFINED = {
    "aten::mkldnn_rnn_layer": (3,),
    "aten::_scaled_dot_product_flash_attention": (6, 7, 8),
    "aten::_scaled_dot_product_efficient_attention": (2, 3),
    "aten::_scaled_dot_product_cudnn_attention": (6, 7, 8),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Two tensors that should be the same. `excess` is the largest error as a multiple of what is allowed."""

    what: str
    excess: float
    wrong: int
    count: int
    place: tuple[int, ...]
    got: object
    wanted: object
    allowed: float

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.place))}]"
        numbers = f"{_text(self.got)} instead of {_text(self.wanted)}"
        allowed = f"allowed: {self.allowed:.2g}" if self.allowed else "equal numbers are asked for"
        return f"{self.what}: {self.wrong} of {self.count} numbers differ, most at {where}: {numbers} ({allowed})"


def _text(number: object) -> str:
    return f"{number:.9g}" if isinstance(number, float) else str(number)


def difference(
    what: str, wanted: torch.Tensor, got: torch.Tensor, tolerance: Tolerance, slack: float = 0.0
) -> Difference | None:
    """The difference of `got` from `wanted` beyond the tolerance and `slack`, if any. NaN is equal to NaN."""
    if wanted.numel() == 0 or torch.equal(wanted, got):
        return None
    left, right = comparable(wanted.detach()), comparable(got.detach())
    relative, absolute = tolerance
    finite = left[left.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    allowed = slack + absolute * scale + relative * left.abs().nan_to_num(0, 0, 0)
    same = (left == right) | (left.isnan() & right.isnan())
    error = (left - right).abs()
    # Where one is not finite and the other is something else, no error is small.
    error = torch.where(same, 0.0, error.nan_to_num(torch.inf, torch.inf, torch.inf))
    wrong = error > allowed
    count = int(wrong.sum())
    if not count:
        return None
    excess = torch.where(wrong, error / allowed.clamp_min(1e-30), 0.0)
    flat = int(excess.argmax())
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), wanted.shape))
    return Difference(
        what,
        float(excess.flatten()[flat]),
        count,
        wanted.numel(),
        place,
        got[place].item(),
        wanted[place].item(),
        float(allowed.flatten()[flat]),
    )


Ended = tuple[Outcome, Sequence[Any]]
"""The outcome of a run, and its inputs as they are after it."""
_Named = dict[str, tuple[torch.Tensor | None, str]]


def compared(
    program: Program, backend: Backend, wanted: Ended, got: Ended, perturbed: Callable[[], Ended]
) -> list[Difference]:
    """All that differs between two runs. The movement between the first and one on `perturbed`
    inputs is rounding that the program makes large, as a division of two small numbers does: that much is allowed."""
    before, after = _tensors(program, wanted), _tensors(program, got)
    if not _differences(before, after, backend, {}):
        return []
    return _differences(before, after, backend, _tensors(program, perturbed()))


def _differences(before: _Named, after: _Named, backend: Backend, moved: _Named) -> list[Difference]:
    found = []
    for what, (left, made) in before.items():
        right = after[what][0]
        if left is not None and right is not None:
            spec = f"{str(left.dtype).removeprefix('torch.')}[{','.join(map(str, left.size()))}]"
            tolerance = program_tolerance(left.dtype, backend.tolerances)
            slack = _movement(left, moved[what][0]) if what in moved else 0.0
            found.append(difference(f"{what}, {spec}{made}", left, right, tolerance, slack))
    return [each for each in found if each is not None]


def _movement(wanted: torch.Tensor, moved: torch.Tensor | None) -> float:
    """The largest movement of the numbers of a result, with a margin."""
    if moved is None or not wanted.dtype.is_floating_point or not wanted.numel():
        return 0.0
    return _MARGIN * float((comparable(moved) - comparable(wanted)).abs().nan_to_num(0, 0, 0).max())


def _tensors(program: Program, ended: Ended) -> _Named:
    """The tensors after a run, by name, with their makers."""
    outcome, inputs = ended
    found: _Named = {}
    makers = _makers(program)
    meaningless = undefined(program)
    for place, number in enumerate(program.outputs):
        if number not in meaningless:
            made = f", made by {makers[number][0].name}" if number in makers else ""
            found[f"result {place}"] = (tensor_of(outcome.results[place]), made)
    for place, held in enumerate(inputs):
        # What was given as a handle may be gone where the run has replaced it.
        found[f"input {place} after the run"] = (tensor_of(outcome.replaced.get(place, held)), "")
    return found


def undefined(program: Program) -> set[int]:
    """Values that nobody has given a meaning: memory that was never written to, and scratch results of kernels."""
    roots = memory_roots(program)
    written = {roots[number] for call in program.calls for number in call.mutated}
    found: set[int] = set()
    for call in program.calls:
        name = call.op._schema.name
        if name.startswith(_UNWRITTEN):
            found.update(number for number in call.numbers if number >= 0 and roots[number] not in written)
        found.update(call.numbers[place] for place in _UNDEFINED.get(name, ()))
    return found


def _makers(program: Program) -> dict[int, tuple[Call, int]]:
    """The call that makes each value, and the place among its results."""
    return {number: (call, place) for call in program.calls for place, number in enumerate(call.numbers) if number >= 0}
