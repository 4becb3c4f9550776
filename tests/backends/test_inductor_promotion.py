"""Inductor compiles one program for many sizes, with PyTorch's symbols and guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from torch_ltc import events
from torch_ltc.config import settings


@pytest.fixture(autouse=True)
def inductor() -> Iterator[None]:
    """The device compiles with Inductor, which may refuse nothing, and no program is known."""
    torch_ltc.sync(wait=True)
    torch_ltc.ir_cache.reset()
    with settings.scope(backend="inductor", backend_failure="error", tiers="blocking"):
        yield
        torch_ltc.sync(wait=True)


def floats(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def compare(function: Callable[..., Any], values: Sequence[Sequence[Any]]) -> list[str]:
    """The function gives on the device what it gives in eager, also in its inputs. Why each compilation happened."""
    compiles: list[events.CompileEvent] = []
    stop = events.subscribe(compiles.append, events.CompileEvent)
    try:
        for given in values:
            ours = [value.to("ltc") if isinstance(value, Tensor) else value for value in given]
            theirs = [value.clone() if isinstance(value, Tensor) else value for value in given]
            torch_ltc.sync(wait=True)
            expected = function(*theirs)
            actual = function(*ours)
            torch_ltc.sync(wait=True)
            results = [*(actual if isinstance(actual, tuple) else (actual,)), *ours]
            wanted = [*(expected if isinstance(expected, tuple) else (expected,)), *theirs]
            for left, right in zip(results, wanted, strict=True):
                if isinstance(right, Tensor):
                    assert left.stride() == right.stride()
                    torch.testing.assert_close(left.cpu(), right)
    finally:
        stop()
    return [event.reason for event in compiles]


def attention(query: Tensor, cache: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.cat([cache, new], dim=1)
    weights = (query @ whole.transpose(1, 2) / 2).softmax(-1)
    return weights @ whole, whole


def test_a_growing_cache_is_compiled_once() -> None:
    values = [(floats(2, 1, 4), floats(2, n, 4), floats(2, 1, 4)) for n in (5, 6, 7, 8, 20, 40)]
    assert compare(attention, values) == [""]


def test_slice_offsets_and_writes_in_place_are_compiled_once() -> None:
    def write(x: Tensor, y: Tensor, n: int, factor: float) -> Tensor:
        x[n : n + 2] += y * factor
        return x[n:].sum(0)

    values = [(floats(40, 3), floats(2, 3), n, 0.5 * n) for n in (4, 5, 6, 9, 30)]
    assert compare(write, values) == [""]


def test_indices_are_held_to_the_size_of_each_program() -> None:
    def look_up(table: Tensor, index: Tensor) -> Tensor:
        return table.gather(0, index).exp() * 2

    values = [(floats(n, 3), torch.full((2, 3), n - 1)) for n in (5, 6, 7, 30, 4)]
    assert compare(look_up, values) == [""]
    table, index = floats(6, 3).to("ltc"), torch.full((2, 3), 6).to("ltc")
    torch_ltc.sync(wait=True)
    wrong = look_up(table, index)
    with pytest.raises(Exception, match="index 6 is out of bounds"):
        wrong.cpu()


def test_random_calls_between_parts_have_the_size_of_each_program() -> None:
    def noisy(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout(x.exp(), 0.5).sum(1) * 2

    values = [(floats(n, 3),) for n in (5, 6, 7, 30, 4)]
    assert len(compare(noisy, values)) == 1


def test_views_of_one_buffer_are_compiled_once() -> None:
    def write(base: Tensor) -> Tensor:
        left, right = base[:, :2], base[1:, 1:]
        with settings.scope(backend="interpreter"):
            torch_ltc.sync(wait=True)
        left += right.sum()
        right.mul_(2)
        return left * 1

    values = [(floats(n, 4),) for n in (5, 6, 7, 30, 4)]
    assert len(compare(write, values)) == 1


def test_a_guard_of_inductor_that_does_not_hold_is_named() -> None:
    def reduced(x: Tensor) -> Tensor:
        return x.cos().sum(1) + 1

    # Inductor computes the sum over many columns in another way, and guards the number.
    values = [(floats(4, n),) for n in (5, 6, 7, 9)]
    assert compare(reduced, values) == [""]
    assert len(compare(reduced, [(floats(4, n),) for n in (3, 2, 2, 50_000, 60_000)])) <= 2


def test_a_size_that_changes_late_is_symbolic_from_then_on() -> None:
    def doubled(x: Tensor) -> Tensor:
        return (x * 2).sin()

    first, second = compare(doubled, [(floats(n, 3),) for n in (5, 5, 5, 6, 7, 8, 9, 5)])
    assert first == ""
    assert second.startswith("size 0 of input 0 (used by aten::mul.Tensor at ")
