"""State in files, processes and host memory: what libraries save, load, send and recompute."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

from tests.ecosystem.support import compare

pytestmark = pytest.mark.filterwarnings("ignore")


def layer(device: str = "ltc", seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2).to(device)


def stepped(device: str) -> tuple[nn.Linear, torch.optim.Optimizer]:
    module = layer(device)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_checkpoints_of_tensors_alone_load_on_every_device(tmp_path: Path) -> None:
    module, optimizer = stepped("ltc")
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    for device in ("ltc", "cpu"):
        loaded = torch.load(tmp_path / "saved.pt", weights_only=True, map_location=device)
        other, other_optimizer = stepped(device)
        other.load_state_dict(loaded["module"])
        other_optimizer.load_state_dict(loaded["optimizer"])
        assert other.weight.device.type == device
        assert torch.equal(other.weight.cpu(), module.weight.cpu())
        [state, *_] = other_optimizer.state.values()
        assert state["exp_avg"].device.type == device
    mapped = torch.load(tmp_path / "saved.pt", mmap=True)
    assert torch.equal(mapped["module"]["weight"].cpu(), module.weight.cpu())


def test_safetensors_saves_and_loads_on_the_device(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    reader = pytest.importorskip("safetensors").safe_open
    module = layer()
    file = tmp_path / "module.safetensors"
    library.save_model(module, str(file))
    other = layer(seed=1)
    library.load_model(other, str(file), device="ltc")
    assert torch.equal(other.weight.cpu(), module.weight.cpu())
    loaded = library.load_file(str(file), device="ltc:0")
    assert {tensor.device.type for tensor in loaded.values()} == {"ltc"}
    assert torch.equal(library.load_file(str(file))["bias"], module.bias.cpu())
    with reader(str(file), framework="pt", device="ltc") as opened:
        assert set(opened.keys()) == {"weight", "bias"}
        assert torch.equal(opened.get_tensor("weight").cpu(), module.weight.cpu())
        part = opened.get_slice("weight")[:1]
        assert part.device.type == "ltc"
        assert torch.equal(part.cpu(), module.weight[:1].cpu())


def test_distributed_checkpoints_move_between_devices(tmp_path: Path) -> None:
    module, optimizer = stepped("ltc")
    weights, state = get_state_dict(module, optimizer)
    distributed_checkpoint.save({"module": weights, "optimizer": state}, checkpoint_id=tmp_path)
    for device in ("ltc", "cpu"):
        other = layer(device, seed=1)
        other_optimizer = torch.optim.Adam(other.parameters())
        found, found_state = get_state_dict(other, other_optimizer)
        distributed_checkpoint.load({"module": found, "optimizer": found_state}, checkpoint_id=tmp_path)
        set_state_dict(other, other_optimizer, model_state_dict=found, optim_state_dict=found_state)
        assert other.weight.device.type == device
        assert torch.equal(other.weight.cpu(), module.weight.cpu())


# ---- memory savers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_activations_draw_the_same_numbers_again(reentrant: bool) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU()).to(device)
        rows = torch.ones(3, 4).to(device).requires_grad_()
        torch.manual_seed(1)
        out = checkpoint(module, rows, use_reentrant=reentrant)
        out.square().sum().backward()
        return [out, rows.grad, *[parameter.grad for parameter in module.parameters()]]

    compare("torch", f"utils.checkpoint, use_reentrant={reentrant}", train)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_activations_are_kept_on_the_cpu(pin_memory: bool) -> None:
    def train(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Linear(4, 4).to(device)
        rows = torch.ones(3, 4).to(device).requires_grad_()
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            out = module(rows).relu().square()
        out.sum().backward()
        return [out, rows.grad, module.weight.grad]

    compare("torch", f"save_on_cpu(pin_memory={pin_memory})", train)


def test_hooks_see_saved_tensors() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor.cpu())
        return len(kept) - 1

    rows = torch.arange(3.0).to("ltc").requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: kept[index].to("ltc")):
        out = rows.square()
    out.sum().backward()
    assert rows.grad.tolist() == [0.0, 2.0, 4.0]
    assert [tensor.tolist() for tensor in kept] == [[0.0, 1.0, 2.0]]


def test_a_state_dict_in_memory_is_that_of_eager() -> None:
    buffer = io.BytesIO()
    torch.save(layer().state_dict(), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, map_location="cpu")["weight"], layer("cpu").weight)
