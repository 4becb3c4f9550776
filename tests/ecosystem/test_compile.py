"""`torch.compile` of code on the device, and with the backend "ltc" of code on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_ltc
from tests.ecosystem.support import compare
from tests.semantics.support import observe
from torch_ltc.events import SyncReason
from torch_ltc.libraries.dynamo import RecordedGraph, compile_graph

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))


def trained(model: nn.Module, step: Any, device: str, lengths: tuple[int, ...] = (4, 4, 5, 6, 4)) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters())
    results = []
    for length in lengths:
        optimizer.zero_grad()
        out = step(torch.linspace(-1, 1, length * 3).view(length, 3).to(device))
        out.square().sum().backward()
        optimizer.step()
        results.append(out)
    return [*results, *model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fullgraph": True},
        {"dynamic": True},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"max_autotune": True}},
        {"backend": "inductor"},
    ],
    ids=str,
)
def test_code_on_the_device_is_recorded(options: dict[str, Any]) -> None:
    def train(device: str) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = network().to(device)
        torch.manual_seed(1)
        return trained(model, torch.compile(model, **options) if device == "ltc" else model, device)

    if options:
        torch.manual_seed(0)
        for one, other in zip(train("ltc"), train("cpu"), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)
    else:
        compare("torch.compile", "a module on ltc, with the tracing of Dynamo", train)


def test_a_function_that_makes_its_tensors_on_the_device_is_recorded() -> None:
    @torch.compile(fullgraph=True)
    def make() -> Tensor:
        return torch.arange(3, device="ltc") * 2

    with observe() as seen:
        assert make().tolist() == [0, 2, 4]
    assert len(seen.syncs) == 1


def test_autocast_and_checkpointing_inside_of_compiled_code() -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 8).to(device), nn.Linear(8, 2).to(device)

        def forward(x: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                hidden = torch.utils.checkpoint.checkpoint(lambda y: first(y).relu(), x, use_reentrant=False)
                return second(hidden)

        out = (torch.compile(forward) if device == "ltc" else forward)(torch.ones(3, 4, device=device))
        out.float().sum().backward()
        return [out, first.weight.grad, second.weight.grad]

    for one, other in zip(run("ltc"), run("cpu"), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)


def test_a_compiled_step_with_its_optimizer_is_that_of_eager() -> None:
    def train(device: str) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.Adam(model.parameters())

        def step(rows: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = torch.compile(step) if device == "ltc" else step
        rows = torch.linspace(-1, 1, 12).view(4, 3).to(device)
        return [*[compiled(rows) for _ in range(4)], *model.parameters()]

    # Dynamo has the optimizer count its steps in a tensor, which rounds in another way.
    for one, other in zip(train("ltc"), train("cpu"), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)


def test_the_step_of_an_optimizer_is_compiled_by_itself() -> None:
    model = nn.Linear(3, 2).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before, step = model.bias.detach().cpu(), torch.compile(optimizer.step)
    with observe() as seen:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3, device="ltc")).sum().backward()
            step()
    # Each step ends a program, as without `torch.compile`.
    assert [sync.reason for sync in seen.syncs].count(SyncReason.OPTIMIZER) == 3
    assert torch.equal(model.bias.cpu(), before - 1.5)


def test_code_that_is_compiled_may_sync_and_read() -> None:
    @torch.compile
    def run(x: Tensor) -> Tensor:
        y = x * 2
        torch_ltc.sync(wait=True)
        torch.ltc.synchronize()
        return y + 1 if y.sum().item() > 0 else y - 1

    assert run(torch.ones(2).to("ltc")).tolist() == [3.0, 3.0]
    assert run(-torch.ones(2).to("ltc")).tolist() == [-3.0, -3.0]


def test_code_of_other_devices_is_one_graph_as_without_the_package() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def cast(x: Tensor) -> Tensor:
        return x.to(torch.get_autocast_dtype("cpu"))

    assert cast(torch.ones(2)).dtype is torch.bfloat16


def test_inductor_still_compiles_for_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    module = pytest.importorskip("torch._inductor.compile_fx")
    monkeypatch.setattr(module, "compile_fx", lambda graph, inputs, **kwargs: asked.append(inputs) or graph.forward)
    assert torch.compile(lambda x: x + 1)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(asked) == 1


# ---- the backend "ltc" ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_backend_trains_on_the_cpu_as_eager_does(dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = network()
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = trained(model, model, "cpu")
    torch.manual_seed(1)
    with observe() as seen:
        found = trained(other, torch.compile(other, backend="ltc", dynamic=dynamic), "cpu")
    # Random numbers are those of the CPU's own generator.
    for one, two in zip(found, expected, strict=True):
        assert one.device.type == "cpu"
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert seen.runs
    assert any(run.backend != "interpreter" for run in seen.runs), "nothing was compiled"


def test_a_graph_is_recorded_once_for_each_kind_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    original = RecordedGraph._record
    monkeypatch.setattr(RecordedGraph, "_record", lambda self, args: recorded.append(1) or original(self, args))
    double = torch.compile(lambda x: (x * 2).sum(), backend="ltc", dynamic=True)
    for length in (3, 3, 4, 3, 4):
        assert double(torch.ones(length)).item() == 2.0 * length
    assert len(recorded) == 2


def test_writes_views_and_constants_are_those_of_eager() -> None:
    table = torch.arange(3.0)

    def function(x: Tensor, factor: int) -> Any:
        x.add_(1)
        rows = x[1:]
        rows.mul_(factor)
        return rows, x.view(-1)[:2], x.sum() + torch.ones(2, device=x.device), x[0] * table[:2]

    compiled = torch.compile(function, backend=compile_graph)
    ours, theirs = torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2)
    for factor in (2, 3):
        found, expected = compiled(ours, factor), function(theirs, factor)
        for one, other in zip((*found, ours), (*expected, theirs), strict=True):
            assert torch.equal(one, other)
        found[0].fill_(7)
        expected[0].fill_(7)
        assert torch.equal(ours, theirs)


def test_a_graph_whose_sizes_depend_on_data_runs_as_it_is() -> None:
    # As one program it cannot be.
    compiled = torch.compile(lambda x: x[x > 1] * 2, backend="ltc")
    assert compiled(torch.arange(4.0)).tolist() == [4.0, 6.0]
