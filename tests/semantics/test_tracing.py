"""PyTorch's tracers, modes and tools see the device as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.semantics.support import assert_like_eager, assert_same, lazy

pytestmark = pytest.mark.usefixtures("no_fallback")


class Block(nn.Module):
    """A small module."""

    def forward(self, x: Tensor) -> Tensor:
        """The tail of a layer."""
        return x.relu() * 2 + 1


def test_jit_trace_and_script_run_on_the_device() -> None:
    x = lazy(torch.tensor([-1.0, 2.0]))
    path_values = torch.jit.trace(Block(), (x,))
    scripted = torch.jit.script(Block())
    for _ in range(2):
        assert path_values(x).tolist() == [1.0, 5.0]
        assert scripted(x).tolist() == [1.0, 5.0]


def test_export_takes_modules_on_the_device() -> None:
    exported = torch.export.export(Block(), (torch.ones(2, device="ltc"),))
    assert exported.module()(lazy(torch.tensor([-1.0, 3.0]))).tolist() == [1.0, 7.0]


def test_make_fx_traces_what_is_recorded() -> None:
    graph = make_fx(lambda x: x.sin() + 1)(torch.ones(2, device="ltc"))
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["aten.sin.default", "aten.add.Tensor"]
    assert_same(graph(lazy(torch.zeros(2))), torch.ones(2))


def test_dispatch_modes_see_every_call() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = lazy(torch.ones(2, 2))
    with Names() as names:
        y = (x.t() @ x).add_(1)
    assert names.seen == ["aten.t.default", "aten.mm.default", "aten.add_.Tensor"]
    assert y.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_flop_counter_counts() -> None:
    with FlopCounterMode(display=False) as counter:
        torch.ones(2, 3, device="ltc") @ torch.ones(3, 4, device="ltc")
    assert counter.get_total_flops() == 48


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_finds_the_call_that_made_a_nan() -> None:
    x = torch.zeros(2, device="ltc", requires_grad=True)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
        (x.sqrt() * 0).sum().backward()


def test_tensor_subclasses_keep_their_type() -> None:
    class Named(torch.Tensor):
        pass

    x = lazy(torch.ones(2)).as_subclass(Named)
    assert type(x + 1) is Named
    assert (x[1:] * 3).tolist() == [3.0]


def test_saved_tensors_may_wait_on_the_cpu() -> None:
    def compute(device: str) -> list[Tensor]:
        x = torch.linspace(0, 1, 4).to(device).requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            y = (x * x).exp().sum()
        y.backward()
        return [x.grad]

    assert_like_eager(compute, exact=False)


def test_parameters_travel_as_one_vector() -> None:
    layer = nn.Linear(2, 2).to("ltc")
    before = [parameter.detach().cpu() for parameter in layer.parameters()]
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector * 2, layer.parameters())
    assert_same([parameter.detach() for parameter in layer.parameters()], [value * 2 for value in before])


def test_printing_large_and_small_tensors() -> None:
    assert repr(torch.ones(2000, device="ltc")) == "tensor([1., 1., 1.,  ..., 1., 1., 1.], device='ltc:0')"
    assert repr(torch.tensor(3, device="ltc")) == "tensor(3, device='ltc:0')"
    assert repr(torch.zeros(0, 2, device="ltc")) == "tensor([], device='ltc:0', size=(0, 2))"
    parameter = nn.Parameter(torch.ones(1, device="ltc"))
    assert repr(parameter) == "Parameter containing:\ntensor([1.], device='ltc:0', requires_grad=True)"
    half = torch.ones(1, dtype=torch.bfloat16, device="ltc")
    assert repr(half) == "tensor([1.], device='ltc:0', dtype=torch.bfloat16)"
    grad_fn = torch.ones(1, device="ltc", requires_grad=True) * 2
    assert "grad_fn=<MulBackward0>" in repr(grad_fn)
