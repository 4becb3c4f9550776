"""Calls that cannot be recorded run eagerly on the physical device, after a sync, and say so.

Data-dependent results, operators without a meta kernel, sparse and nested layouts come here. Every tensor result, in
lists too, comes back as a device tensor; results that are not plain strided tensors stay on the physical device.
"""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.deferred import deferred
from torch_ltc.device import nested, sparse
from torch_ltc.device.registration import alias
from torch_ltc.device.tensors import wrap_physical
from torch_ltc.errors import FallbackError, FallbackWarning, LtcError
from torch_ltc.events import FallbackEvent, SyncReason, emit
from torch_ltc.execute.executor import Uses, executor
from torch_ltc.execute.no_sync import sync_guard
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.sync import cut, physical
from torch_ltc.program.spec import spec_of
from torch_ltc.pytorch.kernel_calls import call_kernel
from torch_ltc.pytorch.private import VIEW_TRACKING, pytree, without_keys
from torch_ltc.record.buffer import buffer_of, physical_device
from torch_ltc.record.call_site import current_source
from torch_ltc.record.operator import Kind, Operator
from torch_ltc.record.recorder import check_foreign, device_mismatch, recorder

_warned: set[str] = set()
# Its kernel keeps what the backward pass needs only if an operand asks for gradients; without, that would crash.
_ASKS_FOR_GRADIENTS = "aten::_sparse_mm_reduce_impl"


