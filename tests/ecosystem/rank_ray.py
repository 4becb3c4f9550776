"""Ray Train's `TorchTrainer` with two workers on this machine, which write what came of them into files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.nn import functional as F

GROUPS = {"cpu": "gloo", "ltc": "cpu:gloo,ltc:ltc"}


def register() -> None:
    """Run by Ray in each worker, before it makes the process group: the backend must be known."""
    import torch_ltc  # noqa: F401, PLC0415


def train(config: dict[str, Any]) -> None:
    """The loop of a worker."""
    device = torch.device(config["device"])
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = ray.train.torch.prepare_model(plain, move_to_device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(100 + rank)
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(6, 4).to(device)), torch.randint(2, (6,)).to(device))
        loss.backward()
        optimizer.step()
    ray.train.report({"loss": loss.item()})
    found = {name: value.cpu() for name, value in plain.state_dict().items()}
    kept = {**found, "loss": loss.detach().cpu(), "device": str(loss.device), "model": type(model).__name__}
    torch.save(kept, Path(config["folder"], f"{device.type}.{rank}.pt"))


def main() -> None:
    """Train on a device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=GROUPS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    environment: dict[str, Any] = {"worker_process_setup_hook": register} if options.device == "ltc" else {}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"device": options.device, "folder": str(options.folder)},
        torch_config=ray.train.torch.TorchConfig(backend=GROUPS[options.device]),
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(options.folder / "ray")),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
