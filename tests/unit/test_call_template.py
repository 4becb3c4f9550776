"""Tests of call templates: what new instructions take from earlier calls on the same shapes, and what not."""

import torch

import torch_ltc
from torch_ltc.execute.pending import pending_program
from torch_ltc.program.instruction import Call, Scalar, Value


def recorded(result: torch.Tensor) -> list[Call]:
    calls = pending_program([result]).calls
    torch_ltc.sync()
    return calls


def test_calls_on_the_same_shapes_share_what_was_inferred_and_differ_in_their_operands() -> None:
    x = torch.randn(5, 7).to("ltc")
    y = torch.randn(5, 7).to("ltc")
    first, second, third = recorded(((x + y) + x) + y)
    assert first.returns is second.returns is third.returns
    assert first.layout is second.layout is third.layout
    assert [call.args[:2] for call in (first, second, third)] == [
        (Value(0), Value(1)),
        (Value(2), Value(0)),
        (Value(3), Value(1)),
    ]
    assert [call.operands for call in (first, second, third)] == [(0, 1), (2, 0), (3, 1)]
    assert [call.numbers for call in (first, second, third)] == [(2,), (3,), (4,)]


def test_each_call_has_its_own_line_and_its_own_slot_for_a_number() -> None:
    x = torch.randn(3, 9).to("ltc")
    y = x * 2.0
    z = y * 2.0
    first, second = recorded(z)
    assert second.source.line == first.source.line + 1
    assert [call.args[1] for call in (first, second)] == [Scalar(0, float), Scalar(1, float)]


def test_calls_on_other_shapes_share_nothing() -> None:
    x = torch.randn(2, 11).to("ltc")
    first, second = recorded(x.relu()[:1].relu())[::2]
    assert first.returns is not second.returns
    assert first.layout is not second.layout


def test_another_default_dtype_gives_other_results() -> None:
    x = torch.arange(13).to("ltc")
    assert (x + 1.5).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x + 1.5).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x + 1.5).dtype is torch.float32


def test_a_call_whose_operands_share_memory_is_inferred_by_itself() -> None:
    x = torch.zeros(4, 6)
    device, other = x.to("ltc"), torch.ones(4, 6).to("ltc")
    device.add_(other)
    device.add_(device)
    x.add_(torch.ones(4, 6)).add_(x)
    assert torch.equal(device.cpu(), x)
