"""Modules move to the device and keep what ties their parameters to each other and to an optimizer."""

from __future__ import annotations

import copy
import weakref
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


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "cpu": lambda m: m.cpu(),
    "cpu and half": lambda m: m.to("cpu", torch.float16),
    "the same device": lambda m: m.to("ltc"),
    "float": lambda m: m.float(),
    "half": lambda m: m.half(),
    "memory format": lambda m: m.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_module_is_converted_while_its_graph_is_alive(name: str) -> None:
    model = nn.Linear(3, 3)
    expected, x = copy.deepcopy(model), torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.to("ltc").parameters(), lr=0.5)
    weight = model.weight
    weight.name_of_mine = "kept"  # type: ignore[attr-defined]
    alive, reference = model(lazy(x)), weakref.ref(weight)
    CONVERSIONS[name](model)
    assert reference() is weight is model.weight
    assert weight.name_of_mine == "kept"  # type: ignore[attr-defined]
    expected.to(weight.dtype)
    for module, device in ((model, weight.device), (expected, torch.device("cpu"))):
        module(x.to(device, weight.dtype)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == weight.device
    torch.testing.assert_close(weight.grad.cpu(), expected.weight.grad)
    optimizer.step()
    torch.testing.assert_close(weight.detach().cpu(), (expected.weight - 0.5 * expected.weight.grad).detach())
    assert alive.cpu().shape == (2, 3)


def test_backward_after_a_conversion_within_the_device() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    expected = copy.deepcopy(model)
    expected(x).sum().backward()
    loss = model.to("ltc")(lazy(x)).sum()
    model.to("ltc")
    loss.backward()
    assert_same(model.weight.grad, expected.weight.grad)


def test_hooks_of_a_parameter_move_with_it() -> None:
    model, seen = nn.Linear(3, 3), []
    model.weight.register_hook(lambda gradient: seen.append(gradient.device.type))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.device.type))  # type: ignore[union-attr]
    model.to("ltc")(torch.ones(2, 3, device="ltc")).sum().backward()
    model.cpu()(torch.ones(2, 3)).sum().backward()
    assert seen == ["ltc", "ltc", "cpu", "cpu"]


WITH_STATE: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "parametrized weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)).eval(),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU())),
    "traced": lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(2, 3)),
    "recurrent": lambda: nn.Sequential(nn.LSTM(3, 3), nn.Identity()),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", WITH_STATE)
def test_a_module_moves_there_and_back_between_forwards(name: str) -> None:
    def first(out: object) -> Tensor:
        return out if isinstance(out, Tensor) else first(out[0])  # type: ignore[index]

    model, x = WITH_STATE[name](), torch.randn(2, 3)
    expected = first(model(x))
    there = first(model.to("ltc")(lazy(x)))
    torch.testing.assert_close(there.cpu(), expected)
    assert_same(first(model.cpu()(x)), expected)


def test_data_of_a_tensor_is_replaced_by_that_of_another_device() -> None:
    tensor = torch.zeros(3, device="ltc") + 1
    pending = tensor * 2
    tensor.data = torch.full((2,), 5.0)
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == [5.0, 5.0]
    tensor.data = pending
    assert tensor.device.type == "ltc"
    assert (tensor + 1).tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        tensor.data = torch.eye(3).to_sparse()


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


LAZY: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "linear": (lambda: nn.LazyLinear(3), 0),
    **{f"convolution {n}d": ((lambda n=n: getattr(nn, f"LazyConv{n}d")(3, 2)), n) for n in (1, 2, 3)},
    **{f"transposed {n}d": ((lambda n=n: getattr(nn, f"LazyConvTranspose{n}d")(3, 2)), n) for n in (1, 2, 3)},
    **{f"batch norm {n}d": ((lambda n=n: getattr(nn, f"LazyBatchNorm{n}d")()), n) for n in (1, 2, 3)},
    **{f"instance norm {n}d": ((lambda n=n: getattr(nn, f"LazyInstanceNorm{n}d")(affine=True)), n) for n in (1, 2, 3)},
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_module_materializes_on_the_device(name: str) -> None:
    make, dims = LAZY[name]
    x = torch.randn(2, 4, *([5] * dims))
    expected, ours = make(), make().to("ltc")
    weight = ours.weight
    for module, given in ((expected, x), (ours, lazy(x))):
        torch.manual_seed(0)
        module(given).sum().backward()
    assert ours.weight is weight
    assert {tensor.device.type for tensor in ours.state_dict().values()} == {"ltc"}
    for mine, theirs in zip(ours.parameters(), expected.parameters(), strict=True):
        assert_same(mine, theirs)
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)  # type: ignore[union-attr]
    loaded = make().to("ltc")
    loaded.load_state_dict(expected.state_dict())
    assert_same(loaded.weight, expected.weight)
    assert loaded.weight.device.type == "ltc"
    assert make().to("ltc").half().cpu().weight.dtype is torch.float16
