"""Uploads: copies of host memory to the physical device, beside the programs that run there.

On CUDA a copy has a stream of its own, so that it does not wait for what was launched before it, and comes from pinned
memory: its own, or a staging copy, after which the source is free again. What is launched later waits for it.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable

import torch

from torch_ltc.execute.device_loss import device_loss, device_lost
from torch_ltc.execute.executor import executor
from torch_ltc.lowering.out_of_memory import is_out_of_memory, make_room
from torch_ltc.record.buffer import physical_device

__all__ = ["Copy", "upload"]

# Makes the copy on the physical device: takes the source, and whether to return before it is done.
Copy = Callable[[torch.Tensor, bool], torch.Tensor]

_streams: dict[torch.device, torch.cuda.Stream] = {}


def upload(source: torch.Tensor, copy: Copy, non_blocking: bool = False) -> torch.Tensor:
    """The copy that `copy` makes. The caller may write to the source afterwards, unless it is pinned memory and
    `non_blocking` says that the caller waits for itself. Where there is no memory for it, others give theirs back."""
    try:
        return _upload(source, copy, non_blocking)
    except Exception as error:
        lost = device_loss.told(error)
        if lost is not None:
            raise lost from error
        # On the worker: what gives memory back is used there.
        if not is_out_of_memory(error) or not executor.call(functools.partial(make_room, error)):
            raise
    return _upload(source, copy, non_blocking)


def _upload(source: torch.Tensor, copy: Copy, non_blocking: bool) -> torch.Tensor:
    device = physical_device()
    if device.type != "cuda" or not _can_be_staged(source):
        return copy(source, False)
    pinned = source.is_pinned()
    staged = source if pinned else _staged(source)
    if staged is None:
        return copy(source, False)
    with torch.cuda.device(device):
        return _upload_beside(staged, copy, device, wait=pinned and not non_blocking)


def _can_be_staged(source: torch.Tensor) -> bool:
    plain = source.layout is torch.strided and not (source.is_conj() or source.is_neg() or source.is_quantized)
    return plain and source.device.type == "cpu" and source.numel() > 0


def _staged(source: torch.Tensor) -> torch.Tensor | None:
    """A copy in pinned memory; None when no more memory can be pinned."""
    try:
        pinned = torch.empty_like(source, requires_grad=False, pin_memory=True)
    except RuntimeError:
        return None
    return pinned.copy_(source.detach())


def _upload_beside(source: torch.Tensor, copy: Copy, device: torch.device, wait: bool) -> torch.Tensor:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    # The worker launches programs on the default stream.
    stream, programs = _streams[device], torch.cuda.default_stream(device)
    with torch.cuda.stream(stream):
        data = copy(source, True)
    copied = stream.record_event()
    programs.wait_event(copied)
    # Its memory belongs to the stream of the copy: not free before the programs that use it have run.
    data.record_stream(programs)
    _note(data)
    if wait:
        copied.synchronize()
    return data


# Memory that was uploaded and may be in use, by the identity of its tensor.
_alive: dict[int, weakref.ref[torch.Tensor]] = {}


def _note(data: torch.Tensor) -> None:
    key = id(data)
    _alive[key] = weakref.ref(data, lambda _: _alive.pop(key, None))


def _keep_for_ever() -> None:
    """Free no upload any more: to free memory that two streams use, PyTorch records an event, and on a device that is
    lost that ends the process, at its end too."""
    for reference in list(_alive.values()):
        data = reference()
        if data is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(data))


device_lost.add(_keep_for_ever)
