"""extract_compiled_graph: a module recorded once, run many times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.semantics.support import assert_same, observe
from torch_ltc import extract_compiled_graph
from torch_ltc.config import settings


class Subtract(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


class ConstantScale(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a * 2


class AddCMul(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.addcmul(a, b, c, value=5)


class MultiReturn(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a + 1, b - 1)


class DuplicateReturn(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        c = a + b
        return (a - b, c, c, 5)


class ReturnsAnInput(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a + b, a)


class InPlaceArgument(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.sub_(b)
        return b - 1


class ViewOfAnArgument(nn.Module):
    def forward(self, a: Tensor) -> dict[str, Tensor]:
        return {"t": a.t() + 1, "sum": a.sum(0)}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, a: Tensor) -> Tensor:
        return torch.relu(self.layer(a)) + torch.ones(3)


CASES: dict[str, tuple[nn.Module, int]] = {
    "sub": (Subtract(), 2),
    "constant scale": (ConstantScale(), 1),
    "addcmul": (AddCMul(), 3),
    "multi return": (MultiReturn(), 2),
    "duplicate return": (DuplicateReturn(), 2),
    "returned input": (ReturnsAnInput(), 2),
    "in-place argument": (InPlaceArgument(), 2),
    "view of an argument": (ViewOfAnArgument(), 1),
}


def inputs(count: int, seed: int) -> list[Tensor]:
    """Random matrices."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, generator=generator) for _ in range(count)]


def call(module: Any, arguments: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """What the module returns on copies of the arguments, and the copies afterwards."""
    copies = [argument.clone() for argument in arguments]
    return module(*copies), copies


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", CASES)
def test_extracted_graph_gives_what_the_module_gives(name: str) -> None:
    module, count = CASES[name]
    compiled = extract_compiled_graph(fx.symbolic_trace(module), inputs(count, 0))
    for seed in range(4):
        ours, our_arguments = call(compiled, inputs(count, seed))
        theirs, their_arguments = call(module, inputs(count, seed))
        assert_same(ours, theirs, exact=False)
        assert_same(our_arguments, their_arguments, exact=False)


def test_extraction_leaves_example_inputs_and_module_alone() -> None:
    example = inputs(2, 0)
    expected = [value.clone() for value in example]
    module = nn.Linear(4, 3)
    extract_compiled_graph(InPlaceArgument(), example)
    extract_compiled_graph(module, example[:1])
    assert_same(example, expected)
    assert module.weight.device.type == "cpu"


def test_module_with_parameters_and_factory_calls() -> None:
    module = Linear()
    path_values = fx.symbolic_trace(module)
    for node in path_values.graph.nodes:
        if node.target is torch.ones:
            node.kwargs = {**node.kwargs, "device": "cpu"}
    path_values.recompile()
    compiled = extract_compiled_graph(path_values, inputs(1, 0))
    for seed in range(3):
        assert_same(compiled(*inputs(1, seed)), module(*inputs(1, seed)).detach(), exact=False)


def test_running_the_extracted_graph_records_nothing() -> None:
    compiled = extract_compiled_graph(Subtract(), inputs(2, 0))
    with observe() as seen:
        for seed in range(3):
            compiled(*inputs(2, seed))
    assert seen.syncs == []
    assert len(seen.runs) == 3


def test_results_of_one_call_are_not_overwritten_by_the_next() -> None:
    compiled = extract_compiled_graph(Subtract(), inputs(2, 0))
    first = compiled(*inputs(2, 1))
    kept = first.clone()
    compiled(*inputs(2, 2))
    assert_same(first, kept)


def test_a_fallback_inside_is_an_error_that_names_it() -> None:
    with (
        settings.scope(force_fallback="aten::sub", fallback="allow"),
        pytest.raises(RuntimeError, match=r"Fail to extract the compiled graph because of fallback: aten::sub"),
    ):
        extract_compiled_graph(fx.symbolic_trace(Subtract()), inputs(2, 0))
    compiled = extract_compiled_graph(fx.symbolic_trace(Subtract()), inputs(2, 0))
    assert_same(compiled(*inputs(2, 3)), Subtract()(*inputs(2, 3)))


def test_two_extracted_graphs_do_not_disturb_each_other() -> None:
    scale = extract_compiled_graph(ConstantScale(), inputs(1, 0))
    subtract = extract_compiled_graph(Subtract(), inputs(2, 0))
    for seed in range(3):
        assert_same(scale(*inputs(1, seed)), inputs(1, seed)[0] * 2)
        assert_same(subtract(*inputs(2, seed)), Subtract()(*inputs(2, seed)))
