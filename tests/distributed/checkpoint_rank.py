"""One rank that trains a sharded network, saves it, and goes on from what it saved."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import torch_ltc  # noqa: F401  registers the device
from tests.distributed.cases import MLP, enter_group, shard, train, whole


def main() -> None:
    """Train, save the shards, and on rank 0 the whole network beside them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    enter_group(options)
    model, _ = train(MLP, "ltc", lambda plain: shard(plain, "ltc"))
    checkpoint.save(get_model_state_dict(model), checkpoint_id=options.folder / "sharded")
    expected = whole(model)
    if options.rank == 0:
        torch.save(expected, options.folder / "whole.pt")
    # Loaded into another network of the same ranks.
    other = shard(MLP.make().to("ltc"), "ltc")
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=options.folder / "sharded")
    other.load_state_dict(state)
    loaded = whole(other)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
