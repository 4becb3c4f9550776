"""Functions of some tensors and an integer, called on the device and in eager with one value after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import assert_same
from torch_ltc.config import settings


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def floats(*size: int) -> Tensor:
    return torch.randn(*size, generator=generator())


@dataclass(frozen=True, slots=True)
class Case:
    """A function of some tensors and an integer, what it is given for each integer, and how often it may be
    compiled."""

    name: str
    inputs: Callable[[int], Sequence[Tensor]]
    function: Callable[..., Any]
    values: tuple[int, ...] = (4, 7, 5, 9, 12)
    compiles: int = 1


def moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on a device, in memory of its own that is laid out as it is."""
    if tensor.is_contiguous() and not tensor.storage_offset():
        return tensor.clone().to(device)
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return base.clone().to(device).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def results(case: Case, device: str, value: int) -> Any:
    """What the function gives, and what it leaves in its inputs."""
    with settings.scope(backend="interpreter"):
        given = [moved(tensor, device) for tensor in case.inputs(value)]
        torch_ltc.sync(wait=True)
    out = case.function(*given, value)
    torch_ltc.sync(wait=True)
    return out, given


def compare(case: Case, value: int) -> None:
    """The function gives on the device what it gives in eager."""
    assert_same(results(case, "ltc", value), results(case, "cpu", value))
