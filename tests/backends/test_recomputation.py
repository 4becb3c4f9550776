"""Values that code of Inductor computes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_ltc
from tests.semantics.support import observe
from torch_ltc.backends.inductor.recomputation import recompute
from torch_ltc.config import settings
from torch_ltc.lowering.registry import registry

SIZE = 256


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def layers(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(SIZE, SIZE) / SIZE**0.5 for _ in range(count)]


def step(rows: Tensor, *weights: Tensor) -> list[Tensor]:
    """Forward and backward of a few layers, written out."""
    inputs, sums = [rows], []
    for weight in weights:
        sums.append(inputs[-1] @ weight)
        inputs.append(sums[-1].tanh() * 2)
    gradient, gradients = inputs[-1] - 1, []
    for weight, before, after in zip(reversed(weights), reversed(sums), reversed(inputs[:-1])):
        gradient = gradient * (1 - before.tanh().square()) * 2
        gradients.append(after.t() @ gradient)
        gradient = gradient @ weight.t()
    return [(inputs[-1] - 1).square().sum(), *gradients]


def test_what_is_cheap_to_compute_is_not_kept() -> None:
    inputs = layers(6)
    expected = step(*inputs)
    module = traced(step, *inputs)
    found = recompute(module)
    # The inputs of all layers but the first, which is given, and the last, which is used again at once.
    assert found.count >= 3
    assert found.after_bytes < 0.8 * found.before_bytes
    assert f"{found.count} values computed again" in found.text
    for one, other in zip(module(*inputs), expected, strict=True):
        assert torch.equal(one, other)


def test_each_value_that_is_computed_again_waits_for_one_of_backward() -> None:
    module = traced(step, *layers(6))
    before = {node: list(node.all_input_nodes) for node in module.graph.nodes}
    recompute(module)
    chosen = [node for node in module.graph.nodes if node.target is torch.ops.aten.where.self]
    assert chosen
    for node in chosen:
        condition, one, other = node.args
        assert one is other
        reached = [condition]
        while reached and reached[-1].target is not torch.ops.aten.mm.default:
            reached.append(reached[-1].args[0])
        assert before[reached[-1]], "it hangs on no matrix product"


def test_results_and_random_numbers_are_not_computed_again() -> None:
    def with_results(rows: Tensor, *weights: Tensor) -> list[Tensor]:
        hidden = (rows @ weights[0]).tanh()
        noise = torch.rand_like(rows) + 1
        out = hidden @ weights[1] @ noise
        for weight in weights:
            out = out @ weight
        return [hidden, out @ noise.t(), out @ hidden.t()]

    module = traced(with_results, *layers(5))
    assert recompute(module).count == 0


def test_a_graph_that_keeps_nothing_is_left_as_it_is() -> None:
    module = traced(lambda x, y: ((x @ y).relu() @ y).sum(), *layers(2))
    code = module.code
    found = recompute(module)
    assert (found.count, found.text, module.code) == (0, "", code)


# ---- compiled -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A convolution, its norm, and what was before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, image: Tensor) -> Tensor:
        return (self.norm(self.conv(image)) + image).relu()


def train(device: str, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.randn(8, 8, 32, 32).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        torch_ltc.wait_for_compiles()
    return [*losses, *[parameter.detach().cpu() for parameter in model.parameters()]]


@pytest.mark.compilers
def test_a_training_computes_the_same_and_says_what_it_saves(tmp_path: Any) -> None:
    expected = train("cpu", 5)
    with settings.scope(backend="inductor", backend_failure="error", cache_dir=str(tmp_path)):
        with observe() as seen:
            found = train("ltc", 5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        remarks = [event.remark for event in seen.compiles if event.remark]
        assert remarks
        assert "computed again instead of kept" in remarks[-1]
        program = next(event.program for event in seen.compiles if event.remark)
        assert remarks[-1] in str(torch_ltc.explain(program))
        assert registry.get("inductor").recomputes  # type: ignore[attr-defined]
