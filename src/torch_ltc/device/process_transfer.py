"""Tensors of the device on their way to another process: queues of `torch.multiprocessing`, workers of a DataLoader.

A tensor travels as a copy on the CPU, in shared memory. Queues pickle on a thread of their own, which has nobody to
raise to: what fails there is raised where the item is taken out, in the other process, which would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from torch_ltc.errors import LtcError
from torch_ltc.pytorch.patches import registers
from torch_ltc.pytorch.private import reduce_tensor
from torch_ltc.pytorch.table import PROCESS_TRANSFER

_KINDS = (torch.Tensor, torch.nn.Parameter)


@registers(PROCESS_TRANSFER)
def _register() -> Callable[[], None]:
    for kind in _KINDS:
        ForkingPickler.register(kind, _reduce)

    def undo() -> None:
        for kind in _KINDS:
            ForkingPickler.register(kind, reduce_tensor)

    return undo


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "ltc":
        return reduce_tensor(tensor)
    try:
        if tensor.requires_grad and not tensor.is_leaf:
            raise LtcError(
                "a tensor that requires gradients and is no leaf cannot be sent to another process",
                hint="send tensor.detach()",
            )
        copy = tensor.detach().cpu()
        spawning: Any = get_spawning_popen()
        if spawning is not None:
            # Its file descriptor is handed over when everything is pickled: the copy has to be there until then.
            vars(spawning).setdefault("_ltc_copies", []).append(copy)
        return (_rebuild, (copy, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)))
    except Exception as error:
        return (_raise, (f"{type(error).__name__}: {error}",))


def _rebuild(copy: torch.Tensor, requires_grad: bool, parameter: bool) -> torch.Tensor:
    tensor = copy.to("ltc")
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _raise(what: str) -> None:
    raise LtcError(
        f"another process could not send a tensor of the device\n  {what}",
        hint="make the items of a data set on the CPU, and move batches in the main process",
    )
