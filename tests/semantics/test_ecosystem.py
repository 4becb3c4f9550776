"""PyTorch's own machinery on top of the device: checkpointing, optimizers, fake tensors, compilers, loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_ltc
from tests.semantics.support import assert_like_eager, assert_same, lazy, observe
from torch_ltc.config import settings
from torch_ltc.errors import LtcError

pytestmark = pytest.mark.usefixtures("no_fallback")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpoint_gives_the_gradients_of_eager(use_reentrant: bool, dropout: float) -> None:
    # With dropout, the second forward draws the numbers of the first.
    def compute(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)).to(device)
        x = torch.linspace(-1, 1, 8).view(2, 4).to(device).requires_grad_()
        torch.manual_seed(1)
        out = checkpoint(block, x, use_reentrant=use_reentrant)
        out.square().sum().backward()
        return [out, x.grad, *[parameter.grad for parameter in block.parameters()]]

    for _ in range(2):
        assert_like_eager(compute, exact=False)


def test_checkpoint_sequential() -> None:
    def compute(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).to(device)
        x = torch.ones(2, 4).to(device).requires_grad_()
        checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
        return [x.grad]

    assert_like_eager(compute, exact=False)


OPTIMIZERS: dict[str, Callable[[Any, str], torch.optim.Optimizer]] = {
    "fused Adam": lambda parameters, device: torch.optim.Adam(parameters, lr=0.05, fused=True),
    "fused AdamW": lambda parameters, device: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "fused SGD": lambda parameters, device: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "fused Adagrad": lambda parameters, device: torch.optim.Adagrad(parameters, lr=0.05, fused=device == "cpu" or None),
    "capturable Adam": lambda parameters, device: torch.optim.Adam(
        parameters, lr=0.05, capturable=device != "cpu", foreach=True
    ),
    "capturable AdamW": lambda parameters, device: torch.optim.AdamW(
        parameters, lr=0.05, capturable=device != "cpu", foreach=False
    ),
    "capturable RMSprop": lambda parameters, device: torch.optim.RMSprop(
        parameters, lr=0.05, capturable=device != "cpu"
    ),
    "tensor lr": lambda parameters, device: torch.optim.SGD(parameters, lr=torch.tensor(0.05), foreach=False),
    "differentiable": lambda parameters, device: torch.optim.SGD(parameters, lr=0.05),
    "LBFGS": lambda parameters, device: torch.optim.LBFGS(parameters, lr=0.05, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_updates_as_on_the_cpu(name: str) -> None:
    # Fused and capturable optimizers.
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        optimizer = OPTIMIZERS[name](model.parameters(), device)
        inputs = torch.linspace(-1, 1, 8).view(2, 4).to(device)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().sum()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return [parameter.detach() for parameter in model.parameters()]

    assert_like_eager(train, exact=False)


def test_gradient_clipping_and_schedulers() -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4).to(device)).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
        return [*norms, *[parameter.detach() for parameter in model.parameters()]]

    assert_like_eager(train, exact=False)


def test_fake_tensors_of_the_device_record_nothing() -> None:
    with observe() as seen, FakeTensorMode() as mode:
        x = torch.empty(3, 4, device="ltc")
        assert isinstance(x, FakeTensor)
        assert x.device.type == "ltc"
        y = (x @ x.t()).relu().sum(0)
        assert y.shape == (3,)
        assert y.device.type == "ltc"
    real = torch.ones(2, 3, device="ltc")
    converted = mode.from_tensor(real)
    assert converted.shape == (2, 3)
    with mode:
        assert nn.functional.linear(converted, converted).shape == (2, 2)
    assert seen.syncs == []
    torch_ltc.sync(wait=True)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile_runs_on_the_device(compiler: str) -> None:
    def compute(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
        compiled = torch.compile(model, backend=compiler) if device == "ltc" else model
        x = torch.linspace(-1, 1, 12).view(3, 4).to(device).requires_grad_()
        out = compiled(x)
        out.square().sum().backward()
        return [out, x.grad, *[parameter.grad for parameter in model.parameters()]]

    assert_like_eager(compute, exact=False)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile_with_in_place_calls_and_views(compiler: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        z = x[1:].t() * y
        z[0].mul_(2)
        return z.sum() + x.mean()

    compiled = torch.compile(function, backend=compiler)
    x, y = lazy(torch.arange(6.0).view(3, 2), torch.ones(2, 2))
    cpu_x, cpu_y = torch.arange(6.0).view(3, 2), torch.ones(2, 2)
    for _ in range(2):
        assert_same(compiled(x, y), function(cpu_x, cpu_y), exact=False)
    assert_same(x, cpu_x)


def test_default_device_makes_tensors_and_modules_there() -> None:
    torch.set_default_device("ltc")
    try:
        assert torch.ones(2).device.type == "ltc"
        assert torch.tensor([1.0, 2.0]).device.type == "ltc"
        assert nn.Linear(2, 2).weight.device.type == "ltc"
        assert torch.arange(3).sum().item() == 3
    finally:
        torch.set_default_device(None)
    with torch.device("ltc"):
        assert torch.zeros(2).device.type == "ltc"
        model = nn.Linear(2, 2)
    assert model.weight.device.type == "ltc"
    assert torch.ones(1).device.type == "cpu"
    assert torch.get_default_device().type == "cpu"


@pytest.mark.skipif(not hasattr(torch.accelerator, "random"), reason="torch.accelerator.random is there from 2.14 on")
def test_accelerator_random_speaks_of_the_device() -> None:
    random = torch.accelerator.random
    torch.ltc.manual_seed(7)
    assert random.initial_seed() == random.initial_seed("ltc:0") == random.initial_seed(0) == 7
    state = torch.ltc.get_rng_state()
    assert torch.equal(random.get_rng_state(), state)
    assert torch.equal(random.get_rng_state("ltc"), state)
    [only] = random.get_rng_state_all()
    assert torch.equal(only, state)


def test_accelerator_functions_speak_of_the_device() -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("ltc")
    assert accelerator.device_count() == 1
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    x = torch.ones(100, device="ltc") + 1
    accelerator.synchronize()
    assert accelerator.memory_allocated() >= 400
    assert accelerator.max_memory_allocated() >= accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    accelerator.empty_cache()
    assert accelerator.memory_stats()["allocated_bytes.all.current"] == accelerator.memory_allocated()
    with accelerator.device_index(0):
        assert x.sum().item() == 200.0


def test_device_module_has_what_other_device_modules_have() -> None:
    device = torch.ltc
    assert device.is_available()
    assert device.is_initialized()
    assert device.device_count() == 1
    assert device.current_device() == 0
    device.set_device(0)
    device.set_device("ltc:0")
    assert isinstance(device.get_device_name(), str)
    assert torch.float32 in device.get_device_capability()["supported_dtypes"]
    with device.device(0), device.stream(device.current_stream()):
        x = torch.ones(2, device="ltc") + 1
    device.current_stream().synchronize()
    device.default_stream().wait_stream(device.Stream())
    device.synchronize()
    free, total = device.get_memory_info()
    assert 0 < free <= total
    assert device.memory_stats()["allocation.all.current"] >= 1
    assert device.memory_reserved() == device.memory_allocated()
    device.reset_peak_memory_stats()
    assert device.max_memory_allocated() == device.memory_allocated()
    device.empty_cache()
    assert device.is_bf16_supported()
    assert torch.bfloat16 in device.get_amp_supported_dtype()
    assert torch.get_device_module("ltc") is device
    assert x.tolist() == [2.0, 2.0]


def test_memory_peak_is_that_of_live_tensors() -> None:
    torch_ltc.sync(wait=True)
    torch.ltc.reset_peak_memory_stats()
    before = torch.ltc.memory_allocated()
    big = torch.ones(10_000, device="ltc") * 2
    torch_ltc.sync(wait=True)
    del big
    small = torch.ones(10, device="ltc") * 2
    torch_ltc.sync(wait=True)
    assert torch.ltc.memory_allocated() == before + 40
    assert torch.ltc.max_memory_allocated() >= before + 40_000
    assert small.numel() == 10


class Rows(Dataset[Tensor]):
    """Three rows."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_feeds_the_device(workers: int) -> None:
    # DataLoader, pin_memory on and off.
    for pin_memory in (True, False):
        loader = DataLoader(Rows(), batch_size=2, num_workers=workers, pin_memory=pin_memory)
        batches = [batch.to("ltc", non_blocking=True) * 2 for batch in loader]
        assert [batch.tolist() for batch in batches] == [[[0.0, 0.0], [2.0, 2.0]], [[4.0, 4.0]]]


