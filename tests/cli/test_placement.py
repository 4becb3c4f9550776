"""`ltc run` of scripts that name no device: every value is that of a run on the CPU."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torch_ltc import events
from torch_ltc.cli.placement import placement
from torch_ltc.pytorch.patches import Patches

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def placed() -> Iterator[None]:
    with placement():
        yield


def device_of(value: Any) -> str:
    return str(value.device.type)


def linear() -> nn.Linear:
    """A module with known parameters, which a call has placed."""
    made = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.eye(3) * 2)
    made(torch.ones(1, 3))
    return made


def test_everything_is_as_before_afterwards() -> None:
    owners = (torch, torch.Tensor, nn.Module, torch.optim.Optimizer, torch.autograd, threading.Thread)
    before = [dict(vars(owner)) for owner in owners]
    with placement():
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before
    assert device_of(torch.ones(1, requires_grad=True)) == "cpu"


def test_patches_come_off_in_the_other_order() -> None:
    class Owner:
        value = 1

    class Heir(Owner):
        pass

    with Patches() as patches:
        patches.put(Heir, "value", 2)
        patches.put(Heir, "value", 3)
        assert Heir.value == 3
    assert Heir.value == 1
    assert "value" not in vars(Heir)


# ---- scripts, with the device and without ---------------------------------------------------------------------------


def arrays_on_the_cpu() -> Any:
    array = np.zeros(3, np.float32)
    tensor = torch.from_numpy(array)
    array[0] = 5
    other = torch.zeros(3)
    view = other.numpy()
    other[0] = 7
    return [tensor[0], view[0], torch.as_tensor(array)[0], torch.asarray(array)[0]]


def image_to_tensor() -> Any:
    """What torchvision's ToTensor does."""
    image = torch.from_numpy(np.full((2, 2, 3), 128, np.uint8)).permute(2, 0, 1).contiguous()
    return image.to(dtype=torch.float32).div(255) if isinstance(image, torch.ByteTensor) else image


def tensors_write_to_arrays() -> Any:
    out = linear()(torch.ones(2, 3)).detach()
    array, row, again = out.numpy(), out[1].numpy(), np.asarray(out)
    before = array.copy()
    out[1] = 9
    middle = array.copy()
    out.data.add_(1)
    return [before, middle, array, row, again]


def arrays_write_to_tensors() -> Any:
    out = linear()(torch.ones(2, 3)).detach().cpu()
    array = out.numpy()
    array[array > 1] = 0
    array[1, 1] = 4
    first = out.clone()
    column = out[:, 1].numpy()
    column[:] = 6
    del array, column
    return [first, out, out.sum()]


def parameters_and_gradients_in_arrays() -> Any:
    model = linear()
    weight = model.weight.data.numpy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    gradient: Any = None
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        gradient = model.weight.grad.numpy() if gradient is None else gradient
        optimizer.step()
        seen += [weight.copy(), gradient.copy()]
    weight[0] = 1
    return [*seen, model(torch.ones(1, 3)).detach(), gradient]


def writes_to_cpu_tensors() -> Any:
    model = linear()
    out = model(torch.ones(2, 3)).detach()
    total, rows, scalar = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(())
    total += out
    total.add_(out)
    rows[1:3] = out
    rows[torch.tensor([0])] = out[:1]
    scalar += out.sum()
    target = torch.empty(0)
    torch.add(out, torch.ones(2, 3), out=target)
    torch._foreach_add_([total, rows], [out, torch.ones(4, 3)])
    return [total, rows, scalar, target, total.view_as(out).fill_(3), total]


def running_statistics() -> Any:
    out = linear()(torch.tensor([[1.0, 2.0, 3.0], [3.0, 5.0, 7.0]])).detach()
    mean, variance = torch.zeros(3), torch.ones(3)
    nn.functional.batch_norm(out, mean, variance, training=True)
    norm = nn.BatchNorm1d(3)
    norm(out)
    array = norm.running_mean.numpy()
    norm(out)
    return [mean, variance, array, norm.running_mean]


def names_of_the_cpu() -> Any:
    out = linear()(torch.ones(2, 3)).detach()
    same = out.cpu()
    same[0] = 1
    out.to("cpu")[1] = 2
    out.to(torch.device("cpu"), torch.float32)[1, 1] = 5
    other = torch.zeros(2, 3).to(out.device).to(out)
    return [out, same, other, out.type(), out.type(torch.DoubleTensor), out.type("torch.LongTensor"), same is out]


def modules_change_and_return_inputs() -> Any:
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), linear())
    data = torch.tensor([[-1.0, 2.0, -3.0]])
    out = model(data)
    same = nn.Identity()(data)
    same[0, 0] = 8
    return [data, out, model(data)]


