"""Ranks on a machine with one GPU: NCCL with one rank, and two ranks that share the GPU, through gloo.

    python -m tests.distributed.gpu

Starts itself under `torchrun` with one rank and with two. Each trains the networks of the distributed tests on the CPU
with plain gloo and on the device, whose programs run on the GPU, compares the parameters, and shows how a longer
training was captured, with the reason for what was left outside of graphs. The exit status is 0 when all is well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_ltc
from tests.distributed.cases import CASES, SYNC_CONVNET, Result, train
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.distributed.groups import groups

NAMES = ("ddp_mlp", "ddp_views", "ddp_convnet", "ddp_llama", "fsdp_mlp", "fsdp_llama", "tp_mlp", "tp_llama")
STEPS = 30


def _far(expected: Result, found: Result) -> list[str]:
    """The tensors that are not close: kernels of a GPU add in another order."""
    pairs = {name: (expected[name].double(), found[name].double()) for name in expected}
    return [
        f"{name}: {(one - other).abs().max().item():.2e}"
        for name, (one, other) in pairs.items()
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    ]


def _longer() -> list[str]:
    """How a training of many steps was captured; a line for each program that was."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to("ltc"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 256).to("ltc")
    seen: list[events.CaptureEvent] = []
    replayed: list[events.ExecuteEvent] = []
    stops = events.subscribe(seen.append, events.CaptureEvent), events.subscribe(replayed.append, events.ExecuteEvent)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch_ltc.sync(wait=True)
    for stop in stops:
        stop()
    lines = [f"{event.graphs} graphs; {event.text or event.refusal}" for event in seen]
    return [*lines, f"{sum(event.captured for event in replayed)} of {len(replayed)} executions were replays"]


def run_rank() -> None:
    """Compare and show, on one rank."""
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("cpu:gloo,ltc:ltc", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    failed: list[str] = []
    for name in NAMES:
        far = _far(CASES[name]("cpu"), CASES[name]("ltc"))
        failed += [f"{name} {one}" for one in far]
        if rank == 0:
            print(f"  {name}: {far or 'equal to the CPU within 1e-3'}", flush=True)
    on_gpu = settings.device_type == "cuda"
    if on_gpu:
        _, result = train(SYNC_CONVNET, "ltc", lambda plain: DistributedDataParallel(plain))
        if not torch.isfinite(result["losses"]).all():
            failed.append("SyncBatchNorm gave no finite losses")
    with settings.scope(backend="interpreter"):
        lines = _longer()
    text = str(torch_ltc.explain())
    if rank == 0:
        (_, physical), *_ = groups.members()
        used = type(physical._get_backend(torch.device(settings.device_type))).__name__
        print(f"  {size} ranks on {torch.cuda.device_count()} GPUs, moved by {used}")
        print("\n".join(f"  capture: {line}" for line in lines))
    shown = [line for line in text.splitlines() if "captured" in line and "wait for other ranks" in line]
    if on_gpu and settings.cuda_graphs != "off" and not shown:
        failed.append("explain() does not say why collectives are left outside of graphs")
    dist.destroy_process_group()
    if failed:
        sys.exit("\n".join(f"rank {rank}: {line}" for line in failed))


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--physical", choices=("cuda", "cpu"), default="cuda", help="cpu to try the script itself")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        run_rank()
        return
    environment = {**os.environ, "LTC_TS_CUDA": str(int(options.physical == "cuda")), "OMP_NUM_THREADS": "4"}
    statuses = []
    for size in options.sizes:
        print(f"{size} ranks:", flush=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        statuses.append(subprocess.run([*command, "-m", "tests.distributed.gpu"], env=environment).returncode)
    print(f"exit statuses {statuses}")
    sys.exit(max(statuses))


if __name__ == "__main__":
    main()
