"""A script with Lightning's `Trainer` or `Fabric` on two devices, which starts the second process by itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_ltc  # noqa: F401  registers the accelerator


class Classifier(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader() -> Any:
    """32 rows in batches of four."""
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 128).view(32, 4), torch.arange(32) % 2), batch_size=4)


def train_with_trainer(device: str, folder: Path) -> dict[str, Any]:
    """Two epochs."""
    torch.manual_seed(0)
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator=device, devices=2, strategy="ddp", max_epochs=2, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, loader())
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    return {**found, "loss": trainer.callback_metrics["loss"].cpu(), "device": str(trainer.strategy.root_device)}


def train_with_fabric(device: str) -> dict[str, Any]:
    """One epoch."""
    fabric = lightning.Fabric(accelerator=device, devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for rows, labels in fabric.setup_dataloaders(loader()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows), labels)
        fabric.backward(loss)
        optimizer.step()
    total = fabric.all_reduce(loss, reduce_op="sum")
    found = {name: value.cpu() for name, value in plain.state_dict().items()}
    return {**found, "total": total.detach().cpu(), "device": str(fabric.device)}


def main() -> None:
    """Train, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("trainer", "fabric"))
    parser.add_argument("device", choices=("cpu", "ltc"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.what == "trainer":
        found = train_with_trainer(options.device, options.folder)
    else:
        found = train_with_fabric(options.device)
    rank = torch.distributed.get_rank()
    torch.save(found, options.folder / f"{options.device}.{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
