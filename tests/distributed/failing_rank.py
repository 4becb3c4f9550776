"""One rank of a test in which ranks fail: does what its name says, and prints the error that it ends with."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import torch_ltc
from torch_ltc.config import settings


def step(x: torch.Tensor) -> torch.Tensor:
    """One collective, in a program of its own."""
    y = x * 2
    dist.all_reduce(y)
    torch_ltc.sync()
    return y


def different_shapes(rank: int) -> None:
    """A rank reduces a tensor of another shape."""
    step(torch.ones(4, device="ltc"))
    step(torch.ones(4 if rank == 0 else 5, device="ltc")).tolist()


def different_operators(rank: int) -> None:
    """A rank broadcasts where the others reduce."""
    x = torch.ones(4, device="ltc")
    if rank == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)
    x.tolist()


def crash(rank: int) -> None:
    """A rank dies without a word."""
    x = step(torch.ones(4, device="ltc"))
    x.tolist()
    if rank == 1:
        os._exit(7)
    step(x).tolist()


def silence(rank: int) -> None:
    """A rank does nothing for longer than the group waits."""
    x = step(torch.ones(4, device="ltc"))
    x.tolist()
    if rank == 1:
        time.sleep(30)
    step(x).tolist()


def late(rank: int) -> None:
    """A rank came later than the others, which waited for it."""
    assert step(torch.ones(4, device="ltc")).tolist() == [4.0] * 4


def too_late(rank: int) -> None:
    """A rank came when the others had given up: never to be reached."""
    step(torch.ones(4, device="ltc")).tolist()


def sync_batch_norm(rank: int) -> None:
    """A layer whose kernels are for GPUs."""
    torch.nn.SyncBatchNorm(3).to("ltc")(torch.ones(2, 3, 4, device="ltc"))


def unlike(rank: int) -> None:
    """What ranks may do otherwise: reads, roots, senders and receivers, parts of different sizes."""
    x = step(torch.ones(4, device="ltc"))
    if rank == 0:
        x.tolist()
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    gathered = [torch.empty(4, device="ltc") for _ in range(2)] if rank == 0 else None
    dist.gather(x, gathered, 0)
    dist.scatter(x, gathered, 0)
    if rank == 1:
        x.tolist()
    part, splits = torch.empty(2 + 2 * rank, device="ltc"), [1 + rank] * 2
    dist.all_to_all_single(part, torch.ones(3, device="ltc"), splits, [1, 2])
    sums = step(x)
    assert sums.tolist() == [16.0] * 4, sums
    assert part.tolist() == [1.0] * (2 + 2 * rank)


# Seconds after which the second rank joins.
LATE_S = {"late": 4.0, "too_late": 15.0}
SCENES: dict[str, Callable[[int], None]] = {
    scene.__name__: scene
    for scene in (different_shapes, different_operators, crash, silence, late, too_late, sync_batch_norm, unlike)
}


def main() -> None:
    """Play one scene."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--timeout-s", type=float)
    parser.add_argument("--check", type=int)
    parser.add_argument("scene")
    options = parser.parse_args()
    settings.rank_check = options.check
    if options.scene == "absence" and options.rank == 1:
        return
    if options.rank == 1:
        time.sleep(LATE_S.get(options.scene, 0.0))
    try:
        dist.init_process_group(
            "ltc",
            init_method=f"file://{options.store}",
            rank=options.rank,
            world_size=options.size,
            timeout=timedelta(seconds=options.timeout_s),
        )
        SCENES[options.scene](options.rank)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        # The others are not to wait for what this rank has queued.
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    main()
