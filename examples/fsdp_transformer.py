"""Train a small decoder that is sharded over several processes with `fully_shard` (FSDP2), and save the shards.

    torchrun --nproc-per-node 2 examples/fsdp_transformer.py --save shards

What it learns is to count: each sequence goes up by one from a random number.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import torch_ltc  # noqa: F401  registers the device

NUMBERS, LENGTH, WIDTH = 64, 16, 64


class Decoder(nn.Module):
    """Embedding, layers with a causal mask, logits."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUMBERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(layers)]
        )
        self.output = nn.Linear(WIDTH, NUMBERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next number at each place."""
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
        x = self.embedding(tokens) + self.places(torch.arange(length, device=tokens.device))
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        logits: Tensor = self.output(x)
        return logits


def main() -> None:
    """Train, and save on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="ltc", choices=("ltc", "cpu"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", help="a folder for the shards")
    options = parser.parse_args()
    device = options.device
    dist.init_process_group("cpu:gloo,ltc:ltc")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Decoder().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(options.steps):
        tokens = ((torch.randint(NUMBERS, (32, 1)) + torch.arange(LENGTH + 1)) % NUMBERS).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            shown = loss.item()
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {shown:.4f}")
    if options.save:
        checkpoint.save(get_model_state_dict(model), checkpoint_id=options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
