"""Making device tensors for what a recorded call returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.device.registration import alias, alias_by
from torch_ltc.execute.memory import memory
from torch_ltc.native.library import extension
from torch_ltc.native.recording import native
from torch_ltc.program.instruction import Call, Return, ReturnKind
from torch_ltc.program.spec import Spec, contiguous_strides, make_spec
from torch_ltc.program.tree import Node
from torch_ltc.pytorch.private import META, conj_view, create_empty_tensor, neg_view, refuse_data_pointer
from torch_ltc.record.arguments import operand_tensors
from torch_ltc.record.buffer import Buffer, attach, buffer_of, find_buffer, new_buffer
from torch_ltc.record.call_site import current_source
from torch_ltc.record.operator import Operator
from torch_ltc.record.recorder import recorder


def new_tensor(buffer: Buffer, spec: Spec) -> torch.Tensor:
    """A device tensor of shape `spec` on a new storage that holds `buffer`."""
    tensor: torch.Tensor
    if native is not None:
        tensor = native.new_tensor(buffer, spec, buffer.size_bytes)
    elif extension is not None:
        tensor = extension.empty_strided(spec.size, spec.stride, spec.offset, spec.dtype, buffer.size_bytes)
    elif spec.contiguous:
        tensor = create_empty_tensor(spec.size, spec.dtype)
        refuse_data_pointer(tensor)
    else:
        base = create_empty_tensor((), spec.dtype)
        refuse_data_pointer(base)
        tensor = alias(base, spec.size, spec.stride, spec.offset)
    if native is None:
        attach(tensor, buffer)
    if spec.conj:
        tensor = conj_view(tensor)
    if spec.neg:
        tensor = neg_view(tensor)
    return tensor


def _refusing_tensor(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = create_empty_tensor(size, dtype)
    # Reading its data pointer raises instead of giving null.
    refuse_data_pointer(tensor)
    return tensor


# A contiguous device tensor on a new storage; the extension's has a size and an address.
empty_result: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] = (
    _refusing_tensor if extension is None else extension.empty_tensor
)


def empty_tensor(size: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
    """A device tensor that nobody has written to."""
    spec = make_spec(dtype, size, contiguous_strides(size) if stride is None else stride)
    return new_tensor(new_buffer(spec), spec)


def storage_buffer(storage: torch.UntypedStorage) -> Buffer | None:
    """The buffer of a storage of the device; None for any other storage."""
    if native is None:
        found: Buffer | None = storage.__dict__.get("handle")
        return found
    if storage.device.type != "ltc":
        return None
    # The extension finds the buffers of tensors.
    seen = empty_tensor((0,), None, torch.uint8)
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(META, seen, storage, 0, (0,), (1,))
    return find_buffer(seen)


def wrap_physical(data: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A device tensor on the memory of a physical one that has shape `spec`."""
    buffer = new_buffer(spec, data=data)
    memory.hold(buffer, current_source(2))
    return new_tensor(buffer, spec)


def view_tensor(operator: Operator, base: torch.Tensor, spec: Spec, values: tuple[Any, ...]) -> torch.Tensor:
    """A device tensor of shape `spec` on the storage of `base`."""
    if spec.dtype is base.dtype and spec.conj == base.is_conj() and spec.neg == base.is_neg():
        return alias(base, spec.size, spec.stride, spec.offset)
    return alias_by(operator.op, *values)


def new_tensors(child: Node, number: int) -> tuple[torch.Tensor | None, ...]:
    """The results of a call that makes several new tensors, as the plan of `child` has them."""
    results: list[torch.Tensor | None] = []
    for spec in child.plan:
        if spec is None:
            results.append(None)
            continue
        tensor = empty_result(spec.size, spec.dtype)
        buffer = Buffer()
        buffer.number = number
        buffer.spec = spec
        attach(tensor, buffer)
        recorder.buffers.append(buffer)
        tensor._ltc = number  # type: ignore[attr-defined]
        number += 1
        results.append(tensor)
    return tuple(results)


def make_results(child: Node, operator: Operator, values: tuple[Any, ...], first: int) -> Any:
    """Everything a call returns, made into device tensors, whose values are numbered from `first` on."""
    call = child.instruction
    assert isinstance(call, Call)
    if native is not None:
        # The common results, made without a buffer of Python.
        if child.size is not None:
            return recorder.new_result(child.spec, first)
        if child.plan.__class__ is Spec:
            place = call.returns[0].operand  # type: ignore[union-attr]
            plain = place == 0 and isinstance(values[0], torch.Tensor)
            base = values[0] if plain else operand_tensors(operator, values)[place]
            return recorder.new_view(base, child.plan, first)
    if not call.returns:
        return None
    tensors = operand_tensors(operator, values)
    made: dict[int, torch.Tensor] = {}
    results: list[Any] = []
    position = 0
    for declared in call.returns:
        if isinstance(declared, tuple):
            items = []
            for item in declared:
                number = first + call.numbers[position] - call.first
                items.append(_make(item, position, number, operator, values, tensors, made))
                position += 1
            results.append(items)
        else:
            number = first + call.numbers[position] - call.first
            results.append(_make(declared, position, number, operator, values, tensors, made))
            position += 1
    return tuple(results) if len(results) > 1 else results[0]


def _make(
    item: Return,
    position: int,
    number: int,
    operator: Operator,
    values: tuple[Any, ...],
    tensors: list[torch.Tensor],
    made: dict[int, torch.Tensor],
) -> Any:
    kind, spec = item.kind, item.spec
    if kind is ReturnKind.SAME:
        return tensors[item.operand]
    if kind is ReturnKind.NOTHING or spec is None:
        return item.constant
    if kind is ReturnKind.FRESH and item.group == position:
        buffer = new_buffer(spec, number)
        recorder.add_buffer(buffer)
        tensor = made[position] = new_tensor(buffer, spec)
    elif kind is ReturnKind.FRESH:
        owner = made[item.group]
        tensor = alias(owner, spec.size, spec.stride, spec.offset)
        recorder.remember_view(buffer_of(owner), spec, number)
    else:
        base = tensors[item.operand]
        tensor = view_tensor(operator, base, spec, values)
        recorder.remember_view(buffer_of(base), spec, number)
    if native is None:
        tensor._ltc = number  # type: ignore[attr-defined]
    return tensor
