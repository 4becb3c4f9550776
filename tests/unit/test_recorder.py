"""Recording: one tuple compared per call, nothing inferred twice, numbers and sources kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_ltc
from torch_ltc.program.instruction import Call, Input
from torch_ltc.record.arguments import freeze, plain_number, storage_groups
from torch_ltc.record.buffer import buffer_of
from torch_ltc.record.recorder import recorder
from torch_ltc.shapes import inference as inference


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def pending() -> list[Input | Call]:
    """The instructions recorded since the last sync."""
    return [node.instruction for node in recorder.tree.path(recorder.node) if node.instruction is not None]


def names() -> list[str]:
    return [item.name if isinstance(item, Call) else "input" for item in pending()]


def test_calls_are_recorded_as_they_happen_views_and_in_place_calls_included() -> None:
    x = torch.zeros(2, 3).to("ltc")
    y = x.t()
    y.add_(1)
    z = y @ x
    assert names() == ["input", "aten::t", "aten::add_.Tensor", "aten::mm"]
    assert z.shape == (3, 3)


def test_an_input_is_brought_in_once_for_each_shape() -> None:
    x = torch.zeros(4).to("ltc")
    view = x[1:3]
    torch_ltc.sync(wait=True)
    a = x + x
    b = view + view
    c = x * view.sum()
    inputs = [item for item in pending() if isinstance(item, Input)]
    assert [(item.buffer, item.spec.size) for item in inputs] == [(0, (4,)), (0, (2,))]
    assert len(recorder.inputs) == 1
    del a, b, c


def test_numbers_are_inputs_of_the_program() -> None:
    x = torch.zeros(2).to("ltc")
    y = (x + 1.5) * 2 - torch.tensor(3.0)
    assert recorder.scalars == [1.5, 2]
    assert len(recorder.inputs) == 2, "a CPU tensor without dimensions is an input, not a number"
    assert y.shape == (2,)


def test_a_refused_call_leaves_no_number_behind() -> None:
    x, wrong = torch.zeros(2).to("ltc"), torch.zeros(3).to("ltc")
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.add(x, wrong, alpha=7)
        with pytest.raises(RuntimeError):
            x.view(5).add(2.5)
    assert recorder.numbers == []
    y = x * 4.0
    assert recorder.scalars == [4.0]
    assert y.tolist() == [0.0, 0.0]


def test_a_program_recorded_again_infers_nothing_and_adds_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> torch.Tensor:
        x = torch.ones(3, 4).to("ltc")
        y = torch.nn.functional.layer_norm(x @ x.t(), (3,)).relu()
        y[0].mul_(2)
        return y.sum(0)

    step().cpu()
    size = recorder.tree.size

    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("asked for what is known")

    monkeypatch.setattr(inference, "_infer", refuse)
    for _ in range(3):
        step().cpu()
    assert recorder.tree.size == size


def test_the_tenth_identical_layer_infers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()).to("ltc")
    x = torch.ones(2, 5).to("ltc")
    with torch.no_grad():
        for _ in range(3):
            x = layer(x)
        monkeypatch.setattr(inference, "_infer", lambda *args: pytest.fail("asked for what is known"))
        for _ in range(7):
            x = layer(x)
    assert x.shape == (2, 5)


def test_each_instruction_knows_the_users_line() -> None:
    torch_ltc.ir_cache.reset()
    x = torch.zeros(2).to("ltc")
    y = x.cosh().sinh()
    z = torch.nn.functional.softplus(y)
    sources = {item.name: item.source for item in pending() if isinstance(item, Call)}
    assert sources["aten::cosh"].file == __file__
    assert sources["aten::cosh"].function.endswith("test_each_instruction_knows_the_users_line")
    assert sources["aten::softplus"].line == sources["aten::sinh"].line + 1
    assert z.shape == (2,)


def test_instructions_of_backward_name_the_line_that_called_it() -> None:
    torch_ltc.ir_cache.reset()
    x = torch.ones(2, device="ltc", requires_grad=True)
    loss = x.asinh().sum()
    torch_ltc.sync(wait=True)
    loss.backward()
    sources = {str(item.source) for item in pending() if isinstance(item, Call)}
    assert all("test_recorder.py" in source for source in sources), sources
    assert any("backward" in source for source in sources)


def test_value_numbers_die_with_their_program() -> None:
    x = torch.ones(2, device="ltc") * 2
    torch_ltc.sync(wait=True)
    y = x + 1
    assert names() == ["input", "aten::add.Tensor"]
    assert buffer_of(x).number < recorder.base <= buffer_of(y).number


def test_a_tensor_made_below_python_is_found_by_its_storage() -> None:
    x = torch.ones(2, 3, device="ltc") * 2
    detached = x.detach()
    detached.__dict__.clear()
    y = detached + 1
    conjugated = torch.view_as_complex(torch.ones(2, 2, device="ltc") * 3).conj()
    assert y.sum().item() == 18.0
    assert conjugated.cpu().imag.tolist() == [-3.0, -3.0]


def test_storage_groups_tell_who_shares() -> None:
    base, other = torch.zeros(4), torch.zeros(4)
    assert storage_groups([base, other, base[1:], other[:2]]) == [0, 1, 0, 1]


def test_freezing_and_plain_numbers() -> None:
    assert freeze([1, [2, (3,)], "x"]) == (1, (2, (3,)), "x")
    numpy = pytest.importorskip("numpy")
    for value, kind in [
        (numpy.float64(2.5), float),
        (torch.tensor(4), int),
        (True, bool),
    ]:
        plain = plain_number(value)
        assert type(plain) is kind
        assert plain == value
    with pytest.raises(TypeError, match="expected a number, got str"):
        plain_number("x")


def test_numpy_numbers_record_as_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    x = torch.ones(2, device="ltc")
    assert (x * numpy.float32(2.5) + numpy.int64(3)).tolist() == [5.5, 5.5]
    assert (x * numpy.float64(2.5)).dtype is torch.float32


def test_a_wrong_number_is_refused_also_where_the_call_is_known() -> None:
    target = torch.zeros(4).to("ltc")
    for _ in range(2):
        target.bernoulli_(0.5)
        torch_ltc.sync(wait=True)
    with pytest.raises(RuntimeError, match="bernoulli_ expects p to be in"):
        target.bernoulli_(1.5)
    target.bernoulli_(1.0)
    assert target.tolist() == [1.0] * 4


def test_templates_fill_operands_that_go_by_name_only() -> None:
    # The mask of attention is one: the second layer's call is made from the first one's template.
    layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)]
    x, mask = torch.randn(2, 4, 16), torch.full((4, 4), float("-inf")).triu(1)
    results = []
    for device in ("cpu", "ltc"):
        y, allowed = x.to(device), mask.to(device)
        for layer in layers:
            y = layer.to(device)(y, src_mask=allowed)
        results.append(y.detach().cpu())
    assert torch.equal(*results)
