"""What the ranks do in the distributed tests: each case on a device, with a result that does not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

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


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross entropy of a batch."""
    logits = model(batch[0])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def train(
    training: Training, device: str, wrap: Callable[[nn.Module], nn.Module], accumulate: int = 1
) -> tuple[nn.Module, Result]:
    """Train for some steps; the network and the losses."""
    torch.manual_seed(0)
    model = wrap(training.make().to(device))
    optimizer = training.optimizer(model.parameters())
    torch.manual_seed(100 + dist.get_rank())
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


# Buckets of a few hundred bytes: each network has several.
_SMALL = 0.001
CASES: dict[str, Callable[[str], Result]] = {
    "ddp_mlp": _ddp(MLP, bucket_cap_mb=_SMALL),
    "ddp_views": _ddp(MLP, gradient_as_bucket_view=True),
    "ddp_no_sync": _ddp(MLP, accumulate=2),
    "ddp_convnet": _ddp(CONVNET),
    "ddp_llama": _ddp(LLAMA, bucket_cap_mb=_SMALL),
}
