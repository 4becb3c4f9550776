"""`run --map-cuda`: CUDA's names mean the device, for the script and for nobody else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_ltc.cli.cuda_names import cuda_names, mapped
from torch_ltc.errors import DeviceMismatchError
from torch_ltc.record import buffer

LTC = torch.device("ltc", 0)


@pytest.fixture(autouse=True)
def as_cuda() -> Iterator[None]:
    with cuda_names():
        yield


def test_everything_is_as_before_afterwards() -> None:
    owners = (torch, torch.Tensor, nn.Module, nn.DataParallel, torch.cuda, torch.fft, torch.nested)
    inside = [dict(vars(owner)) for owner in owners]
    with cuda_names():
        pass
    assert [dict(vars(owner)) for owner in owners] == inside
    assert mapped("cuda:1") == "ltc:1"
    assert [mapped(name) for name in ("cpu", "cudax", None, 0)] == ["cpu", "cudax", None, 0]


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(3, device="cuda"),
    "zeros with an index": lambda: torch.zeros(3, device="cuda:0"),
    "a device": lambda: torch.zeros(3, device=torch.device("cuda")),
    "a device with an index": lambda: torch.zeros(3, device=torch.device("cuda", 0)),
    "an integer": lambda: torch.zeros(3, device=0),
    "tensor": lambda: torch.tensor([1.0], device="cuda"),
    "rand": lambda: torch.rand(2, device="cuda"),
    "zeros_like": lambda: torch.zeros_like(torch.ones(2), device="cuda"),
    "new_zeros": lambda: torch.ones(2).new_zeros(2, device="cuda"),
    "fftfreq": lambda: torch.fft.fftfreq(4, device="cuda"),
    "to": lambda: torch.ones(2).to("cuda"),
    "to with a dtype": lambda: torch.ones(2).to("cuda", torch.float64, non_blocking=True),
    "to by keyword": lambda: torch.ones(2).to(device="cuda:0"),
    "to like another": lambda: torch.ones(2).to(torch.ones(1, device="cuda")),
    "cuda": lambda: torch.ones(2).cuda(),
    "cuda with an index": lambda: torch.ones(2).cuda(0, non_blocking=True),
    "pinned": lambda: torch.ones(2).pin_memory().cuda(non_blocking=True),
    "module.to": lambda: nn.Linear(2, 2).to("cuda").weight,
    "module.cuda": lambda: nn.Linear(2, 2).cuda().weight,
    "a module made there": lambda: nn.Linear(2, 2, device="cuda").weight,
    "to_empty": lambda: nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
    "data parallel": lambda: nn.DataParallel(nn.Linear(2, 2).cuda())(torch.ones(3, 2).cuda()),
    "a generator": lambda: torch.rand(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_names_lead_to_the_device(name: str) -> None:
    tensor = MAKERS[name]()
    assert tensor.device == LTC
    assert tensor.is_cuda
    assert not torch.ones(2).is_cuda


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:pin_memory_device is deprecated")
def test_batches_in_pinned_memory_go_to_the_device(workers: int) -> None:
    data = TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    for options in ({}, {"pin_memory_device": "cuda"}):
        found = []
        for rows, labels in DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers, **options):
            rows, labels = rows.to("cuda", non_blocking=True), labels.cuda(non_blocking=True)
            assert rows.device == labels.device == LTC
            found.append((rows.tolist(), labels.tolist()))
        assert found == [([[0.0, 1.0], [2.0, 3.0]], [0, 1]), ([[4.0, 5.0], [6.0, 7.0]], [2, 3])]


def test_memory_of_the_host_may_be_made_pinned_and_that_of_the_device_may_not() -> None:
    for made in (torch.zeros(2, pin_memory=True), torch.tensor([0.0, 0.0], pin_memory=True)):
        assert made.device.type == "cpu"
        assert made.to("cuda", non_blocking=True).tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(2, device="cuda").pin_memory()


def test_an_index_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceMismatchError, match="there is no device ltc:1 here"):
        torch.ones(2, device="cuda:1")


def test_contexts() -> None:
    with torch.cuda.device(0), torch.cuda.device("cuda:0"), torch.cuda.stream(torch.cuda.Stream()):
        assert torch.ones(1, device="cuda").device == LTC
    with torch.device("cuda"):
        assert torch.ones(1).device == LTC
    torch.set_default_device("cuda")
    try:
        assert torch.ones(1).device == LTC
    finally:
        torch.set_default_device(None)


def test_devices_are_devices() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert isinstance(device, torch.device)
    assert device == torch.device("ltc")
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    assert torch.device("cpu").type == "cpu"
    assert not isinstance("cuda", torch.device)
    assert isinstance(torch.Generator(), torch.Generator)


@pytest.mark.parametrize("place", [None, "cuda", "cuda:0", torch.device("ltc"), {"ltc:0": "cuda:0"}])
def test_files_are_loaded_to_the_device(place: Any) -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3.0, device="cuda"), file)
    file.seek(0)
    loaded = torch.load(file, map_location=place)
    assert loaded.device == LTC
    torch.testing.assert_close(loaded.cpu(), torch.arange(3.0))


def test_files_of_a_gpu_are_loaded_to_the_device() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3.0), file)
    # What a GPU would have written in place of "cpu".
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        file = io.BytesIO()
        torch.save(torch.arange(3.0), file)
    file.seek(0)
    assert torch.load(file).device == LTC


def test_functions_of_the_module() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties("cuda").name == "torch_ltc lazy device"
    assert torch.cuda.get_device_capability() == (0, 0)
    torch.cuda.set_device("cuda:0")
    torch.cuda.empty_cache()
    held = torch.ones(1000, device="cuda")
    torch.cuda.synchronize(torch.device("cuda"))
    assert torch.cuda.memory_allocated() >= 4000
    assert torch.cuda.max_memory_allocated(0) >= torch.cuda.memory_allocated("cuda")
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    del held


def test_seeds_and_states_are_the_devices() -> None:
    torch.cuda.manual_seed(3)
    first = torch.rand(3, device="cuda").tolist()
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda").tolist()
    torch.cuda.set_rng_state(state, "cuda")
    assert torch.rand(3, device="cuda").tolist() == second
    torch.cuda.manual_seed_all(3)
    assert torch.rand(3, device="cuda").tolist() == first


def test_events_take_the_time() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="both events must be recorded"):
        begin.elapsed_time(end)
    begin.record()
    torch.ones(8, device="cuda").sum()
    end.record()
    assert begin.elapsed_time(end) > 0
    assert end.query()


def test_what_pytorch_asks_for_itself_gets_the_true_answer() -> None:
    answers: dict[str, Any] = {}
    exec(compile("answer = torch.cuda.is_available()", torch.__file__, "exec"), {"torch": torch}, answers)
    assert answers["answer"] is False


def test_what_this_package_calls_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer.settings, "device_type", "cuda")
    monkeypatch.setattr(buffer.settings, "device_ordinal", 2)
    assert buffer.physical_device().type == "cuda"


def test_mixed_precision_is_the_devices() -> None:
    layer = torch.nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for scaler in (torch.amp.GradScaler(), torch.amp.GradScaler("cuda")):
        for region in (torch.autocast("cuda"), torch.amp.autocast(device_type="cuda", dtype=torch.float16)):
            with region:
                assert torch.is_autocast_enabled()
                out = layer(torch.ones(1, 2, device="cuda"))
            assert out.dtype is torch.float16
            scaler.scale(out.float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.is_enabled()
    assert not torch.is_autocast_enabled()


def test_a_training_step() -> None:
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.ones(8, 4).cuda()) - 5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
