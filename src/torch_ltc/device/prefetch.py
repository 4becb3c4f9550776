"""`prefetch(loader)`: uploads the next batches while the present one is used."""

from __future__ import annotations

import copy
import dataclasses
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Prefetch", "prefetch"]

Batch = TypeVar("Batch")

_END_TIMEOUT_S = 5.0
_NONE = object()


def moved(value: Any) -> Any:
    """The batch with its tensors on the device: in dicts, lists, tuples, dataclasses, and objects that have `to`."""
    if isinstance(value, torch.Tensor):
        return value.to("ltc", non_blocking=True)
    if isinstance(value, dict):
        mapping = copy.copy(value)
        mapping.update({key: moved(item) for key, item in value.items()})
        return mapping
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[moved(item) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)([moved(item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            # Frozen ones, too: the copy is nobody else's yet.
            object.__setattr__(made, field.name, moved(getattr(value, field.name)))
        return made
    if hasattr(value, "to") and not isinstance(value, type):
        return value.to("ltc")
    if isinstance(value, Mapping):
        return {key: moved(item) for key, item in value.items()}
    return value


class _Ended:
    """The loader has no more batches, or has raised."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Ahead:
    """A thread that takes batches from an iterator, uploads them, and keeps a bounded number of them."""

    def __init__(self, batches: Iterator[Any], most: int) -> None:
        self._batches = batches
        self._ready: queue.Queue[Any] = queue.Queue(most)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="torch_ltc prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """The next batch, or `_Ended`."""
        return self._ready.get()

    def stop(self) -> None:
        """Let the thread end after the batch that it is at."""
        self._stopped.set()
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        self._thread.join(_END_TIMEOUT_S)

    def _fill(self) -> None:
        ended = _Ended(None)
        try:
            for batch in self._batches:
                if not self._put(moved(batch)):
                    return
        except BaseException as error:  # raised again where the batch would have come
            ended = _Ended(error)
        finally:
            # A loader with processes ends them when its iterator goes.
            self._batches = iter(())
        self._put(ended)

    def _put(self, item: Any) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            # `stop` may have emptied the queue before this.
            return not self._stopped.is_set()
        return False


class Prefetch(Generic[Batch]):
    """A loader whose batches are on the device; see `prefetch`. All else is the loader's own."""

    def __init__(self, loader: Iterable[Batch], batches: int) -> None:
        self._loader = loader
        self._most = batches

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        # On this thread: samplers draw their seed at the first batch, from the generator that the user has seeded.
        first: Any = next(batches, _NONE)
        if first is _NONE:
            return
        ahead = _Ahead(batches, self._most)
        del batches
        try:
            yield moved(first)
            del first
            while not isinstance(batch := ahead.next(), _Ended):
                yield batch
            if batch.error is not None:
                raise batch.error
        finally:
            ahead.stop()


def prefetch(loader: Iterable[Batch], batches: int = 2) -> Prefetch[Batch]:
    """Iterate over a loader with its batches on the device: while one is used, a thread fetches and uploads the next
    ones, at most so many.

    Takes any iterable. Order, length and exceptions are the loader's; leaving the loop ends the thread. Random numbers
    that the loader draws in this process for each batch are drawn earlier than without: give it a generator of its own
    where that matters.
    """
    if batches < 1:
        raise ValueError(f"prefetch keeps at least one batch ahead, not {batches}")
    return Prefetch(loader, batches)
