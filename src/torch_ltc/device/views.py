"""Calls that change what a tensor looks at: in-place views, `set_`, `resize_`, and `out=` targets of another size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.device.fallback import run_eagerly
from torch_ltc.device.kernels import Kernel, record
from torch_ltc.device.registration import alias
from torch_ltc.device.tensors import empty_tensor
from torch_ltc.native.library import extension
from torch_ltc.native.recording import native
from torch_ltc.program.spec import Spec, contiguous_strides, make_spec, spec_of
from torch_ltc.pytorch.private import META, OpOverload, conj_view, set_data
from torch_ltc.record.arguments import operand_tensors
from torch_ltc.record.buffer import buffer_of
from torch_ltc.record.operator import Kind, Operator
from torch_ltc.record.recorder import recorder
from torch_ltc.shapes.inference import CannotInfer

aten = torch.ops.aten
_AS_STRIDED = Operator(aten.as_strided.default)
_AS_STRIDED_SCATTER = Operator(aten.as_strided_scatter.default)
_ALIAS = Operator(aten.alias.default)
_RESIZE = Operator(aten.resize_.default)


def become(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Make `tensor` look at what `other` looks at."""
    set_data(tensor, other)
    number = getattr(other, "_ltc", None)
    if number is None:
        tensor.__dict__.pop("_ltc", None)
    else:
        tensor._ltc = number  # type: ignore[attr-defined]
    return tensor


def inplace_view_kernel(op: OpOverload) -> Kernel | None:
    """Kernel of `t_`, `squeeze_` ...: the view of the same name is recorded, and the tensor becomes it."""
    packet = getattr(aten, op._schema.name.removeprefix("aten::").removesuffix("_"), None)
    overload = op._overloadname
    if packet is None or overload not in packet.overloads():
        return None
    view: Callable[..., torch.Tensor] = getattr(packet, overload)

    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return become(tensor, view(tensor, *args, **kwargs))

    return kernel


def resize_to(tensor: torch.Tensor, spec: Spec) -> None:
    """Give `tensor` the shape `spec` on its own storage, which grows when it must."""
    with recorder.lock:
        buffer = buffer_of(tensor)
        if extension is not None:
            extension.grow_storage(tensor.untyped_storage(), spec.extent() * spec.dtype.itemsize)
        if buffer.number < 0 and buffer.data is None:
            # Nobody has written to it: there is nothing to keep.
            if buffer.spec.extent() < spec.extent():
                buffer.spec = spec
            become(tensor, alias(tensor, spec.size, spec.stride, spec.offset))
            return
        buffer.grown_bytes = max(buffer.grown_bytes, spec.extent() * spec.dtype.itemsize)
        # The resize is recorded on an alias of its own: other tensors keep the old shape. In a program of its own it
        # would be what the buffer itself is seen as.
        recorder.undivided = True
        try:
            before = recorder.operand(tensor)
            aliased = record(_ALIAS, (tensor,))
            record(_RESIZE, (aliased, spec.size, None))
        finally:
            recorder.undivided = False
        number = recorder.base + recorder.operand(aliased)
        # What looks as this tensor did stays the value that it was.
        recorder.remember_view(buffer, spec_of(tensor), recorder.base + before)
        contiguous = make_spec(spec.dtype, spec.size, contiguous_strides(spec.size), spec.offset)
        recorder.remember_view(buffer, contiguous, number)
        resized = alias(tensor, contiguous.size, contiguous.stride, contiguous.offset)
        if native is None:
            resized._ltc = number  # type: ignore[attr-defined]
        if contiguous is not spec:
            resized = aten.as_strided.default(resized, spec.size, spec.stride, spec.offset)
        become(tensor, resized)


