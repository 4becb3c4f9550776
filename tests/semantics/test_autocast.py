"""`torch.autocast` and `torch.amp.GradScaler` on the device: what the CPU gives, and no sync."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_over

import torch_ltc
from torch_ltc.config import settings
from torch_ltc.events import SyncEvent, SyncReason, subscribe

DTYPES = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    """An image classifier with what autocast treats in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return torch.cat([self.linear(x), x[:, :1]], 1).log_softmax(1)


def train(device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        x, y = torch.randn(4, 3, 8, 8).to(device), torch.randint(0, 6, (4,)).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            out = model(x)
            loss = nn.functional.nll_loss(out, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [*losses, *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_under_autocast_equals_the_cpus(dtype: torch.dtype) -> None:
    torch.testing.assert_close(train("ltc", dtype), train("cpu", dtype), rtol=0, atol=0)


def test_regions_nest_and_can_be_turned_off() -> None:
    x = torch.randn(4, 4).to("ltc")
    with torch.autocast("ltc", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("ltc")
        assert (x @ x).dtype is torch.bfloat16
        with torch.autocast("ltc", enabled=False):
            assert (x @ x).dtype is torch.float32
        with torch.autocast("ltc", dtype=torch.float16):
            assert (x @ x).dtype is torch.float16
        assert (x @ x).dtype is torch.bfloat16
        assert (x.double() @ x.double()).dtype is torch.float64
    assert (x @ x).dtype is torch.float32
    assert not torch.is_autocast_enabled("ltc")


def test_the_dtype_follows_the_physical_device_until_one_is_chosen() -> None:
    with settings.scope(device_type="cuda"):
        with torch.autocast("ltc"):
            assert torch.get_autocast_dtype("ltc") is torch.get_autocast_dtype("cuda")
        with torch.autocast("ltc", torch.bfloat16):
            assert torch.get_autocast_dtype("ltc") is torch.bfloat16
    assert torch.get_autocast_dtype("ltc") is torch.get_autocast_dtype("cpu")
    with torch.autocast("ltc", torch.float16):
        assert torch.get_autocast_dtype("ltc") is torch.float16
    assert torch.get_autocast_dtype("ltc") is torch.get_autocast_dtype("cpu")


def test_the_dtype_may_be_chosen_by_the_name_of_the_device() -> None:
    x = torch.ones(2, 2, device="ltc")
    with torch.autocast("ltc:0", torch.float16):
        assert torch.get_autocast_dtype("ltc:0") is torch.get_autocast_dtype("ltc") is torch.float16
        assert (x @ x).dtype is torch.float16
    with torch.autocast("ltc:0"):
        assert (x @ x).dtype is torch.get_autocast_dtype("cpu")
    assert torch.get_autocast_dtype("ltc:0") is torch.get_autocast_dtype("cpu")


def test_the_dtype_is_the_physical_devices_in_every_thread() -> None:
    found = []

    def look() -> None:
        x = torch.ones(2, 2, device="ltc")
        with torch.autocast("ltc"):
            found.append((x @ x).dtype)

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [torch.get_autocast_dtype("cpu")] * 2
    assert torch.amp.is_autocast_available("ltc")
    assert torch.ltc.is_bf16_supported()


def _casts(cache_enabled: bool) -> int:
    layer = nn.Linear(4, 4).to("ltc")
    x = torch.randn(2, 4).to("ltc")
    torch_ltc.sync(wait=True)
    with torch.autocast("ltc", dtype=torch.bfloat16, cache_enabled=cache_enabled):
        out = layer(layer(layer(x)))
    casts = torch_ltc.debug.dump_ir([out]).count("_to_copy")
    torch_ltc.sync(wait=True)
    assert out.dtype is torch.bfloat16
    return casts


def test_a_region_casts_a_parameter_once() -> None:
    assert _casts(cache_enabled=True) == 3
    assert _casts(cache_enabled=False) == 7


def test_a_region_sees_parameters_as_they_are_when_it_begins() -> None:
    layer = nn.Linear(2, 2, bias=False).to("ltc")
    x = torch.ones(1, 2, device="ltc")
    for value in (1.0, 2.0):
        with torch.no_grad():
            layer.weight.fill_(value)
        with torch.autocast("ltc", dtype=torch.bfloat16):
            assert layer(x).tolist() == [[2 * value, 2 * value]]


def test_functions_of_autograd_choose_their_dtype() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="ltc", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert not torch.is_autocast_enabled("ltc")
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="ltc")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad @ grad

    x = torch.eye(3).to("ltc").requires_grad_()
    with torch.autocast("ltc", dtype=torch.bfloat16):
        out = Doubled.apply(x.bfloat16())
    assert out.dtype is torch.float32
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_operators_that_take_functions_see_the_region() -> None:
    def run(device: str) -> list[Tensor]:
        torch._dynamo.reset()
        rows, yes = torch.ones(2, 3, 3).to(device), torch.tensor(True).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            chosen = torch.cond(yes, lambda x: x @ x, lambda x: x @ x + 1, (rows[0],))
            mapped = map_over(lambda row, other: row @ other, rows, rows[0].clone())
        return [chosen, mapped]

    for found, expected in zip(run("ltc"), run("cpu"), strict=True):
        assert found.dtype is torch.bfloat16
        assert torch.equal(found.cpu(), expected)


# ---- scaling ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
}
# Steps whose gradient is infinite: the first, two in a row, the last.
BAD = (0, 4, 5, 9)


def scale(device: str, make: Callable[[Any], torch.optim.Optimizer], *, jit: bool = False) -> list[Any]:
    """Parameters and scales after each step, and the state after the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=3)
    xs = [torch.randn(3, 4) for _ in range(10)]
    for number in BAD:
        xs[number][0, 0] = torch.inf
    found: list[Any] = []

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    replayed = torch_ltc.jit(step) if jit else step
    for x in xs:
        replayed(x.to(device))
        found += [p.detach().clone() for p in model.parameters()]
        found.append(scaler.get_scale())
    found.append(optimizer.state_dict()["state"])
    return found


@pytest.mark.parametrize("jit", [False, True], ids=["recorded", "jit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_equal_the_cpus(name: str, jit: bool) -> None:
    actual = scale("ltc", OPTIMIZERS[name], jit=jit)
    expected = scale("cpu", OPTIMIZERS[name])
    torch.testing.assert_close(torch_ltc.to_cpu(actual), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scaled_step_reads_nothing(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to("ltc")
    optimizer = OPTIMIZERS[name](layer.parameters())
    scaler = torch.amp.GradScaler("ltc")
    x = torch.randn(2, 4).to("ltc")
    syncs: list[SyncEvent] = []
    stop = subscribe(syncs.append, SyncEvent)
    for number in range(5):
        if number == 2:
            # The first steps make the optimizer's state.
            syncs.clear()
        optimizer.zero_grad()
        scaler.scale(layer(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    stop()
    assert [event.reason for event in syncs] == [SyncReason.OPTIMIZER] * 3
