"""Saving, loading, pickling and copying what lives on the device."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.package.package_exporter
from torch import Tensor, nn

import torch_ltc
from tests.semantics.support import assert_same, counted, lazy, observe, probe, train_in_process
from torch_ltc.config import settings
from torch_ltc.errors import LtcError

pytestmark = pytest.mark.usefixtures("no_fallback")


def round_trip(value: Any, **options: Any) -> Any:
    """Save, then load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_tensor_comes_back_on_the_device(weights_only: bool) -> None:
    x = torch.arange(6.0, device="ltc").view(2, 3) * 2
    back = round_trip(x, weights_only=weights_only)
    assert back.device == torch.device("ltc", 0)
    assert_same(back, torch.arange(6.0).view(2, 3) * 2)
    back.add_(1)
    assert x.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_loading_with_defaults_is_weights_only_and_works() -> None:
    assert round_trip({"a": torch.ones(2, device="ltc")})["a"].tolist() == [1.0, 1.0]


def test_device_tensors_load_to_the_cpu_and_cpu_tensors_to_the_device() -> None:
    # map_location both ways.
    ours = round_trip(torch.ones(3, device="ltc") + 1, map_location="cpu")
    assert ours.device.type == "cpu"
    assert ours.tolist() == [2.0, 2.0, 2.0]
    theirs = round_trip(torch.arange(3.0), map_location="ltc")
    assert theirs.device.type == "ltc"
    assert (theirs + 1).tolist() == [1.0, 2.0, 3.0]
    for location in (torch.device("ltc"), {"cpu": "ltc"}, lambda storage, place: storage.to(device="ltc")):
        assert round_trip(torch.ones(2), map_location=location).device.type == "ltc"


def test_a_file_written_by_the_device_loads_where_the_device_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"w": torch.arange(3.0, device="ltc")}, path)
    assert torch.load(path, map_location="cpu")["w"].tolist() == [0.0, 1.0, 2.0]
    assert torch.load(path, map_location="cpu", mmap=True)["w"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("copied", [round_trip, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_views_and_shared_tensors_stay_shared(copied: Any) -> None:
    # Aliasing survives torch.save, deepcopy and pickle.
    base = torch.arange(12.0, device="ltc").view(3, 4)
    view, again = base.t()[1:], base
    new_base, new_view, new_again = copied([base, view, again])
    assert new_view.stride() == view.stride()
    assert new_view.storage_offset() == view.storage_offset()
    new_base[0, 1] = 100
    assert new_view[0, 0].item() == 100.0
    assert new_again[0, 1].item() == 100.0
    assert base[0, 1].item() == 1.0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e5m2]
)
def test_every_dtype_is_saved_and_pickled(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    copies = [round_trip(x.to("ltc")), copy.deepcopy(x.to("ltc"))]
    if dtype is not torch.float8_e5m2:  # which plain pickle refuses on the CPU too
        copies.append(pickle.loads(pickle.dumps(x.to("ltc"))))
    for back in copies:
        assert back.dtype is dtype
        assert back.device.type == "ltc"
        assert bytes(back.cpu().untyped_storage().tolist()) == bytes(x.untyped_storage().tolist())


def test_layouts_empty_tensors_and_conjugates_are_saved() -> None:
    for x in (
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(0, 3),
        torch.tensor(5.0),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6.0)[4:],
        torch.tensor([1 + 2j]).conj(),
    ):
        for back in (round_trip(lazy(x)), copy.deepcopy(lazy(x))):
            assert_same(back, lazy(x).cpu() if x.is_conj() else x)
    expanded = torch.ones(1, device="ltc").expand(3)
    assert_same([round_trip(expanded), copy.deepcopy(expanded)], [torch.ones(1).expand(3)] * 2)


PENDING = {
    "no dimensions": lambda device: torch.full((), 1.5, device=device) * 2,
    "transposed": lambda device: (torch.arange(6.0, device=device).view(2, 3) + 1).t() * 2,
    "every other": lambda device: torch.zeros(2, 3, device=device).as_strided((2,), (2,)).add_(1),
    "bytes": lambda device: torch.arange(7, dtype=torch.uint8, device=device) + 1,
}


@pytest.mark.parametrize("name", PENDING)
def test_a_pending_tensor_is_copied_with_its_storage(name: str) -> None:
    # The copy goes through the bytes of the storage, whatever the layout of the value that is not computed yet.
    for _ in range(2):
        assert_same(copy.deepcopy(PENDING[name]("ltc")), copy.deepcopy(PENDING[name]("cpu")))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float64])
