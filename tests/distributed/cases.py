"""What the ranks do in the distributed tests: each case on a device, with a result that does not depend on it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import torch_ltc
from tests.distributed.models import VOCABULARY_SIZE, Llama, Mlp, Skipping, convnet

Result = dict[str, Tensor]
STEPS = 5


@dataclass(frozen=True, slots=True)
class Training:
    """A network, its data by step and rank, and what it is trained with."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)


def _vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 16), torch.randint(8, (6,))


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 1, 8, 8), torch.randint(8, (6,))


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY_SIZE, (3, 9))
    return tokens[:, :-1], tokens[:, 1:]


MLP = Training(Mlp, _vectors)
SKIPPING = Training(Skipping, _vectors)
CONVNET = Training(convnet, _images)
SYNC_CONVNET = Training(lambda: convnet(sync=True), _images)
LLAMA = Training(Llama, _tokens, lambda parameters: AdamW(parameters, lr=1e-2))
# PyTorch has no lists of sharded and whole parameters at once, on any accelerator.
LLAMA_ONE_BY_ONE = replace(LLAMA, optimizer=lambda parameters: AdamW(parameters, lr=1e-2, foreach=False))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross entropy of a batch."""
    logits = model(batch[0])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def train(
    training: Training,
    device: str,
    wrap: Callable[[nn.Module], nn.Module],
    accumulate: int = 1,
    same_data: bool = False,
) -> tuple[nn.Module, Result]:
    """Train for some steps; the network and the losses."""
    torch.manual_seed(0)
    model = wrap(training.make().to(device))
    optimizer = training.optimizer(model.parameters())
    torch.manual_seed(100 if same_data else 100 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for turn in range(accumulate):
            batch = tuple(tensor.to(device) for tensor in training.batch())
            last = turn == accumulate - 1
            with nullcontext() if last else model.no_sync():  # type: ignore[operator]
                loss = loss_of(model, (batch[0], batch[1]))
                loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, {"losses": torch.stack(losses).cpu()}


def _ddp(training: Training, accumulate: int = 1, **options: Any) -> Callable[[str], Result]:
    def case(device: str) -> Result:
        model, result = train(training, device, lambda plain: DistributedDataParallel(plain, **options), accumulate)
        return {**result, **{name: value.detach().cpu() for name, value in model.state_dict().items()}}

    return case


def whole(model: nn.Module) -> Result:
    """Parameters and buffers, put together where they are sharded."""
    found = {}
    for name, value in model.state_dict().items():
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
    return found


def shard(model: nn.Module, device: str) -> nn.Module:
    """Shard the network over all ranks, the layers of a decoder each by themselves."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _sharded(training: Training) -> Callable[[str], Result]:
    def case(device: str) -> Result:
        model, result = train(training, device, lambda plain: shard(plain, device))
        return {**result, **whole(model)}

    return case


_MLP_PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
_LLAMA_PLAN: dict[str, Any] = {
    **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    **{f"layers.*.{name}": ColwiseParallel() for name in ("w1", "w3")},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("attention.wo", "w2")},
}


def _tensor_parallel(training: Training, plan: dict[str, Any]) -> Callable[[str], Result]:
    def case(device: str) -> Result:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        model, result = train(training, device, lambda plain: parallelize_module(plain, mesh, plan), same_data=True)
        return {**result, **whole(model)}

    return case


def join(device: str) -> Result:
    """Ranks that have more batches than others, with `Join`."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MLP.make().to(device))
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    with Join([model]):
        for _ in range(STEPS - dist.get_rank() % 2):
            optimizer.zero_grad()
            batch = MLP.batch()
            loss_of(model, (batch[0].to(device), batch[1].to(device))).backward()
            optimizer.step()
    return whole(model)


def many_steps(device: str) -> Result:
    """As DDP of the MLP, until what compiles in the background has run."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MLP.make().to(device), bucket_cap_mb=_SMALL)
    optimizer = SGD(model.parameters(), lr=0.01)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(12):
        optimizer.zero_grad()
        batch = MLP.batch()
        loss_of(model, (batch[0].to(device), batch[1].to(device))).backward()
        optimizer.step()
        if step == 8 and device == "ltc":
            torch_ltc.wait_for_compiles()
    return whole(model)


# Buckets of a few hundred bytes: each network has several.
_SMALL = 0.001
# Of which each step is more than one program.
UNEVEN: dict[str, Callable[[str], Result]] = {"ddp_join": join, "ddp_many": many_steps}
# Need the extension in C++.
UNUSED: dict[str, Callable[[str], Result]] = {
    "ddp_unused": _ddp(SKIPPING, find_unused_parameters=True),
    "ddp_static": _ddp(MLP, static_graph=True),
}
CASES: dict[str, Callable[[str], Result]] = {
    "ddp_mlp": _ddp(MLP, bucket_cap_mb=_SMALL),
    "ddp_views": _ddp(MLP, gradient_as_bucket_view=True),
    "ddp_no_sync": _ddp(MLP, accumulate=2),
    "ddp_convnet": _ddp(CONVNET),
    "ddp_llama": _ddp(LLAMA, bucket_cap_mb=_SMALL),
    "fsdp_mlp": _sharded(MLP),
    "fsdp_convnet": _sharded(CONVNET),
    "fsdp_llama": _sharded(LLAMA),
    "tp_mlp": _tensor_parallel(MLP, _MLP_PLAN),
    "tp_llama": _tensor_parallel(LLAMA_ONE_BY_ONE, _LLAMA_PLAN),
}


def enter_group(options: argparse.Namespace) -> None:
    """Enter the group of ranks that the options `store`, `rank` and `size` describe."""
    dist.init_process_group(
        "cpu:gloo,ltc:ltc",
        init_method=f"file://{options.store}",
        rank=options.rank,
        world_size=options.size,
        timeout=timedelta(seconds=60),
    )
