"""Asynchronous reads of numbers: the value comes when the program that computes it has run anyway."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcError
from torch_ltc.events import SyncReason
from torch_ltc.execute.device_loss import device_loss
from torch_ltc.execute.executor import Uses, executor
from torch_ltc.execute.no_sync import sync_guard
from torch_ltc.execute.sync import cut, physical, touched
from torch_ltc.program.spec import spec_of
from torch_ltc.record.buffer import buffer_of
from torch_ltc.record.call_site import current_source
from torch_ltc.record.recorder import recorder

__all__ = ["AsyncItem", "async_item"]

Number = bool | int | float | complex
# Devices that compute beside the host: a worker that waited there for a number could not launch the next program.
_BESIDE_THE_HOST = frozenset({"cuda"})


class _Landing:
    """A number on its way from the device: a copy in pinned memory, and the event that follows it."""

    def __init__(self, real: torch.Tensor) -> None:
        self._copy = real.to("cpu", non_blocking=True, copy=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        """True when it is there."""
        return bool(self._event.query())

    def number(self) -> Number:
        """Wait for it."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            lost = device_loss.told(error)
            if lost is None:
                raise
            raise lost from error
        return _number(self._copy)


class AsyncItem:
    """A number that is on its way: `done()` says whether it is there, `result()` gives it.

    `float(...)` and `int(...)` give it too. `result()` waits; when the program that computes the number has not been
    synced yet, it syncs first, as `item()` does.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._buffer = buffer_of(tensor)
        self._spec = spec_of(tensor)
        self._future: Future[Number | _Landing] | None = None
        # Kept until its program is queued: its version tells whether it was written to meanwhile.
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._error: LtcError | None = None
        self._source = str(current_source(3))

    def queue(self) -> None:
        """Queue the read, behind what was queued before. With the recorder's lock held."""
        buffer, spec, tensor = self._buffer, self._spec, self._tensor
        if tensor is not None and tensor._version != self._version:
            self._error = LtcError(
                "the tensor was written to in the same program after async_item() was called on it",
                source=self._source,
                hint="async_item(tensor.clone()), or call it after the write",
            )
        self._tensor = None
        self._future = executor.submit(lambda: _item(physical(buffer, spec)), Uses((buffer,), ()), wait=False)

    def done(self) -> bool:
        """True when the number is there; never waits or syncs."""
        if self._future is None or not self._future.done():
            return False
        landing = None if self._future.exception() is not None else self._future.result()
        return not isinstance(landing, _Landing) or landing.done()

    def result(self) -> Number:
        """The number. Waits for it; raises the error of the operation that should have made it."""
        if self._future is None or not self._future.done():
            if sync_guard.threads:
                sync_guard.check(SyncReason.READ)
            with recorder.lock:
                if self._future is None:
                    cut(SyncReason.READ)
        assert self._future is not None
        if self._error is not None:
            raise self._error
        try:
            return _landed(executor.result_of(self._future))
        except LtcError as error:
            deferred.discard_error(error)
            raise

    def __float__(self) -> float:
        return float(self.result().real)

    def __int__(self) -> int:
        return int(self.result().real)

    def __repr__(self) -> str:
        if not self.done() or self._error is not None:
            return "AsyncItem(pending)"
        assert self._future is not None
        failed = self._future.exception() is not None
        return "AsyncItem(failed)" if failed else f"AsyncItem({_landed(self._future.result())!r})"


def _item(real: torch.Tensor) -> Number | _Landing:
    return _Landing(real) if real.device.type in _BESIDE_THE_HOST else _number(real)


def _landed(value: Number | _Landing) -> Number:
    return value.number() if isinstance(value, _Landing) else value


def _number(real: torch.Tensor) -> Number:
    number: Number = torch.ops.aten._local_scalar_dense.default(real)
    return number


def async_item(tensor: torch.Tensor) -> AsyncItem:
    """The number that a tensor of one element holds, as `tensor.item()` gives it, without a sync and without waiting.

    Nothing is recorded for it: a step that logs its loss this way is the same program as one that does not, as long as
    the loss is held at the end of both.
    """
    if tensor.device.type != "ltc":
        raise LtcError(f"async_item takes a tensor on ltc, got one on {tensor.device}", hint="use tensor.item()")
    if tensor.numel() != 1:
        # What item() says.
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    item = AsyncItem(tensor)
    with recorder.lock:
        if touched(item._buffer):
            recorder.awaited.append(item)
        else:
            item.queue()
    return item
