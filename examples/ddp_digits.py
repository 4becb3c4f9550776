"""Train on handwritten digits in several processes with `DistributedDataParallel`; each takes its part of every batch.

    torchrun --nproc-per-node 2 examples/ddp_digits.py
    torchrun --nproc-per-node 2 examples/ddp_digits.py --device cpu    # eager, over gloo

Both print the same numbers. The device is named in three places: the group, and `.to(device)` twice.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torch_ltc

BATCH_SIZE = 32


def make_model() -> nn.Module:
    """A convnet with batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def main() -> None:
    """Train, and print what rank 0 sees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="ltc", choices=("ltc", "cpu"))
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    device = options.device
    dist.init_process_group("ltc" if device == "ltc" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        mean = total.item() / dist.get_world_size()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean:.6f}")
    if rank == 0 and device == "ltc":
        counts = {name: torch_ltc.metrics.counter_value(name) for name in ("MarkStep", "UncachedCompile", "Compile")}
        print(f"{dist.get_world_size()} ranks, on this one {counts}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