def _check_reach(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> None:
    """Raise when a window reaches past the end of the tensor's storage."""
    if len(size) == len(stride) and min((*size, *stride, offset, 0)) >= 0:
        reach = make_spec(tensor.dtype, tuple(size), tuple(stride), offset).extent()
        needed = 0 if 0 in size else reach * tensor.element_size()
        have = buffer_of(tensor).size_bytes
        if needed > have:
            raise RuntimeError(
                f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize "
                f"{tensor.element_size()} requiring a storage size of {needed} are out of bounds for storage of size "
                f"{have}"
            )


def as_strided(tensor: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Kernel of `aten::as_strided`, which must not look past the end of the storage."""
    offset = int(tensor.storage_offset()) if storage_offset is None else storage_offset
    _check_reach(tensor, size, stride, offset)
    return record(_AS_STRIDED, (tensor, size, stride, offset))


def as_strided_scatter(
    tensor: torch.Tensor, source: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Any:
    """Kernel of `aten::as_strided_scatter`, which must not write past the end of the storage."""
    _check_reach(tensor, size, stride, int(tensor.storage_offset()) if storage_offset is None else storage_offset)
    return record(_AS_STRIDED_SCATTER, (tensor, source, size, stride, storage_offset))


def resize_(tensor: torch.Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """Kernel of `aten::resize_`."""
    wanted = tuple(size)
    if any(length < 0 for length in wanted):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(wanted)}: {list(wanted)}")
    stride = contiguous_strides(wanted)
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        stride = torch.empty(wanted, device="meta", memory_format=memory_format).stride()
    if wanted == tuple(tensor.size()) and memory_format is None:
        return tensor
    resize_to(tensor, make_spec(tensor.dtype, wanted, stride, int(tensor.storage_offset())))
    return tensor


def resize_as_(
    tensor: torch.Tensor, other: torch.Tensor, *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Kernel of `aten::resize_as_`."""
    resize_(tensor, other.size())
    if memory_format is not None:
        wanted = torch.empty_like(other, device="meta", memory_format=memory_format).stride()
        become(tensor, tensor.as_strided(tensor.size(), wanted))
    return tensor


def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Kernel of `aten::set_.source_Tensor`."""
    return become(tensor, source.detach())


def set_storage(tensor: torch.Tensor, source: Any, offset: int, size: Any, stride: Any = ()) -> torch.Tensor:
    """Kernel of `aten::set_.source_Storage_storage_offset`."""
    wanted = tuple(size)
    steps = tuple(stride) or contiguous_strides(wanted)
    if len(steps) != len(wanted):
        raise RuntimeError(f"unequal size length ({len(wanted)}) and stride length ({len(steps)})")
    tensor.__dict__.pop("_ltc", None)
    op = aten.set_.source_Storage_storage_offset
    op.redispatch(META, tensor, source, offset, wanted, steps)
    return tensor


def set_whole_storage(tensor: torch.Tensor, source: Any) -> torch.Tensor:
    """Kernel of `aten::set_.source_Storage`."""
    return set_storage(tensor, source, 0, (source.nbytes() // tensor.element_size(),), (1,))


def set_nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Kernel of `aten::set_`: the tensor becomes empty."""
    return become(tensor, empty_tensor((0,), None, tensor.dtype))


# As eager says it. What PyTorch's kernel says in shape inference comes once, and not for shapes that are known.
_RESIZED = (
    "An output with one or more elements was resized since it had shape {}, which does not match the required output "
    "shape {}. This behavior is deprecated, and in a future PyTorch release outputs will not be resized unless they "
    "have zero elements. You can explicitly reuse an out tensor t by resizing it, inplace, to zero elements with "
    "t.resize_(0)."
)

_RESIZED_RANGE = (
    "The number of elements in the out tensor of shape {} is {} which does not match the computed number of elements "
    "{}. Note that this may occur as a result of rounding error. The out tensor will be resized to a tensor of shape "
    "({},)."
)
_RANGES = frozenset({"aten::arange", "aten::fft_fftfreq", "aten::fft_rfftfreq"})


def _warn_resized(operator: Operator, target: torch.Tensor, spec: Spec) -> None:
    """Warn as eager does of a target with elements that gets another size; most factories resize without a word."""
    have = list(target.shape)
    if operator.op._schema.name in _RANGES:
        text = _RESIZED_RANGE.format(have, target.numel(), spec.size[0], spec.size[0])
    elif any(a.kind in (Kind.TENSOR, Kind.TENSORS) and not a.written for a in operator.arguments):
        text = _RESIZED.format(have, list(spec.size))
    else:
        return
    warnings.warn(text, stacklevel=3)


def out_kernel(operator: Operator) -> Kernel:
    """Kernel of an `out=` overload: targets of another size are resized first, then the call is recorded."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = operator.values(args, kwargs)
        try:
            resized = recorder.preview(operator, values).resized
        except CannotInfer as reason:
            return run_eagerly(operator, values, str(reason))
        tensors = operand_tensors(operator, values)
        for place, spec in resized:
            _refuse_as_eager(operator, values, tensors[place], spec)
            if tensors[place].numel():
                _warn_resized(operator, tensors[place], spec)
            resize_to(tensors[place], spec)
        return record(operator, values)

    kernel.operator = operator  # type: ignore[attr-defined]
    return kernel


# Elementwise, and not tagged so.
_NAMES = (
    "_add_relu binary_cross_entropy_with_logits copy elu_backward floor_divide gelu_backward hardshrink_backward "
    "hardsigmoid_backward hardtanh_backward huber_loss huber_loss_backward leaky_relu_backward "
    "log_sigmoid_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss "
    "soft_margin_loss_backward softplus_backward softshrink_backward special_gammainc special_gammaincc "
    "special_xlogy threshold_backward where"
)
_ELEMENTWISE = frozenset(f"aten::{name}" for name in _NAMES.split())


def _refuse_as_eager(operator: Operator, values: tuple[Any, ...], target: torch.Tensor, spec: Spec) -> None:
    """Raise what eager's elementwise kernels raise where a target that would be resized is an operand, too."""
    given = [value for value, a in zip(values, operator.arguments, strict=True) if not a.written]
    elementwise = torch.Tag.pointwise in operator.op.tags or operator.op._schema.name in _ELEMENTWISE
    if elementwise and any(value is target for value in given):
        have, needed = list(target.shape), list(spec.size)
        raise RuntimeError(f"output with shape {have} doesn't match the broadcast shape {needed}")


def addbmm_(
    tensor: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """Kernel of `aten::addbmm_`, which gives its target the broadcast size, as on the CPU."""
    result = torch.addbmm(tensor, batch1, batch2, beta=beta, alpha=alpha)
    if result.size() != tensor.size():
        resize_to(tensor, spec_of(result))
    return tensor.copy_(result)


def linalg_lu_solve_out(
    factors: torch.Tensor,
    pivots: torch.Tensor,
    rhs: torch.Tensor,
    *,
    left: bool = True,
    adjoint: bool = False,
    out: torch.Tensor,
) -> torch.Tensor:
    """Kernel of `aten::linalg_lu_solve.out`, which on the CPU may leave its target conjugated."""
    if not out.is_complex():
        _lu_solve_out(factors, pivots, rhs, left=left, adjoint=adjoint, out=out)
        return out
    recorder.preview(_LU_SOLVE, (factors, pivots, rhs, left, adjoint, out))
    result = torch.linalg.lu_solve(factors, pivots, rhs, left=left, adjoint=adjoint)
    plain = result.conj() if result.is_conj() else result
    if spec_of(out) is not spec_of(plain):
        resize_to(out, spec_of(plain))
    out.copy_(plain)
    return become(out, conj_view(out)) if result.is_conj() else out


_LU_SOLVE = Operator(aten.linalg_lu_solve.out)
_lu_solve_out = out_kernel(_LU_SOLVE)


def _storage_length(tensor: torch.Tensor) -> int:
    """How many elements of the tensor's dtype its storage holds."""
    ours = tensor.device.type == "ltc"
    size_bytes = buffer_of(tensor).size_bytes if ours else tensor.untyped_storage().nbytes()
    return size_bytes // tensor.element_size()


def new_zeros_with_same_feature_meta(
    tensor: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """Kernel of `aten::_new_zeros_with_same_feature_meta`, which makes the tangent of a tensor that is not contiguous:
    zeros that lie in their storage as `other` does, for each of the leading dimensions of `tensor`."""
    length = _storage_length(other)
    batch = tuple(tensor.shape[:self_num_batch_dims])
    strides: list[int] = []
    for size in reversed(batch):
        strides.insert(0, length)
        length *= size
    zeros = aten.zeros.default([length], dtype=other.dtype, device=other.device)
    made: torch.Tensor = aten.as_strided.default(
        zeros, [*batch, *other.shape], [*strides, *other.stride()], other.storage_offset()
    )
    return made


def has_same_storage_numel(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Kernel of `aten::_has_same_storage_numel`."""
    return _storage_length(tensor) == _storage_length(other)


KERNELS = {
    "aten::_has_same_storage_numel": has_same_storage_numel,
    "aten::_new_zeros_with_same_feature_meta": new_zeros_with_same_feature_meta,
    "aten::linalg_lu_solve.out": linalg_lu_solve_out,
    "aten::addbmm_": addbmm_,
    "aten::as_strided": as_strided,
    "aten::as_strided_scatter": as_strided_scatter,
    "aten::resize_": resize_,
    "aten::resize_as_": resize_as_,
    "aten::set_.source_Tensor": set_tensor,
    "aten::set_.source_Storage_storage_offset": set_storage,
    "aten::set_.source_Storage": set_whole_storage,
    "aten::set_": set_nothing,
}
