"""Empty tensors, copies between devices, and reading single numbers."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torch_ltc.config import settings
from torch_ltc.device.fallback import run_eagerly
from torch_ltc.device.kernels import record
from torch_ltc.device.registration import composite
from torch_ltc.device.tensors import empty_tensor, wrap_physical
from torch_ltc.device.uploads import upload
from torch_ltc.errors import DeviceMismatchError, LtcError
from torch_ltc.events import UploadEvent, tell
from torch_ltc.execute.executor import executor
from torch_ltc.execute.memory import add_upload, memory
from torch_ltc.execute.sync import read
from torch_ltc.native.recording import native
from torch_ltc.program.spec import spec_of
from torch_ltc.record.buffer import buffer_of, physical_device
from torch_ltc.record.call_site import current_source
from torch_ltc.record.operator import Operator
from torch_ltc.record.recorder import recorder

aten = torch.ops.aten
_INDEX = Operator(aten.index.Tensor)
_COPY = Operator(aten.copy_.default)
_TO_COPY = Operator(aten._to_copy.default)


def empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Kernel of `aten::empty.memory_format`."""
    recorder.device(device)
    _check_layout(layout)
    kind = torch.get_default_dtype() if dtype is None else dtype
    stride = None
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        stride = torch.empty(size, dtype=kind, device="meta", memory_format=memory_format).stride()
    return _new(_checked_size(size), stride, kind)


def empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Kernel of `aten::empty_strided`."""
    recorder.device(device)
    _check_layout(layout)
    _check_strides(size, stride)
    return _new(_checked_size(size), tuple(stride), torch.get_default_dtype() if dtype is None else dtype)


def _check_strides(size: Any, stride: Any) -> None:
    if len(size) != len(stride):
        raise RuntimeError(
            f"dimensionality of sizes ({len(size)}) must match dimensionality of strides ({len(stride)})"
        )
    if any(step < 0 for step in stride) and 0 not in size:
        raise RuntimeError(f"Storage size calculation overflowed with sizes={list(size)} and strides={list(stride)}")


def _new(size: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values; in deterministic mode it is filled, as eager does."""
    made = empty_tensor(size, stride, dtype)
    if native is not None:
        # The next one of this shape is made in C++.
        native.remember_shape(buffer_of(made).spec)
    if recorder.torch_state.fills_memory:
        inexact = dtype.is_floating_point or dtype.is_complex
        made.fill_(math.nan if inexact else True if dtype is torch.bool else torch.iinfo(dtype).max)
    return made


def _checked_size(size: Any) -> tuple[int, ...]:
    if any(length < 0 for length in size):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")
    return tuple(size)


def _check_layout(layout: torch.layout | None) -> None:
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"the ltc device holds strided tensors only, not {layout}")


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Kernel of `aten::copy_`: device to device is recorded, to the device is an upload, from it a read."""
    if target.device.type != "ltc":
        read(source, lambda real: target.copy_(real), "copy")
        return target
    if not isinstance(source, torch.Tensor):
        return target.fill_(source)
    if source.device.type == "ltc":
        record(_COPY, (target, source, False))
        return target
    with recorder.lock:
        if not _adopt_whole(target, source, non_blocking):
            uploaded = _uploaded(source, non_blocking=non_blocking)
            record(_COPY, (target, uploaded, False))
    return target


def _refuse_in_worker() -> None:
    """Raise in a worker that a DataLoader forked: it could not hand the tensor to the loader, which would wait for
    ever."""
    if get_worker_info() is not None and executor.is_forked():
        raise LtcError(
            "a worker process of a DataLoader copies a tensor to ltc, and cannot hand it to the loader",
            source=str(current_source(2)),
            hint="make the items of the data set on the CPU (device='cpu'), and move batches in the main process",
        )


def _adopt_whole(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> bool:
    """Give a tensor that nobody has written to its contents; nothing is recorded. False when that is not right."""
    buffer, spec = buffer_of(target), spec_of(target)
    if buffer.number >= 0 or buffer.data is not None or buffer.spec is not spec or not spec.covers_storage():
        return False
    _refuse_in_worker()

    def copy(host: torch.Tensor, later: bool) -> torch.Tensor:
        made = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=physical_device())
        with torch.no_grad():
            return made.copy_(host, non_blocking=later)

    began = time.perf_counter()
    try:
        data = upload(source, copy, non_blocking)
    except RuntimeError as error:
        add_upload(error, target, current_source())
        raise
    buffer.data = data
    buffer.note_data()
    line = current_source()
    memory.hold(buffer, line)
    tell(UploadEvent, data.nbytes, time.perf_counter() - began, line)
    return True


def _uploaded(
    source: torch.Tensor,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    non_blocking: bool = False,
) -> torch.Tensor:
    """A device tensor with a copy of a tensor of another device, made now."""
    _refuse_in_worker()
    options: dict[str, Any] = {"dtype": dtype, "device": physical_device(), "memory_format": memory_format}
    began = time.perf_counter()
    try:
        data = upload(
            source,
            lambda host, later: aten._to_copy.default(host, non_blocking=later, **options),
            non_blocking,
        )
    except RuntimeError as error:
        add_upload(error, source, current_source())
        raise
    made = wrap_physical(data, spec_of(data))
    tell(UploadEvent, data.nbytes, time.perf_counter() - began, current_source())
    return made


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Kernel of `aten::_copy_from`, by which other devices' kernels hand a copy to this one."""
    return copy_(target, source, non_blocking)


