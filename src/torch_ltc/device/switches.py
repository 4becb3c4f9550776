"""Functions that set global switches of PyTorch: calls that were recorded before mean what the switches said then.

A kernel reads the switches when it runs. They are the same for all threads, so a function that changes one has
everything that was recorded before run first. Programs that are recorded afterwards are others: the tree has a root for
each state of the switches. The number of threads and flushing of denormal numbers belong to a thread; a program takes
them along to the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_ltc.events import SyncReason
from torch_ltc.execute.executor import executor
from torch_ltc.execute.sync import cut
from torch_ltc.pytorch.patches import replaces
from torch_ltc.pytorch.switches import SETTERS, TorchState, changes_by
from torch_ltc.record.recorder import recorder
from torch_ltc.shapes.inference import clear_inference_cache


def _run_pending() -> None:
    """Run everything that was recorded."""
    if not recorder.empty:
        cut(SyncReason.STATE)
    executor.drain()


def _look_again() -> None:
    """Record in the state that the switches are in now."""
    state = TorchState.current()

    def enter() -> None:
        recorder.enter_state(state)
        clear_inference_cache()

    if state != recorder.torch_state:
        # After what another thread has recorded in between.
        cut(SyncReason.STATE, then=enter)


def _set_one(changes: Callable[..., bool]) -> Callable[[Any], Any]:
    """Replacement of a function that sets a switch; `changes` takes what it takes."""

    def around(original: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            # Dynamo sets several to what they are whenever it has traced something.
            if changes(*args, **kwargs):
                _run_pending()
            try:
                return original(*args, **kwargs)
            finally:
                _look_again()

        return changed

    return around


for _path in (*SETTERS, "torch.set_default_dtype", "torch.set_default_tensor_type"):
    replaces(_path)(_set_one(changes_by(_path)))


@replaces("torch.backends.ContextProp.__set__")
def _set_flag(original: Any) -> Any:
    def assign(self: Any, module: Any, value: Any) -> None:
        if self.getter() != value:
            _run_pending()
        try:
            original(self, module, value)
        finally:
            _look_again()

    return assign


@replaces("torch.set_num_threads")
def _set_threads(original: Any) -> Any:
    def set_num_threads(*args: Any, **kwargs: Any) -> Any:
        cut(SyncReason.STATE)
        return original(*args, **kwargs)

    return set_num_threads


@replaces("torch.set_flush_denormal")
def _set_flush(original: Any) -> Any:
    def set_flush_denormal(mode: bool) -> bool:
        cut(SyncReason.STATE)
        supported: bool = original(mode)
        executor.flush_denormal = supported and mode
        return supported

    return set_flush_denormal