def test_data_loader_of_device_tensors() -> None:
    data = TensorDataset(torch.arange(6.0, device="ltc").view(3, 2), torch.arange(3, device="ltc"))
    rows, labels = next(iter(DataLoader(data, batch_size=3)))
    assert rows.device.type == "ltc"
    assert rows.sum().item() == 15.0
    assert labels.tolist() == [0, 1, 2]


def test_pinned_memory_is_a_plain_copy_where_the_physical_device_is_the_cpu() -> None:
    pinned = torch.arange(3.0).pin_memory()
    assert pinned.tolist() == [0.0, 1.0, 2.0]
    assert pinned.to("ltc").tolist() == [0.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_profiler_and_inference_mode_and_no_grad() -> None:
    x = torch.ones(2, device="ltc", requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 3
        y.add_(1)
        z = y[:1]
    assert y.is_inference()
    assert y.tolist() == [4.0, 4.0]
    assert z.tolist() == [4.0]
    with torch.profiler.profile() as profile:
        (x * 2).sum().item()
    assert any("aten::mul" in event.name for event in profile.events())


def test_fx_tracing_and_module_hooks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.layer(x)) + 1

    torch.manual_seed(0)
    model = Block()
    expected = model(torch.ones(1, 2))
    model.to("ltc")
    path_values = torch.fx.symbolic_trace(model)
    seen: list[str] = []
    model.layer.register_forward_hook(lambda module, args, out: seen.append(out.device.type))
    assert_same(path_values(torch.ones(1, 2, device="ltc")), expected, exact=False)
    model(torch.ones(1, 2, device="ltc"))
    assert "ltc" in seen


def test_parametrized_and_weight_normed_layers_train() -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).to(device)
        layer(torch.ones(2, 3).to(device)).sum().backward()
        return [parameter.grad for parameter in layer.parameters()]

    assert_like_eager(train, exact=False)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=2),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2),
}


