"""`torch.amp.GradScaler` on the device: whether a step counts is decided in the program, not by reading.

PyTorch reads, before each step, whether a gradient is infinite or NaN, and leaves the step out if so. Here the step is
recorded, and takes back what it did to parameters and state where such a gradient was found. Numbers that the optimizer
counts on the host are put right when the next step begins, or the state is asked for: by then the answer is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_ltc.config import settings
from torch_ltc.device.step_end import after_step
from torch_ltc.pytorch.patches import registers, replaces
from torch_ltc.pytorch.private import has_step_hooks
from torch_ltc.pytorch.table import SCALER_HOOK

_NUMBERS = (int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value of an optimizer's state, or of a group of parameters, that lies on the host."""

    holder: dict[Any, Any]
    key: Any
    before: Any

    @classmethod
    def of(cls, holder: dict[Any, Any], key: Any) -> _Entry:
        value = holder[key]
        return cls(holder, key, value.clone() if isinstance(value, Tensor) else value)

    def has_changed(self) -> bool:
        value = self.holder[self.key]
        return not torch.equal(value, self.before) if isinstance(value, Tensor) else value != self.before

    def restore(self) -> None:
        value = self.holder[self.key]
        if isinstance(value, Tensor):
            value.copy_(self.before)
        else:
            self.holder[self.key] = self.before


@dataclass(frozen=True, slots=True)
class _Decision:
    """A step that may have to be taken back on the host."""

    found: Tensor
    entries: list[_Entry]

    def apply(self) -> None:
        if self.found.item():
            for entry in self.entries:
                entry.restore()


_open: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Decision] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _decide(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Put right what the step before has counted."""
    decision = _open.pop(optimizer, None) if _open else None
    if decision is not None:
        decision.apply()


@registers(SCALER_HOOK)
def _hook_optimizers() -> Callable[[], None]:
    return register_optimizer_step_pre_hook(_decide).remove


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """Everything that a step may change besides parameters: the dict, the key and the value."""
    for state in optimizer.state.values():
        for key, value in state.items():
            yield state, key, value
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                yield group, key, value


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _can_take_back(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step changes tensors of the device and numbers alone, and nobody else learns of it."""
    return (
        not has_step_hooks(optimizer)
        and all(p.device.type == "ltc" and p.grad.layout is torch.strided for p in _parameters(optimizer))
        and all(isinstance(state, dict) for state in optimizer.state.values())
    )


def _is_host(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or (isinstance(value, Tensor) and value.device.type == "cpu")


@torch.no_grad()
def _step(optimizer: torch.optim.Optimizer, found: Tensor, args: Any, kwargs: Any) -> Any:
    """Record a step that has no effect where `found` is not 0."""
    _decide(optimizer)
    entries = [_Entry.of(holder, key) for holder, key, value in _states(optimizer) if _is_host(value)]
    known = {(id(holder), key) for holder, key, _ in _states(optimizer)}
    changing = [value for _, _, value in _states(optimizer) if isinstance(value, Tensor) and value.device.type == "ltc"]
    changing += _parameters(optimizer)
    before = [tensor.detach().clone() for tensor in changing]
    with settings.scope(sync_after_optimizer=False), torch.enable_grad():
        result = optimizer.step(*args, **kwargs)
    skipped = found.bool()
    for tensor, old in zip(changing, before, strict=True):
        tensor.copy_(torch.where(skipped, old, tensor))
    created = [(holder, key) for holder, key, _ in _states(optimizer) if (id(holder), key) not in known]
    changed = [entry for entry in entries if entry.has_changed()]
    if created and found.item():
        for holder, key in created:
            del holder[key]
        for parameter in [p for p, state in optimizer.state.items() if not state]:
            del optimizer.state[parameter]
        _Decision(found, changed).apply()
    elif changed and not created:
        _open[optimizer] = _Decision(found, changed)
        if optimizer not in _watched:
            _watched.add(optimizer)
            optimizer.register_state_dict_pre_hook(_decide)
            optimizer.register_load_state_dict_pre_hook(_decide)
    after_step(optimizer)
    return result


@replaces("torch.amp.GradScaler._maybe_opt_step")
def _deciding_in_the_program(maybe_step: Any) -> Any:
    def _maybe_opt_step(self: Any, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found = list(optimizer_state["found_inf_per_device"].values())
        if len(found) == 1 and found[0].device.type == "ltc" and _can_take_back(optimizer):
            return _step(optimizer, found[0], args, kwargs)
        _decide(optimizer)
        return maybe_step(self, optimizer, optimizer_state, *args, **kwargs)

    return _maybe_opt_step