class Filling(nn.Module):
    """Makes tensors in its call, and writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0), 3, 2, device=x.device)
        for step in range(3):
            out[:, step] = self.cell(x[:, step]) + torch.arange(2) + torch.randn(2)
            self.seen += 1
        return out


def modules_that_make_tensors() -> Any:
    torch.manual_seed(3)
    model = Filling()
    out = model(torch.ones(2, 3, 2))
    out.sum().backward()
    return [out, model.cell.weight.grad, model.seen, torch.rand(2)]


def shared_parameters() -> Any:
    memory = np.eye(3, dtype=np.float32)
    model, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model.weight = nn.Parameter(torch.from_numpy(memory))
    alias = other.weight.detach()
    alias.fill_(1)
    first = other(model(torch.ones(1, 3))).detach()
    memory *= 3
    alias *= 2
    second = other(model(torch.ones(1, 3)))
    second.sum().backward()
    return [first, second, model.weight.grad, other.weight.grad, alias, memory]


def tied_weights_and_states() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = torch.randn(4, 3)
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    return [*model.state_dict().values(), twin(data), model[2].weight is model[0].weight]


def training_without_a_module() -> Any:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 8)
    a, b = torch.randn((), requires_grad=True), torch.zeros(8, requires_grad=True)
    for _ in range(3):
        loss = (a * x + b - x.square()).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in (a, b):
                p -= 0.1 * p.grad
                p.grad = None
    return [a, b, loss]


def gradients_of_cpu_tensors() -> Any:
    model, data = linear(), torch.ones(2, 3)
    data.requires_grad_()
    mask = torch.tensor([True, False, True])
    loss = (model(data)[:, mask] * data[:, :2]).sum() + torch.cat([data, model(data)]).sum()
    (gradient,) = torch.autograd.grad(loss, [data], retain_graph=True)
    loss.backward()
    return [gradient, data.grad, model.weight.grad]


def inference() -> Any:
    model, data = linear(), torch.ones(2, 3)
    with torch.inference_mode():
        out = model(data) + data
        array = out.numpy()
        out += 1
        data += 1
    return [out, array, data]


def lazy_modules_and_checkpoints() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2))
    data = torch.ones(2, 4)
    outs = [model(data), model(data)]
    filling = Filling()
    with torch.no_grad():
        filling.cell.weight.fill_(1.0)
    checkpoint(filling, torch.ones(1, 3, 2), use_reentrant=False).sum().backward()
    return [*outs, filling.cell.weight.grad]


def other_threads() -> Any:
    model, results = linear(), []
    thread = threading.Thread(target=lambda: results.append(model(torch.ones(2, 3)) + torch.ones(3)))
    thread.start()
    thread.join()
    return results


def recurrent() -> Any:
    torch.manual_seed(0)
    model = nn.LSTM(4, 5, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out, _ = model(torch.randn(2, 3, 4), (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)))
    out.sum().backward()
    optimizer.step()
    return [out, *model.parameters()]


def packed_sequences() -> Any:
    torch.manual_seed(0)
    model = nn.GRU(4, 5)
    out, last = model(nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)]))
    return [*nn.utils.rnn.pad_packed_sequence(out), last]


def assigned_gradients_and_data() -> Any:
    model = linear()
    gradient, weight = torch.ones(3, 3), torch.eye(3)
    model.weight.grad = gradient
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    gradient += 1
    first, second = model.weight.clone(), model.weight.grad.clone()
    model.weight.data = weight
    weight[0] = 4
    return [first, second, model(torch.ones(1, 3))]


def transforms() -> Any:
    model = nn.Linear(3, 3, bias=False)
    nn.init.ones_(model.weight)
    parameters = dict(model.named_parameters())
    loss = torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x,)).sum())
    return [loss(parameters, torch.ones(2, 3))["weight"], torch.vmap(model)(torch.ones(4, 3))]


SCRIPTS: list[Callable[[], Any]] = [
    arrays_on_the_cpu, image_to_tensor, tensors_write_to_arrays, arrays_write_to_tensors,
    parameters_and_gradients_in_arrays, writes_to_cpu_tensors, running_statistics, names_of_the_cpu,
    modules_change_and_return_inputs, modules_that_make_tensors, shared_parameters, tied_weights_and_states,
    training_without_a_module, gradients_of_cpu_tensors, inference, lazy_modules_and_checkpoints, other_threads,
    recurrent, packed_sequences, assigned_gradients_and_data, transforms,
]  # fmt: skip


def plain(values: Any) -> list[Any]:
    """Results as data, with their dtypes."""
    values = values if isinstance(values, list) else [values]
    return [
        (str(v.dtype), v.detach().cpu().tolist() if isinstance(v, torch.Tensor) else v.tolist())
        if isinstance(v, torch.Tensor | np.ndarray | np.generic)
        else v
        for v in values
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_values_are_those_of_the_cpu(script: Callable[[], Any]) -> None:
    expected = plain(script())
    with placement():
        result = script()
        assert plain(result) == expected


# ---- what is where --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("placed")
def test_modules_and_what_they_compute_are_on_the_device_and_data_is_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    data, target = torch.randn(4, 3), torch.zeros(4, 3)
    assert {device_of(p) for p in model.parameters()} == {"cpu"}
    out = model(data)
    loss = nn.functional.mse_loss(out, target)
    assert {device_of(value) for value in (*model.parameters(), *model.buffers(), out, loss)} == {"ltc"}
    assert {device_of(value) for value in (data, target, torch.ones(1), torch.from_numpy(np.ones(1)))} == {"cpu"}


@pytest.mark.usefixtures("placed")
def test_parameters_of_an_optimizer_are_on_the_device() -> None:
    free, model = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
    torch.optim.Adam([{"params": [free]}, {"params": model.parameters()}])
    assert {device_of(value) for value in (free, *model.parameters())} == {"ltc"}


@pytest.mark.usefixtures("placed")
def test_a_recurrent_module_is_placed(capsys: Printed) -> None:
    model = nn.GRU(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2))
    assert {device_of(value) for value in (*model.parameters(), *optimizer.param_groups[0]["params"])} == {"ltc"}
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("placed")
def test_what_must_stay_on_the_cpu_is_said(capsys: Printed) -> None:
    model = nn.Linear(2, 2)
    kept = model.state_dict()
    model(torch.ones(1, 2))
    assert device_of(model.weight) == device_of(kept["weight"]) == "cpu"
    assert "2 tensors of a module on the CPU: other tensors or arrays share its memory" in capsys.readouterr().err


@pytest.mark.usefixtures("placed")
def test_an_array_is_refused_for_what_the_cpu_refuses() -> None:
    out = linear()(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="requires grad"):
        out.numpy()
    assert out.numpy(force=True).tolist() == [[2.0, 2.0, 2.0]]
    with pytest.raises(TypeError, match="BFloat16"):
        out.detach().bfloat16().numpy()


@pytest.mark.usefixtures("placed")
def test_autocast_of_the_cpu_holds_for_the_device() -> None:
    layer, x = linear(), torch.ones(1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert layer(x).device.type == "ltc"
        with torch.autocast("cpu", enabled=False):
            assert layer(x).dtype is torch.float32
        assert layer(x).dtype is torch.bfloat16
        assert (x @ x.T).dtype is torch.bfloat16
    assert layer(x).dtype is torch.float32
    assert not torch.is_autocast_enabled("ltc")


@pytest.mark.usefixtures("placed")
def test_files_are_those_of_the_cpu() -> None:
    file = io.BytesIO()
    torch.save(linear().state_dict(), file)
    file.seek(0)
    with torch.serialization.safe_globals([]):
        loaded = torch.load(file)
    assert device_of(loaded["weight"]) == "cpu"
    assert loaded["weight"].tolist() == (torch.eye(3) * 2).tolist()


@pytest.mark.usefixtures("placed")
def test_a_process_that_is_forked_places_nothing() -> None:
    child = os.fork()
    if child == 0:
        model = nn.Linear(2, 2)
        os._exit(3 if device_of(model(torch.ones(1, 2))) == device_of(model.weight) == "cpu" else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert device_of(linear().weight) == "ltc"


# ---- training -------------------------------------------------------------------------------------------------------


class Images(Dataset[Any]):
    """As torchvision's MNIST: bytes in a tensor, each made an image by NumPy and a tensor of it by a transform."""

    def __init__(self) -> None:
        self.data = torch.randint(0, 256, (64, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        self.targets = torch.arange(64) % 3

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        image, target = np.asarray(self.data[index].numpy()), int(self.targets[index])
        tensor = torch.from_numpy(image).unsqueeze(0).contiguous()
        assert isinstance(tensor, torch.ByteTensor)
        return tensor.to(torch.get_default_dtype()).div(255).sub_(0.5), target


def train(workers: int = 0) -> list[float]:
    torch.manual_seed(2)
    options: dict[str, Any] = {"timeout": 60} if workers else {}
    loader = DataLoader(Images(), batch_size=16, shuffle=True, num_workers=workers, pin_memory=True, **options)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
    losses = []
    for _ in range(5):
        for image, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(image), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_stays_on_the_cpu_while_its_batches_are_trained_on(workers: int) -> None:
    expected = train()
    syncs: list[events.Event] = []
    end = events.subscribe(syncs.append, events.SyncEvent)
    with placement():
        losses = train(workers)
    end()
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(losses) == 20
    # One a step, and none of the 320 items.
    assert len(syncs) <= 22


@pytest.mark.usefixtures("placed")
def test_pytorchs_data_sets_stay_on_the_cpu() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0), torch.arange(6)), 2, True, num_workers=1, timeout=30)
    assert {device_of(tensor) for batch in loader for tensor in batch} == {"cpu"}


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_optimizers_count_steps_on_the_cpu(name: str) -> None:
    """Else each step would read the counter from the device."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = getattr(torch.optim, name)([weight])
    reads: list[events.Event] = []
    end = events.subscribe(reads.append, events.ReadEvent)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    end()
    state = optimizer.state[weight]
    assert device_of(weight) == "ltc"
    assert device_of(state.pop("step")) == "cpu"
    assert {device_of(tensor) for key, tensor in state.items() if key != "mu_product"} == {"ltc"}
    assert reads == []