def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Kernel of `aten::_copy_from_and_resize`."""
    target.resize_(source.size())
    return copy_(target, source)


def to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Kernel of `aten::_to_copy`."""
    if device is None or device.type == "ltc":
        recorder.device(device)
        if layout not in (None, torch.strided):
            result: torch.Tensor = composite(aten._to_copy.default, source, dtype=dtype, layout=layout)
            return result
        if source.device.type != "ltc":
            return _uploaded(source, dtype, memory_format, non_blocking)
        given = (source, dtype, None, None, None, False, memory_format)
        recorded: torch.Tensor = record(_TO_COPY, given)
        return recorded
    options: dict[str, Any] = {"dtype": dtype, "device": device, "memory_format": memory_format}
    fetched: torch.Tensor = read(source, lambda real: aten._to_copy.default(real, **options), "copy")
    return fetched


def local_scalar_dense(source: torch.Tensor) -> Any:
    """Kernel of `aten::_local_scalar_dense`: the value of a one-element tensor.

    A read like any other, which no policy forbids; counted under the name by which the original counts it.
    """
    return read(source, aten._local_scalar_dense.default, "item")


def index(source: torch.Tensor, indices: Any) -> Any:
    """Kernel of `aten::index.Tensor`: static unless a mask says how many elements there are."""
    values = (source, list(indices))
    if source.device.type != "ltc":
        raise DeviceMismatchError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({source.device})",
            source=str(current_source()),
            hint="move the indices with .cpu()",
        )
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return run_eagerly(_INDEX, values, "the number of elements that a mask selects depends on data")
    return record(_INDEX, values)


def pin_memory(source: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """`aten::_pin_memory` for CPU tensors: host memory that the physical device copies from without a detour."""
    if settings.device_type == "cpu":
        return source.clone()
    pinned: torch.Tensor = composite(aten._pin_memory.default, source, torch.device(settings.device_type))
    return pinned


def has_compatible_type(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Kernel of `aten::_has_compatible_shallow_copy_type`: True when `tensor.data = source` is possible.

    PyTorch has a list of devices whose tensors may take the place of each other, and this one is not on it: it would
    make new parameters when a module moves here, so that tied weights come untied, and an optimizer that was made
    before keeps the old ones. The tensors are of the same class in C++, as all plain ones are.
    """
    return all(t.layout is torch.strided and not (t.is_quantized or t.is_nested) for t in (tensor, source))


# Calls of these that were recorded before are what they were then: the hit path may record them.
_HIT: tuple[tuple[Any, Operator], ...] = ((copy_, _COPY), (to_copy, _TO_COPY), (index, _INDEX))
for _kernel, _operator in _HIT:
    _kernel.operator = _operator
# These are not recorded, and may run at once.
_UNRECORDED: tuple[tuple[Any, Any], ...] = (
    (empty, aten.empty.memory_format),
    (empty_strided, aten.empty_strided.default),
    (local_scalar_dense, aten._local_scalar_dense.default),
)
for _kernel, _op in _UNRECORDED:
    _kernel.operator = Operator(_op)
    _kernel.unrecorded = True

COMPOSITES = {"aten::_has_compatible_shallow_copy_type": has_compatible_type}

# The extension has kernels of its own for these, which know what was made before.
EMPTIES: dict[str, Any] = {"aten::empty.memory_format": empty, "aten::empty_strided": empty_strided}

KERNELS = {
    **EMPTIES,
    "aten::copy_": copy_,
    "aten::index.Tensor": index,
    "aten::_copy_from": copy_from,
    "aten::_copy_from_and_resize": copy_from_and_resize,
    "aten::_to_copy": to_copy,
    "aten::_local_scalar_dense": local_scalar_dense,
}