def is_lazy(value: object) -> bool:
    """True for a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == "ltc"


def reset_warnings() -> None:
    """Warn again about every operator."""
    _warned.clear()


def run_eagerly(operator: Operator, values: tuple[Any, ...], reason: str) -> Any:
    """Run the call now, on the physical device."""
    if sync_guard.threads:
        sync_guard.check(SyncReason.FALLBACK)
    source = current_source(2)
    if settings.fallback == "error":
        raise FallbackError(
            f"{operator.name} cannot be recorded: {reason}", source=str(source), hint='settings.fallback = "warn"'
        )
    if settings.fallback == "warn" and operator.name not in _warned:
        _warned.add(operator.name)
        warnings.warn(
            f"{operator.name} runs eagerly after a sync, because {reason}\n  called at {source}",
            FallbackWarning,
            stacklevel=3,
        )
    began = time.perf_counter()
    result = _run(operator, values)
    emit(FallbackEvent(operator.name, reason, source, time.perf_counter() - began))
    return result


def _run(operator: Operator, values: tuple[Any, ...]) -> Any:
    given, structure = pytree.tree_flatten(list(values))
    leaves = list(given)
    # Sparse and nested tensors are taken apart here and put together of the physical parts: each with the place of its
    # parts.
    opened: dict[int, tuple[torch.Tensor, int]] = {}
    for leaf in given:
        if is_lazy(leaf) and not _is_plain(leaf) and id(leaf) not in opened:
            opened[id(leaf)] = (leaf, len(leaves))
            leaves.extend(_layout(leaf).parts(leaf))
    lazy = {i: (buffer_of(leaf), spec_of(leaf)) for i, leaf in enumerate(leaves) if _is_plain(leaf)}
    device = physical_device()
    targets = pytree.tree_leaves([values[position] for position in operator.written])
    # What is given by `out=`: the kernel alone may know its size.
    outs = [values[position] for position in operator.written if position >= operator.positional]
    resized = set(map(id, pytree.tree_leaves(outs)))
    for target in targets:
        if lazy and isinstance(target, torch.Tensor) and not is_lazy(target):
            raise device_mismatch(target, operator)
    for leaf in given if lazy else ():
        if isinstance(leaf, torch.Tensor) and not is_lazy(leaf) and not _stays(leaf):
            check_foreign(leaf, operator)

    def work() -> tuple[Any, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        for i, (buffer, spec) in lazy.items():
            if id(leaves[i]) in resized:
                physical(buffer, spec)
                buffer.resizable(device)
        # Aliases: a call that resizes its target must not resize the buffer's own tensor, which others look at.
        real = {i: physical(buffer, spec).detach() for i, (buffer, spec) in lazy.items()}
        built = {
            key: _layout(like).put_together(like, *[real[i] for i in range(at, at + len(_layout(like).parts(like)))])
            for key, (like, at) in opened.items()
        }
        arguments = [device if _names_device(leaf) else leaf for leaf in leaves[: len(given)]]
        arguments = [real.get(i, built.get(id(leaf), leaf)) for i, leaf in enumerate(arguments)]
        filled = pytree.tree_unflatten(arguments, structure)
        if operator.random and filled[operator.generator_position] is None:
            filled[operator.generator_position] = device_random.generator
        split = operator.positional
        kwargs = {a.name: v for a, v in zip(operator.arguments[split:], filled[split:], strict=True)}
        if any(a.kind is Kind.DROPPED for a in operator.arguments):
            kwargs["pin_memory"] = None
        if operator.name == _ASKS_FOR_GRADIENTS:
            for tensor in built.values():
                tensor.requires_grad_()
        # Kernels for sparse tensors count on it that nobody tracks views, as below autograd in eager.
        with without_keys(VIEW_TRACKING) if built else nullcontext():
            return call_kernel(operator.op, filled[:split], kwargs), real, built

    try:
        with recorder.lock:
            cut(SyncReason.FALLBACK, here=True)
            uses = Uses((), [buffer for buffer, _ in lazy.values()])
            future = executor.submit(work, uses, wait=False, here=True)
        out, real, built = executor.result_of(future)
    except LtcError as error:
        deferred.discard_error(error)
        raise
    finally:
        executor.hand_over()
    executor.show_warnings()
    owners = {tensor.untyped_storage()._cdata: (leaves[i], tensor) for i, tensor in real.items()}
    for i, tensor in real.items():
        _adopt_shape(leaves[i], tensor)
    for target in targets:
        if id(target) in built and sparse.is_sparse(target):
            sparse.replace(target, _wrap(built[id(target)], owners))
    # What comes back as it was given is what was given.
    same = {id(leaf): leaf for leaf in given if isinstance(leaf, torch.Tensor) and not _is_plain(leaf)}
    same.update((id(tensor), opened[key][0]) for key, tensor in built.items())
    return pytree.tree_map(lambda item: same[id(item)] if id(item) in same else _wrap(item, owners), out)


def _is_plain(value: object) -> bool:
    return is_lazy(value) and value.layout is torch.strided and not value.is_nested  # type: ignore[attr-defined]


def _layout(value: torch.Tensor) -> Any:
    """The module that takes such tensors apart and puts them together."""
    return nested if value.is_nested else sparse


def _stays(value: torch.Tensor) -> bool:
    """True for a result that is no plain strided tensor, and stays on the physical device."""
    return value.layout is not torch.strided or value.is_quantized


def _names_device(leaf: object) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "ltc"


def _adopt_shape(lazy: torch.Tensor, real: torch.Tensor) -> None:
    """An in-place or out call may have changed the sizes of its target."""
    if lazy.size() != real.size() or lazy.stride() != real.stride():
        lazy.data = alias(lazy, tuple(real.size()), real.stride(), real.storage_offset())


def _wrap(item: Any, owners: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if not isinstance(item, torch.Tensor) or item.is_quantized:
        return item
    if item.is_nested or sparse.is_sparse(item):
        return _layout(item).put_together(item, *(_wrap(part, owners) for part in _layout(item).parts(item)))
    if item.layout is not torch.strided:
        return item
    owner = owners.get(item.untyped_storage()._cdata)
    if owner is None:
        return wrap_physical(item, spec_of(item))
    lazy, real = owner
    if item is real:
        return lazy
    return alias(lazy, tuple(item.size()), item.stride(), item.storage_offset())
