"""Checks on what a backend returns, before any tensor of the user holds it."""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.errors import BackendError, LtcError
from torch_ltc.lowering.backend_data import BackendData
from torch_ltc.lowering.kernel_call import laid_out
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.spec import Spec


class WrongResultError(BackendError):
    """A backend returned something else than the program says: too few results, another dtype or shape.

    When: after a run, before any tensor holds the results. What to do: correct the backend; the message names the
    output and the call that makes it. `python -m torch_ltc conformance NAME` finds more of the kind.
    """


def check_count(backend: str, program: Program, results: Any, expected: int) -> list[Any]:
    """The results as a list of the right length."""
    if not isinstance(results, (list, tuple)):
        raise WrongResultError(
            f"{backend} returned {type(results).__name__} for program {program.identity}, not a sequence of results",
            hint="return a list, also of one result",
        )
    if len(results) != expected:
        raise WrongResultError(
            f"{backend} returned {len(results)} results for program {program.identity}, which has {expected}",
            hint="return one result per number in program.results",
        )
    return list(results)


def check_result(backend: str, program: Program, number: int, result: Any, spec: Spec) -> None:
    """Raise unless the result is data of this dtype and shape."""
    if type(result) is torch.Tensor and result.size() == spec.size and result.dtype is spec.dtype:
        # What nearly all results are.
        if result.device == program.device:
            return
    elif isinstance(result, LtcError):
        return
    if isinstance(result, BackendData):
        size, dtype, device = result.spec.size, result.spec.dtype, result.device.torch
    elif isinstance(result, torch.Tensor):
        size, dtype, device = tuple(result.size()), result.dtype, result.device
    else:
        raise _wrong(backend, program, number, spec, type(result).__name__)
    if size != spec.size or dtype is not spec.dtype or device != program.device:
        where = "" if device == program.device else f" on {device}"
        raise _wrong(backend, program, number, spec, f"{str(dtype).removeprefix('torch.')}{list(size)}{where}")


def _wrong(backend: str, program: Program, number: int, spec: Spec, got: str) -> WrongResultError:
    maker = _maker(program, number)
    made_by = f", the result of {maker.name}" if maker is not None else ""
    return WrongResultError(
        f"{backend} returned {got} for %{number} of program {program.identity}{made_by}, where {spec} was recorded",
        source=str(maker.source) if maker is not None else None,
    )


def _maker(program: Program, number: int) -> Call | None:
    return next((call for call in program.calls if number in call.numbers), None)


def fitted(result: torch.Tensor | BackendData, spec: Spec) -> torch.Tensor | BackendData:
    """The result in the recorded layout: itself, or a copy."""
    if isinstance(result, BackendData):
        return result if result.spec is spec else laid_out(result.tensor(), spec)
    same = result.stride() == spec.stride and result.storage_offset() == spec.offset
    if same and not (result.is_conj() or result.is_neg()):
        return result
    if 0 in spec.size or (spec.numel == 1 and spec.offset == 0 and result.storage_offset() == 0):
        return result.as_strided(spec.size, spec.stride, spec.offset)
    return laid_out(result, spec)
