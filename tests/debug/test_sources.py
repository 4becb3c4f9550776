"""Every instruction knows the user's line, the module that ran there and, in a backward pass, the forward line."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from tests.support.lines import marked
from torch_ltc.execute.pending import pending_program
from torch_ltc.program.instruction import Call
from torch_ltc.program.text import program_lines
from torch_ltc.record import call_site
from torch_ltc.record.recorder import recorder
from torch_ltc.source import Source


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)  # fc
        return torch.tanh(y)  # tanh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.exp()  # exp


def pending() -> list[Call]:
    found = [node.instruction for node in recorder.tree.path(recorder.node)]
    return [one for one in found if isinstance(one, Call)]


def source_of(name: str, place: int = 0) -> Source:
    return [call for call in pending() if call.name == name][place].source


def test_calls_know_line_function_and_module() -> None:
    net = Net().to("ltc")
    net(torch.ones(2, 4).to("ltc"))
    first, second = source_of("aten::linear"), source_of("aten::linear", 1)
    assert (first.line, first.module) == (marked(__file__, "fc"), "Net.blocks.0.fc")
    assert (second.line, second.module) == (marked(__file__, "fc"), "Net.blocks.1.fc")
    assert first.file == __file__
    assert first.function.endswith("forward")
    tanh, exp = source_of("aten::tanh", 1), source_of("aten::exp")
    assert (tanh.line, tanh.module) == (marked(__file__, "tanh"), "Net.blocks.1")
    assert (exp.line, exp.module) == (marked(__file__, "exp"), "Net")


def test_inputs_know_the_line_that_uses_them_first() -> None:
    net = Net().to("ltc")
    lines = program_lines(pending_program([net(torch.ones(2, 4).to("ltc"))]))
    inputs = [line for text, line in lines if "= input(" in text]
    assert len(inputs) == 5
    assert {line.line for line in inputs} == {marked(__file__, "fc")}
    assert inputs[0].module == "Net.blocks.0.fc"


def test_outside_of_modules_there_is_no_path() -> None:
    torch.ones(2).to("ltc").exp()
    assert source_of("aten::exp").module == ""


def test_backward_calls_know_the_forward_line_and_module() -> None:
    net = Net().to("ltc")
    net(torch.ones(2, 4).to("ltc")).sum().backward()  # backward
    for place, path in ((0, "Net.blocks.1"), (1, "Net.blocks.0")):
        found = source_of("aten::tanh_backward", place)
        assert (found.line, found.backward) == (marked(__file__, "backward"), True)
        assert found.forward is not None
        assert (found.forward.line, found.forward.module) == (marked(__file__, "tanh"), path)
        assert found.module == path
    linear = source_of("aten::linear_backward")
    assert linear.forward is not None
    assert (linear.forward.line, linear.forward.module) == (marked(__file__, "fc"), "Net.blocks.1.fc")


def test_frames_of_threads_that_run_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> dict[int, Any]:
        raise AssertionError("CPython 3.11 may end the process")

    monkeypatch.setattr(sys, "_current_frames", look)
    x = torch.ones(3, device="ltc", requires_grad=True)
    inner: list[int] = []

    def hook(gradient: torch.Tensor) -> None:
        # A backward pass within another one: its own line, and then again that of the outer one.
        with torch.enable_grad():
            torch.ones(2, device="ltc", requires_grad=True).cosh().sum().backward()  # inner
        inner.append(len(gradient))

    x.register_hook(hook)
    x.exp().atan().sum().backward()  # outer
    assert inner
    assert source_of("aten::sinh").line == marked(__file__, "inner")
    assert source_of("aten::exp").line == marked(__file__, "outer")


def test_the_forward_line_is_known_where_only_the_backward_pass_is_new() -> None:
    net = Net().to("ltc")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for scale in (1, 1, 2.5):
        loss = net(torch.ones(2, 4).to("ltc")).sum()
        if scale != 1:
            loss = loss * scale
        loss.backward()
        found = [call.source.forward for call in pending() if call.name == "aten::tanh_backward"]
        assert [None if one is None else one.line for one in found] == [marked(__file__, "tanh")] * 2
        optimizer.step()
        optimizer.zero_grad()


def test_the_forward_line_is_known_after_a_read() -> None:
    net = Net().to("ltc")
    for scale in (1, 1, 2.5):
        loss = net(torch.ones(2, 4).to("ltc")).sum()
        loss.item()
        (loss * scale).backward()
        found = [call.source.forward for call in pending() if call.name == "aten::tanh_backward"]
        assert [None if one is None else one.line for one in found] == [marked(__file__, "tanh")] * 2
        torch_ltc.sync()


def test_a_call_that_needs_no_gradient_is_not_taken_for_the_forward_call() -> None:
    x = torch.ones(3, device="ltc", requires_grad=True)
    other = torch.ones(3).to("ltc")
    y = x.exp()  # with gradient
    other.sin()
    y.sum().backward()
    found = [call.source.forward for call in pending() if call.source.forward is not None]
    assert marked(__file__, "with gradient") in {one.line for one in found}
    assert all(one.line != marked(__file__, "with gradient") + 1 for one in found)


@pytest.mark.filterwarnings("ignore::torch_ltc.errors.FallbackWarning")
def test_what_ran_eagerly_does_not_lend_its_gradient_to_the_next_call() -> None:
    x = torch.ones(3, device="ltc", requires_grad=True)
    chosen = x[x > 0]
    torch.ones(3).to("ltc").sin()  # independent
    chosen.sum().backward()
    found = [call.source.forward for call in pending() if call.source.forward is not None]
    assert found
    assert all(one.line != marked(__file__, "independent") for one in found)


def test_only_so_many_nodes_of_a_pass_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_site, "_MOST_NODES", 5)
    y = x = torch.ones(2, device="ltc", requires_grad=True)
    for _ in range(10):
        y = y.sin()
    y.sum().backward()
    found = [call.source.forward is not None for call in pending() if call.source.backward]
    assert sum(found) == 5
    assert found[0]
    assert not found[-1]
    del x


def test_a_backward_of_the_users_own_has_the_users_line() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad.cos()  # own backward

    x = torch.ones(3, device="ltc", requires_grad=True)
    Double.apply(x).sum().backward()
    assert source_of("aten::cos").line == marked(__file__, "own backward")


def test_a_module_that_its_caller_does_not_own_is_named_by_its_class() -> None:
    loose = [nn.Tanh()]

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return loose[0](x)

    Calls()(torch.ones(2).to("ltc"))
    assert source_of("aten::tanh").module == "Tanh"


def test_a_module_that_cannot_name_its_parts_records_all_the_same() -> None:
    class Broken(nn.Module):
        def named_modules(self, *args: object, **kwargs: object) -> object:
            raise RuntimeError("not today")

        def forward(self, x: Tensor) -> Tensor:
            return x.sinh()

    assert Broken()(torch.zeros(2).to("ltc")).tolist() == [0, 0]
    Broken()(torch.zeros(3).to("ltc"))
    assert source_of("aten::sinh").module == "Broken"


def test_modules_that_come_and_go_keep_their_own_names() -> None:
    x = torch.ones(2).to("ltc")
    for _ in range(50):
        for kind in (nn.Tanh, nn.Sigmoid):
            nn.Sequential(kind())(x)
    names = {(call.name, call.source.module) for call in pending()}
    assert names == {("aten::tanh", "Sequential.0"), ("aten::sigmoid", "Sequential.0")}


def test_threads_do_not_take_each_others_forward_lines() -> None:
    wrong: list[Source] = []

    def train() -> None:
        for size in range(2, 30):
            x = torch.ones(size, device="ltc", requires_grad=True)
            x.exp().sum().backward()

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for node in recorder.tree.nodes():
        call = node.instruction
        if isinstance(call, Call) and call.source.forward is not None and call.source.forward.file != __file__:
            wrong.append(call.source)
    assert wrong == []


def test_a_long_chain_is_freed_without_recursion() -> None:
    x = torch.ones(2, device="ltc", requires_grad=True)
    y = x
    for number in range(45_000):
        y = y + 1 if number % 2 else y * 1.0
    y.sum().backward()
    del y
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]


def test_a_source_describes_itself() -> None:
    forward = Source("net.py", 3, "Net.forward", module="Net.fc")
    assert forward.describe() == "net.py:3 in Net.forward [Net.fc]"
    backward = Source("train.py", 9, "main", True, "Net.fc", forward)
    assert backward.describe() == (
        "train.py:9 in main (in its backward), the gradient of net.py:3 in Net.forward [Net.fc]"
    )
    assert str(Source("", 0, "")) == "an unknown line"
