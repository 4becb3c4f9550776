"""What differs between two runs of one program: results, and inputs that were written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.debug.replay import comparable, tensor_of
from torch_ltc.lowering.interface import Backend, Outcome
from torch_ltc.lowering.tolerance import Tolerance, program_tolerance
from torch_ltc.program.instruction import Call, Program

__all__ = ["Difference", "compared", "difference"]

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


def difference(what: str, wanted: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> Difference | None:
    """How `got` differs from `wanted` beyond the tolerance; None if it does not. NaN is equal to NaN."""
    if wanted.numel() == 0 or torch.equal(wanted, got):
        return None
    left, right = comparable(wanted.detach()), comparable(got.detach())
    relative, absolute = tolerance
    finite = left[left.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    allowed = absolute * scale + relative * left.abs().nan_to_num(0, 0, 0)
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


def compared(
    program: Program, backend: Backend, wanted: tuple[Outcome, Sequence[Any]], got: tuple[Outcome, Sequence[Any]]
) -> list[Difference]:
    """All that differs: of each run the outcome, and the inputs as they are after it."""
    found: list[Difference | None] = []
    makers = _makers(program)
    for place, number in enumerate(program.outputs):
        maker = makers.get(number)
        if maker is None or maker[1] not in _UNDEFINED.get(maker[0].op._schema.name, ()):
            made = f", made by {maker[0].name}" if maker is not None else ""
            left, right = tensor_of(wanted[0].results[place]), tensor_of(got[0].results[place])
            found.append(_difference(f"result {place}", made, left, right, backend.tolerances))
    for place, (left, right) in enumerate(zip(wanted[1], got[1], strict=True)):
        right = got[0].replaced.get(place, right)
        found.append(
            _difference(f"input {place} after the run", "", tensor_of(left), tensor_of(right), backend.tolerances)
        )
    return [each for each in found if each is not None]


def _difference(
    what: str,
    made: str,
    wanted: torch.Tensor | None,
    got: torch.Tensor | None,
    claimed: Mapping[torch.dtype, Tolerance],
) -> Difference | None:
    if wanted is None or got is None:
        return None
    spec = f"{str(wanted.dtype).removeprefix('torch.')}[{','.join(map(str, wanted.size()))}]"
    return difference(f"{what}, {spec}{made}", wanted, got, program_tolerance(wanted.dtype, claimed))


def _makers(program: Program) -> dict[int, tuple[Call, int]]:
    """The call that makes each value, and the place among its results."""
    return {number: (call, place) for call in program.calls for place, number in enumerate(call.numbers) if number >= 0}