def test_no_scheduler_is_left_out() -> None:
    assert {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("on_device", [False, True], ids=["a float", "a tensor of the device"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_change_the_rate_as_on_the_cpu(name: str, on_device: bool) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        rate: Any = torch.tensor(0.1, device=device) if on_device else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, foreach=False)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4).to(device)).square().sum()
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss.detach()] if name == "ReduceLROnPlateau" else []))
            rates.append(torch.as_tensor(optimizer.param_groups[0]["lr"]).clone())
        return [*rates, *[parameter.detach() for parameter in model.parameters()]]

    assert_like_eager(train, exact=False)


def test_ema_and_swa_models() -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            with torch.no_grad():
                model.weight.add_(1)
            average.update_parameters(model)
        return [parameter.detach() for parameter in average.parameters()]

    with settings.scope(fallback="allow"):
        assert_like_eager(run, exact=False)


class OnDevice(Dataset[Tensor]):
    """Items that a worker puts on the device, which it should not."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(2).to("ltc") * index


class MadeOnDevice(Dataset[Tensor]):
    """Items that a worker makes on the device: nothing is copied to it."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.make()


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(2, device="ltc") + 1, lambda: torch.empty(2, device="ltc")], ids=["recorded", "empty"]
)
def test_a_worker_that_makes_items_on_the_device_is_an_error_and_no_hang(make: Callable[[], Tensor]) -> None:
    torch.ones(2, device="ltc").cpu()
    loader = DataLoader(MadeOnDevice(make), batch_size=2, num_workers=1, timeout=60, multiprocessing_context="fork")
    with pytest.raises(LtcError, match=r"forked[\s\S]*on the CPU"):
        next(iter(loader))


def test_a_worker_that_puts_items_on_the_device_is_told_so() -> None:
    loader = DataLoader(OnDevice(), batch_size=2, num_workers=1, timeout=60, multiprocessing_context="fork")
    with pytest.raises(LtcError, match=r"a worker process of a DataLoader copies a tensor to ltc[\s\S]*device='cpu'"):
        next(iter(loader))
