"""Lightning: the accelerator `ltc`, mixed precision, Fabric, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_ltc
from tests.ecosystem.support import compare
from torch_ltc.errors import LtcWarning
from torch_ltc.libraries.choice import choice
from torch_ltc.native.library import extension

pytest.importorskip("lightning")
import lightning

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Classifier(lightning.LightningModule):
    """Two layers, that keep where they were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.devices: set[str] = set()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        rows, labels = batch
        self.devices.add(rows.device.type)
        loss = F.cross_entropy(self.layers(rows), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("valid", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def loader() -> Any:
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 64).view(16, 4), torch.arange(16) % 2), batch_size=4)


def trainer(folder: Path, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    return lightning.Trainer(default_root_dir=folder, **quiet | options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_trainer_trains_there_as_on_the_cpu(precision: str, tmp_path: Path) -> None:
    def train(device: str) -> Any:
        torch.manual_seed(0)
        model = Classifier()
        made = trainer(tmp_path, accelerator=device, precision=precision, gradient_clip_val=0.5)
        made.fit(model, loader(), loader())
        assert model.devices == {device}
        assert made.strategy.root_device.type == device
        return [made.callback_metrics["loss"], made.callback_metrics["valid"], *model.parameters()]

    compare("lightning", f"Trainer, {precision}", train)


def test_float16_is_scaled_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Classifier()
    made = trainer(tmp_path, accelerator="ltc", precision="16-mixed")
    made.fit(model, loader())
    scaler = made.strategy.precision_plugin.scaler
    assert scaler.is_enabled()
    assert scaler.get_scale() == 65536.0
    assert all(torch.isfinite(parameter).all().item() for parameter in model.parameters())


def test_checkpoints_move_between_devices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Classifier()
    trainer(tmp_path, accelerator="ltc", max_epochs=1).fit(model, loader())
    saved = next(tmp_path.rglob("*.ckpt"))
    results = []
    for device in ("cpu", "ltc"):
        resumed = Classifier()
        trainer(tmp_path, accelerator=device).fit(resumed, loader(), ckpt_path=saved)
        results.append([parameter.detach().cpu() for parameter in resumed.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_trains_there_as_on_the_cpu(precision: Any) -> None:
    def train(device: str) -> Any:
        fabric = lightning.Fabric(accelerator=device, devices=1, precision=precision)
        fabric.launch()
        assert fabric.device.type == device
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for rows, labels in fabric.setup_dataloaders(loader()):
            assert rows.device.type == device
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows), labels)
            fabric.backward(loss)
            optimizer.step()
        return [loss, *model.parameters()]

    compare("lightning", f"Fabric, {precision}", train)


def test_the_device_is_chosen_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch_ltc.use_in_libraries():
        assert trainer(tmp_path).strategy.root_device.type == "ltc"
        assert lightning.Fabric(devices=1).device.type == "ltc"
        assert trainer(tmp_path, accelerator="cpu").strategy.root_device.type == "cpu"
    monkeypatch.setattr(choice, "_told", set())
    with pytest.warns(LtcWarning, match=r"Lightning runs on cpu: torch_ltc\.use_in_libraries\(\)"):
        assert trainer(tmp_path).strategy.root_device.type == "cpu"


@pytest.mark.parametrize("devices", [2, "2", [0, 1], "0,1"])
def test_more_than_one_device_is_a_process_each(tmp_path: Path, devices: Any) -> None:
    strategy = trainer(tmp_path, accelerator="ltc", devices=devices).strategy
    assert type(strategy).__name__ == "DDPStrategy"
    numbers = [0, 1] if extension is not None else [0, 0]
    assert strategy.parallel_devices == [torch.device("ltc", number) for number in numbers]


def test_the_strategy_is_in_the_registry(tmp_path: Path) -> None:
    assert trainer(tmp_path, accelerator="ltc", strategy="ltc").strategy.root_device.type == "ltc"