def test_a_pending_storage_is_seen_with_elements_of_another_size(dtype: torch.dtype) -> None:
    def seen(device: str) -> Tensor:
        value = torch.arange(12.0, device=device).view(3, 4).t() * 3
        return torch.empty(0, dtype=dtype, device=device).set_(value.untyped_storage())  # type: ignore[call-overload, no-any-return]

    assert_same(seen("ltc"), seen("cpu"))


def test_parameters_modules_and_optimizers_are_saved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("ltc")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3, device="ltc")).sum().backward()
    optimizer.step()
    saved = round_trip({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("ltc")
    fresh.load_state_dict(saved["model"])
    assert_same(dict(fresh.state_dict()), {k: v.cpu() for k, v in model.state_dict().items()})
    fresh_optimizer = torch.optim.Adam(fresh.parameters())
    fresh_optimizer.load_state_dict(saved["optimizer"])
    whole = round_trip(model, weights_only=False)
    assert isinstance(whole[0].weight, nn.Parameter)
    assert whole[0].weight.requires_grad
    assert_same(whole[0].weight, model[0].weight.detach().cpu())
    parameter = round_trip(nn.Parameter(torch.ones(2, device="ltc")))
    assert isinstance(parameter, nn.Parameter)


def test_tied_weights_stay_tied_in_a_file_and_in_a_deep_copy() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    model.to("ltc")
    for twin in (copy.deepcopy(model), round_trip(model, weights_only=False)):
        assert twin["a"].weight is twin["b"].weight
    state = round_trip(model.state_dict())
    state["a.weight"].fill_(7)
    assert state["b.weight"][0, 0].item() == 7.0


def test_saving_syncs_and_runs_nothing_twice() -> None:
    x = counted(torch.ones(2, device="ltc"))
    back = round_trip(x)
    assert back.tolist() == x.tolist() == [2.0, 2.0]
    assert probe.runs == 1


def test_pickle_keeps_requires_grad_and_attributes() -> None:
    x = torch.ones(2, device="ltc", requires_grad=True)
    back = pickle.loads(pickle.dumps(x))
    assert back.requires_grad
    assert back.is_leaf
    (back * 3).sum().backward()
    assert back.grad.tolist() == [3.0, 3.0]


def test_a_copy_does_not_carry_the_originals_place_in_the_pending_program() -> None:
    # The number a tensor has in the program belongs to that tensor alone.
    x = torch.ones(2, device="ltc") * 2
    twin = copy.deepcopy(x)
    x.add_(5)
    assert (twin + 1).tolist() == [3.0, 3.0]
    assert (x + 1).tolist() == [8.0, 8.0]


def test_storages_copy() -> None:
    x = torch.arange(3.0, device="ltc")
    storage = x.untyped_storage()
    assert len(storage) == storage.size() == storage.nbytes() == 12
    assert bytes(storage.cpu().tolist()) == x.cpu().numpy().tobytes()
    clone = storage.clone()
    assert clone.device.type == "ltc"
    y = torch.empty(0, device="ltc").set_(clone, 0, (3,))
    y.zero_()
    assert x.tolist() == [0.0, 1.0, 2.0]
    assert copy.deepcopy(storage).device.type == "ltc"


def test_a_part_of_a_storage_is_a_copy_on_the_device() -> None:
    x = torch.arange(3, dtype=torch.int16)
    storage, expected = x.to("ltc").untyped_storage(), x.untyped_storage()
    part = storage[1:5]
    assert part.device.type == "ltc"
    assert part.nbytes() == 4
    assert part.tolist() == list(part) == expected[1:5].tolist()
    assert [part[n] for n in range(-4, 4)] == [expected[1:5][n] for n in range(-4, 4)]
    assert torch.empty(0, dtype=torch.int16, device="ltc").set_(storage[2:]).tolist() == [1, 2]


def test_to_cpu_and_save_take_whole_structures_with_one_sync(tmp_path: Path) -> None:
    values = {"a": [torch.ones(2, device="ltc") + 1, 5], "b": (torch.zeros(1), torch.zeros(1, device="ltc") - 1)}
    with observe() as seen:
        moved = torch_ltc.to_cpu(values)
    assert len(seen.syncs) == 1
    assert moved["a"][0].device.type == "cpu"
    assert moved["a"][0].tolist() == [2.0, 2.0]
    assert moved["a"][1] == 5
    assert moved["b"][1].tolist() == [-1.0]
    assert isinstance(moved["b"], tuple)
    path = tmp_path / "saved.pt"
    torch_ltc.save(values, path)
    assert torch.load(path)["a"][0].device.type == "cpu"


def test_tensors_travel_through_a_queue() -> None:
    x = torch.arange(6.0).to("ltc")
    sent = [x.view(2, 3).t(), torch.nn.Parameter(x + 1), torch.nn.Parameter(x, requires_grad=False), torch.ones(1)]
    queue = torch.multiprocessing.get_context("fork").Queue()
    queue.put(sent)
    got = queue.get(timeout=60)
    for mine, theirs in zip(sent, got, strict=True):
        assert type(mine) is type(theirs)
        assert mine.device == theirs.device
        assert mine.requires_grad == theirs.requires_grad
        torch.testing.assert_close(theirs.cpu(), mine.cpu(), rtol=0, atol=0)


def test_a_tensor_that_cannot_travel_is_an_error_where_it_is_taken_out() -> None:
    queue = torch.multiprocessing.get_context("fork").Queue()
    queue.put(torch.ones(2, device="ltc", requires_grad=True) * 2)
    with pytest.raises(LtcError, match=r"no leaf[\s\S]*detach"):
        queue.get(timeout=60)


def _in_a_forked_process(queue: Any) -> None:
    try:
        torch.ones(2, device="ltc").cpu()
        queue.put("worked")
    except LtcError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_use_in_a_forked_process_is_a_clear_error_and_no_hang() -> None:
    torch.ones(2, device="ltc").cpu()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_a_forked_process, args=(queue,), daemon=True)
    process.start()
    text = queue.get(timeout=60)
    process.join(60)
    assert "forked" in text
    assert "spawn" in text


def test_modules_and_tensors_are_given_to_a_spawned_process(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    x = torch.arange(6.0).view(2, 3)
    expected = model(x).sum().item()
    path = tmp_path / "made.pt"
    given = (copy.deepcopy(model).to("ltc"), x.to("ltc"), str(path))
    torch.multiprocessing.spawn(train_in_process, args=given, nprocs=1)
    index, device, loss, gradients = torch.load(path)
    assert (index, device, loss) == (0, "ltc:0", expected)
    assert [gradient.shape for gradient in gradients] == [(2, 3), (2,)]


def test_the_old_file_format_keeps_data_and_aliases(tmp_path: Path) -> None:
    x = torch.arange(10.0, device="ltc")
    torch.save([x, x[5:]], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for location in (None, "cpu", "ltc"):
        whole, part = torch.load(tmp_path / "old.pt", map_location=location)
        assert whole.device.type == (location or "ltc")
        whole.add_(1)
        assert part.tolist() == [6.0, 7.0, 8.0, 9.0, 10.0]


class _Scaled(nn.Module):
    """A layer with a buffer that is a view of another one, and a constant of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        values = torch.arange(16.0, device="ltc")
        self.register_buffer("values", values)
        self.register_buffer("last", values[8:])

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result, scaled."""
        return self.inner(x) * self.last + self.values[:8]


def _script_archive(model: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    return file


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace", "freeze"])
def test_a_torchscript_archive_has_the_weights(how: str) -> None:
    # Constants are compared when a module is frozen or saved.
    with settings.scope(fallback="allow"):
        _check_archive(how)


def _check_archive(how: str) -> None:
    model = _Scaled().to("ltc").eval()
    x = torch.randn(2, 8, device="ltc")
    scripted: Any = torch.jit.trace(model, x) if how == "trace" else torch.jit.script(model)
    scripted = torch.jit.freeze(scripted) if how == "freeze" else scripted
    with torch.no_grad():
        for _ in range(2):
            expected = scripted(x).cpu()
            for location in (None, "cpu", "ltc"):
                if how == "freeze" and location == "cpu":
                    continue
                loaded = torch.jit.load(_script_archive(scripted), map_location=location)
                device = location or "ltc"
                assert {tensor.device.type for tensor in loaded.state_dict().values()} <= {device}
                assert_same(loaded(x.to(device)), expected)
            model.inner.weight.mul_(2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_function_keeps_the_constants_of_its_graph(tmp_path: Path) -> None:
    constant = torch.arange(3.0, device="ltc")
    function = torch.jit.trace(lambda x: x * constant, torch.ones(3, device="ltc"))
    function.save(str(tmp_path / "function.pt"))
    loaded = torch.jit.load(tmp_path / "function.pt")
    assert loaded(torch.full((3,), 2.0, device="ltc")).tolist() == [0.0, 2.0, 4.0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_package_has_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.package.package_exporter, "_gate_torchscript_serialization", False)
    model = nn.Linear(8, 8).to("ltc")
    x = torch.randn(2, 8, device="ltc")
    with torch.package.PackageExporter(tmp_path / "package.pt") as exporter:
        exporter.save_pickle("models", "script.pkl", torch.jit.script(model))
        exporter.save_pickle("models", "state.pkl", model.state_dict())
    importer = torch.package.PackageImporter(tmp_path / "package.pt")
    assert_same(importer.load_pickle("models", "script.pkl")(x), model(x).cpu())
    assert_same(importer.load_pickle("models", "state.pkl")["weight"], model.weight.cpu())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_an_exported_program_is_saved() -> None:
    model = nn.Linear(8, 8).to("ltc")
    x = torch.randn(2, 8, device="ltc")
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    assert_same(torch.export.load(file).module()(x), model(x).cpu())


def test_libraries_that_compare_data_pointers_save_shared_tensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to("ltc")
    model[1].weight = model[0].weight
    safetensors.save_model(model, tmp_path / "model.safetensors")
    assert len(safetensors.load_file(tmp_path / "model.safetensors")) == 1
    other = copy.deepcopy(model)
    nn.init.zeros_(other[0].weight)
    safetensors.load_model(other, tmp_path / "model.safetensors")
    assert_same(other[1].weight, model[0].weight.cpu())


def test_transformers_saves_a_model_with_tied_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to("ltc")
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert_same(model.lm_head.weight, loaded.lm_head.weight)


def test_accelerate_saves_and_loads_the_state_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "ltc")
    accelerator = accelerate.Accelerator()
    try:
        model = nn.Linear(4, 2)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), data)

        def epoch() -> list[Tensor]:
            for (batch,) in data:
                assert batch.device.type == "ltc"
                optimizer.zero_grad()
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
            return [parameter.detach().cpu() for parameter in model.parameters()]

        epoch()
        accelerator.save_state(tmp_path)
        expected = epoch()
        accelerator.load_state(tmp_path)
        assert model.weight.device.type == "ltc"
        for ours, wanted in zip(epoch(), expected, strict=True):
            assert_same(ours, wanted)
    finally:
        accelerator.free_memory()
        accelerate.state.AcceleratorState._reset_state(True)
