"""What a script that names no device may take for granted."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset, random_split

from torch_ltc import events
from torch_ltc.cli.script_device import Patches, default_device
from torch_ltc.device.nn_modules import _involves_device

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def on_device() -> Any:
    with default_device():
        yield


def device_of(value: Any) -> str:
    return str(value.device.type)


def test_everything_is_as_before_afterwards() -> None:
    loaders = (DataLoader, torch.utils.data.dataloader._BaseDataLoaderIter)
    owners = (torch, torch.Tensor, *loaders, torch.optim.Adam, torch.optim.Adagrad)
    before = [dict(vars(owner)) for owner in owners]
    with default_device():
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before
    assert torch.Tensor([1.0]).device.type == torch.ones(1).device.type == "cpu"


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


@pytest.mark.usefixtures("on_device")
def test_tensors_are_made_on_the_device_unless_they_are_said_to_be_elsewhere() -> None:
    array = np.ones(3, dtype=np.float32)
    made = [torch.ones(2), torch.tensor([1]), torch.from_numpy(array), torch.Tensor([1.0]), torch.Tensor(2, 3)]
    made += [
        torch.as_tensor(array),
        torch.nn.Parameter(torch.Tensor(2)),
        torch.frombuffer(bytearray(4), dtype=torch.uint8),
    ]
    assert {device_of(tensor) for tensor in made} == {"ltc"}
    others = [torch.ones(2, device="cpu"), torch.from_numpy(array).cpu(), torch.ones(2).to("cpu")]
    with torch.device("cpu"):
        others += [torch.from_numpy(array), torch.Tensor([1.0])]
    assert {device_of(tensor) for tensor in others} == {"cpu"}
    assert torch.Generator().device.type == "cpu"
    assert device_of(torch.randperm(3, generator=torch.Generator().manual_seed(1))) == "ltc"


@pytest.mark.usefixtures("on_device")
def test_a_script_may_set_another_default() -> None:
    torch.set_default_device("cpu")
    assert device_of(torch.from_numpy(np.ones(1))) == device_of(torch.Tensor([1.0])) == "cpu"
    assert [device_of(batch) for batch in DataLoader([1.0, 2.0])] == ["cpu", "cpu"]


@pytest.mark.usefixtures("on_device")
def test_arrays_are_copies_that_cannot_be_written() -> None:
    tensor = torch.arange(3.0)
    for array in (tensor.numpy(), np.asarray(tensor)):
        np.testing.assert_array_equal(array, [0.0, 1.0, 2.0])
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5.0
    assert np.asarray(tensor, dtype=np.float64).dtype == np.float64
    shared = torch.ones(2, device="cpu")
    shared.numpy()[0] = 7.0
    assert shared[0] == 7.0
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ones(2, requires_grad=True).numpy()


@pytest.mark.usefixtures("on_device")
def test_a_file_with_tensors_of_both_devices_is_loaded() -> None:
    file = io.BytesIO()
    torch.save({"here": torch.ones(2), "there": torch.zeros(2, device="cpu")}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert {name: device_of(tensor) for name, tensor in loaded.items()} == {"here": "ltc", "there": "cpu"}
    torch.testing.assert_close(loaded["here"].cpu(), torch.ones(2, device="cpu"))


@pytest.mark.usefixtures("on_device")
def test_a_module_on_the_cpu_stays_there() -> None:
    module = torch.nn.Linear(2, 2, device="cpu")
    assert device_of(module.double().weight) == "cpu"
    assert module.weight.dtype == torch.float64
    assert not _involves_device(module, lambda tensor: tensor.float())


@pytest.mark.usefixtures("on_device")
def test_a_process_that_is_forked_makes_tensors_on_the_cpu() -> None:
    child = os.fork()
    if child == 0:
        os._exit(3 if device_of(torch.ones(1)) == device_of(torch.from_numpy(np.ones(1))) == "cpu" else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert device_of(torch.ones(1)) == "ltc"


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"])
@pytest.mark.parametrize("device", ["ltc", "cpu"])
def test_optimizers_count_steps_on_the_cpu(name: str, device: str) -> None:
    """As without a default device: else each step would read the counter from the device."""
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = getattr(torch.optim, name)([weight])
    reads: list[events.Event] = []
    end = events.subscribe(reads.append, events.ReadEvent)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    end()
    state = optimizer.state[weight]
    assert device_of(state.pop("step")) == "cpu"
    assert {device_of(tensor) for key, tensor in state.items() if key != "mu_product"} == {device}
    assert reads == []


# ---- loaders --------------------------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    """Items that say where they were made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        made = torch.from_numpy(np.full(2, index, dtype=np.float32))
        return {"x": made, "y": index, "where": device_of(torch.ones(1)), "pair": (made, index)}


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("workers", [0, 2])
def test_items_are_made_on_the_cpu_and_batches_come_out_on_the_device(workers: int) -> None:
    options: dict[str, Any] = {"timeout": 30, "persistent_workers": True} if workers else {}
    loader = DataLoader(Items(), batch_size=2, num_workers=workers, pin_memory=True, **options)
    for _ in range(2):
        batches = list(loader)
        assert [batch["x"].tolist() for batch in batches] == [[[0.0, 0.0], [1.0, 1.0]], [[2.0, 2.0], [3.0, 3.0]]]
        assert {device_of(tensor) for batch in batches for tensor in (batch["x"], batch["y"], *batch["pair"])} == {
            "ltc"
        }
        assert {where for batch in batches for where in batch["where"]} == {"cpu"}


@pytest.mark.usefixtures("on_device")
def test_pytorchs_data_sets_are_read_on_the_cpu(capsys: Printed) -> None:
    whole = TensorDataset(torch.arange(6.0), torch.arange(6))
    part = ConcatDataset(random_split(whole, [4, 2], generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(part, 2, True, num_workers=1, timeout=30, pin_memory=True)
    assert loader.num_workers == 1
    assert {device_of(tensor) for tensor in loader.dataset[0]} == {"cpu"}
    assert {device_of(tensor) for tensor in part[0]} == {"ltc"}
    seen = torch.cat([batch[0] for batch in loader])
    assert device_of(seen) == "ltc"
    assert sorted(seen.tolist()) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert capsys.readouterr().err == ""


class Kept(Dataset[Any]):
    """A data set with tensors of its own."""

    def __init__(self) -> None:
        self.parts = {"x": [torch.arange(4.0)]}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.parts["x"][0][index]


@pytest.mark.usefixtures("on_device")
def test_another_data_set_with_tensors_of_the_device_does_without_workers(capsys: Printed) -> None:
    options: dict[str, Any] = {"prefetch_factor": 2, "persistent_workers": True, "pin_memory": True}
    loader = DataLoader(Kept(), 2, False, num_workers=2, timeout=30, **options)
    assert loader.num_workers == 0
    assert [batch.tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0]]
    assert "a DataLoader works without worker processes" in capsys.readouterr().err
    DataLoader(Items(), num_workers=2)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("on_device")
def test_packed_sequences_follow() -> None:
    def packed(items: list[Any]) -> Any:
        return torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])

    (batch,) = DataLoader([0, 1], batch_size=2, collate_fn=packed)
    assert device_of(batch.data) == "ltc"
