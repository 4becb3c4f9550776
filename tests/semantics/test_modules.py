"""Modules move to the device and keep what ties their parameters to each other and to an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import assert_same, lazy, parameters_of

pytestmark = pytest.mark.usefixtures("no_fallback")


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.out(self.embed(tokens)) * self.scale


def test_tied_weights_stay_tied_across_to() -> None:
    model = Tied().to("ltc")
    assert model.out.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    with torch.no_grad():
        model.embed.weight.fill_(2.0)
    assert model.out.weight.sum().item() == 56.0
    back = model.to("cpu")
    assert back.out.weight is back.embed.weight
    assert back.embed.weight.device.type == "cpu"


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to("ltc"), lambda m: m.ltc(), lambda m: m.to(torch.zeros(1, device="ltc"))],
    ids=["to", "ltc", "to like"],
)
def test_every_way_of_moving_keeps_the_parameter_objects(move: Callable[[nn.Module], object]) -> None:
    model = Tied()
    parameter = model.embed.weight
    move(model)
    assert model.embed.weight is parameter
    assert parameter.device.type == "ltc"
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_tied_weights_train_as_on_the_cpu() -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Tied().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        tokens = torch.tensor([1, 2, 3, 6]).to(device)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), tokens.flip(0)).backward()
            optimizer.step()
        return list(parameters_of(model))

    assert_same(train("ltc"), train("cpu"), exact=False)


def test_an_optimizer_made_before_the_move_trains_the_moved_parameters() -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model.to(device)
        inputs = torch.linspace(-1, 1, 12).view(4, 3).to(device)
        for _ in range(4):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        return list(parameters_of(model))

    started = train("cpu")
    assert_same(train("ltc"), started, exact=False)
    torch.manual_seed(0)
    assert not torch.equal(started[0], nn.Linear(3, 2).weight)


def test_moving_a_module_keeps_its_gradients() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad.clone()
    model.to("ltc")
    assert model.weight.grad.device.type == "ltc"
    assert_same(model.weight.grad, gradient)


def test_buffers_and_dtype_move_with_the_module() -> None:
    model = nn.BatchNorm1d(3).to("ltc", torch.float64)
    assert model.running_mean.device == torch.device("ltc", 0)
    assert model.running_mean.dtype is torch.float64
    assert model.num_batches_tracked.device.type == "ltc"
    model(torch.ones(4, 3, dtype=torch.float64, device="ltc"))
    assert model.num_batches_tracked.item() == 1


def test_moving_other_modules_leaves_pytorchs_own_behaviour() -> None:
    model = Tied()
    before = torch.__future__.get_swap_module_params_on_conversion()
    model.double()
    assert model.embed.weight.dtype is torch.float64
    assert model.out.weight is model.embed.weight
    assert torch.__future__.get_swap_module_params_on_conversion() is before


def test_state_dict_travels_both_ways() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    device_model = copy.deepcopy(model).to("ltc")
    with torch.no_grad():
        device_model[0].weight.mul_(2)
    state = device_model.state_dict()
    assert all(value.device.type == "ltc" for value in state.values())
    model.load_state_dict(state)
    assert_same(model[0].weight, device_model[0].weight.cpu())
    device_model.load_state_dict(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict())
    other = nn.Linear(3, 4, device="ltc")
    other.load_state_dict({"weight": torch.ones(4, 3), "bias": torch.zeros(4)}, assign=False)
    assert other.weight.sum().item() == 12.0


def test_optimizer_state_dict_travels() -> None:
    model = nn.Linear(2, 1).to("ltc")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device="ltc")).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    fresh = torch.optim.Adam(model.parameters())
    fresh.load_state_dict(state)
    assert_same(fresh.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"].cpu())


def test_modules_can_be_built_on_the_device() -> None:
    torch.manual_seed(0)
    ours = nn.Linear(3, 2, device="ltc")
    torch.manual_seed(0)
    assert_same(list(ours.parameters()), list(nn.Linear(3, 2).parameters()))
    skipped = nn.utils.skip_init(nn.Linear, 3, 2, device="ltc")
    assert skipped.weight.size() == (2, 3)
    meta = nn.Linear(3, 2, device="meta").to_empty(device="ltc")
    assert meta.weight.device.type == "ltc"


def test_tensor_moves() -> None:
    x = torch.arange(3.0)
    for moved in (x.to("ltc"), x.ltc(), x.to("ltc:0"), x.to(torch.device("ltc")), x.to("ltc", non_blocking=True)):
        assert moved.device == torch.device("ltc", 0)
        assert moved.is_ltc
        assert moved.tolist() == [0.0, 1.0, 2.0]
    moved = lazy(x)
    assert moved.to("ltc") is moved
    assert moved.to("ltc", copy=True) is not moved
    assert moved.to(torch.float64).dtype is torch.float64
    assert_same(moved.to("cpu", torch.float16), x.half())
    moved.cpu().fill_(9)
    assert moved.tolist() == [0.0, 1.0, 2.0]
    x.fill_(5)
    assert moved.tolist() == [0.0, 1.0, 2.0]
    torch_ltc.sync()
