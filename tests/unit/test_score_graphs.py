"""Functions of attention scores as text, and what is known of their indices."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.semantics.support import observe
from torch_ltc.lowering.score_graphs import UnwritableError, may_fail, read, written
from torch_ltc.pytorch.flex_attention import traced

CPU = torch.device("cpu")
TABLE = torch.arange(12.0).view(3, 4)
HEADS, ROWS, COLUMNS = 3, 4, 4
POSITIONS = {1: (0, 1), 2: (0, HEADS - 1), 3: (0, ROWS - 1), 4: (0, COLUMNS - 1)}


def graph(function: Callable[..., Any], *captured: Any) -> Any:
    return written(traced(function, list(captured), torch.float32))


def fails(function: Callable[..., Any], *captured: Tensor) -> bool:
    sizes = {5 + place: tuple(tensor.size()) for place, tensor in enumerate(captured)}
    return may_fail(graph(function, *captured), POSITIONS, sizes)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, m, n, t: s,
        lambda s, b, h, m, n, t: s - (m - n).abs() * 0.1,
        lambda s, b, h, m, n, t: torch.where(m >= n, s, float("-inf")),
        lambda s, b, h, m, n, t: torch.where(m >= n, s.to(torch.bfloat16), torch.tensor(2.5)).float(),
        lambda s, b, h, m, n, t: s + t[h, m] * t[0, n],
    ],
)
def test_a_function_that_was_read_back_is_the_same(function: Callable[..., Any]) -> None:
    text = json.dumps(graph(function, TABLE))
    score, positions = torch.tensor(1.5), [torch.tensor(i, dtype=torch.int) for i in (0, 1, 2, 3)]
    found = read(json.loads(text), CPU)(score, *positions, TABLE)
    torch.testing.assert_close(found, function(score, *positions, TABLE), rtol=0, atol=0)
    assert "ltc" not in text


def test_a_number_that_the_function_puts_on_the_device_is_part_of_the_text() -> None:
    pending = torch.ones(2).to("ltc") + 1
    with observe() as seen:
        text = graph(lambda s, b, h, m, n: s + torch.tensor(2.5, device="ltc"))
    assert seen.syncs == []
    assert pending.tolist() == [2.0, 2.0]
    positions = [torch.tensor(0, dtype=torch.int)] * 4
    assert read(text, CPU)(torch.tensor(1.0), *positions).item() == 3.5


def test_a_tensor_inside_of_a_function_is_refused() -> None:
    with pytest.raises(UnwritableError):
        graph(lambda s, b, h, m, n: s + torch.tensor([1.0, 2.0])[h])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, m, n, t: s + t[h, m], False),
        (lambda s, b, h, m, n, t: s + t[m, m], True),
        (lambda s, b, h, m, n, t: s + t[h][m], True),
        (lambda s, b, h, m, n, t: s + t[h, m - n], False),
        (lambda s, b, h, m, n, t: s + t[h, m + n], True),
        (lambda s, b, h, m, n, t: s + t[h, (m - n).abs()], False),
        (lambda s, b, h, m, n, t: s + t[h, (m + n).clamp(0, 3)], False),
        (lambda s, b, h, m, n, t: s + t[h, torch.minimum(m, n)], False),
        (lambda s, b, h, m, n, t: s + t[h, (m * 3) % 4], False),
        (lambda s, b, h, m, n, t: s + t[h, -m], False),
        (lambda s, b, h, m, n, t: s + t[h, -m - 1], False),
        (lambda s, b, h, m, n, t: s + t[h, m * 2], True),
        (lambda s, b, h, m, n, t: s + t[h, m * 1000000 * 1000000], True),
        (lambda s, b, h, m, n, t: s + t[h, s.to(torch.int)], True),
        (lambda s, b, h, m, n, t: s + m // 2, False),
        (lambda s, b, h, m, n, t: s + m // n, True),
        (lambda s, b, h, m, n, t: s / n, False),
    ],
)
def test_indices_and_divisors_that_are_known_to_be_right(function: Callable[..., Any], expected: bool) -> None:
    assert fails(function, TABLE) is expected
