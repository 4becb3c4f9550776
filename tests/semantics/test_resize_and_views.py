"""A resized tensor and older views of its memory keep their own shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

import torch_ltc


def test_a_view_made_before_a_resize_keeps_its_size() -> None:
    results = {}
    for device in ("cpu", "ltc"):
        sums = []
        for _ in range(3):
            given = torch.arange(6.0).view(2, 3).to(device).clone()
            view = given.detach()
            given.resize_(4, 3)
            sums.append(view.sum(0).cpu())
            torch_ltc.sync()
        results[device] = sums
    for mine, eager in zip(results["ltc"], results["cpu"], strict=True):
        assert torch.equal(mine, eager)


def test_a_power_of_a_mask_has_eagers_dtype() -> None:
    mask = torch.tensor([True, False])
    assert (mask.to("ltc") ** True).cpu().dtype is (mask**True).dtype


def test_factors_of_list_calls_may_stay_on_the_cpu() -> None:
    factors = torch.tensor([0.5, 2.0])
    tensors = [torch.ones(3), torch.full((2,), 3.0)]
    eager = torch._foreach_addcdiv(tensors, tensors, tensors, factors)
    moved = [tensor.to("ltc") for tensor in tensors]
    mine = torch._foreach_addcdiv(moved, moved, moved, factors)
    for left, right in zip(mine, eager, strict=True):
        assert torch.equal(left.cpu(), right)


class Wrapping(Tensor):
    """A tensor that computes on another one, and has no memory itself."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Wrapping:
        made: Wrapping = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, elem.size(), strides=elem.stride(), dtype=elem.dtype, device=elem.device
        )
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*(arg.elem if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})))


def test_a_tensor_that_wraps_another_has_views_of_its_own() -> None:
    # Subclasses that must look like views of each other make them so.
    wrapping = Wrapping(torch.arange(6.0, device="ltc").view(2, 3))
    with no_dispatch():
        view = wrapping.t()[1:].expand(4, 2, 2)
        assert view.shape == (4, 2, 2)
        assert view.stride() == (0, 1, 3)
        assert view.untyped_storage()._cdata == wrapping.untyped_storage()._cdata
    assert (wrapping + 1).elem.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_memory_of_columns_is_seen_with_elements_of_another_size() -> None:
    def run(device: str) -> list[int]:
        columns = torch.empty_strided((2, 3), (1, 2), device=device).fill_(1.5)
        columns[0, 0] = 2.0
        halves = torch.empty(0, dtype=torch.int16, device=device).set_(columns.untyped_storage(), 0, (12,), (1,))
        return [*(halves + 1).tolist(), *halves.tolist()]

    assert run("ltc") == run("cpu")
