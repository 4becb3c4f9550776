"""Memoized shape inference: sizes, strides, dtypes and aliasing of the results of a call, without its data.

The meta kernel runs first: it says how large the results are. Small calls then run on filled CPU tensors of the same
specs, which yields either the real shapes or the very error eager would raise. Larger ones do where they differ in more
than lengths from those before, where PyTorch has no meta kernel, where it raises, or where it is known to differ from
the real one (`CPU_INFERRED`, `out=` targets). Data-dependent calls never come here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.program.instruction import flatten_returns
from torch_ltc.program.spec import Spec
from torch_ltc.pytorch.private import FakeTensorMode, OpOverload
from torch_ltc.shapes.broadcasting import is_channels_last
from torch_ltc.shapes.stand_ins import (
    MASK_DTYPES,
    CannotInfer,
    Fill,
    Inferred,
    OperandIndex,
    Selected,
    ShapeCall,
    run_on,
    stand_ins,
)

__all__ = ["CannotInfer", "Fill", "Inferred", "OperandIndex", "ShapeCall", "clear_inference_cache", "infer"]
__all__ += ["run_on", "stand_ins"]

# Largest total size of CPU stand-ins; past it the meta kernel's own error is raised instead of trying the real kernel.
_STAND_IN_BYTES = 2**31
_MEMO_BOUND = 65_536
# Total size of operands and results up to which the CPU kernel always runs too, it takes some microseconds then; and up
# to which it does for the first call of each pattern.
_SMALL_BYTES = 2**16
_CHECKED_BYTES = 2**26

# Operators (without overload) whose meta kernel promises another layout, dtype or size than the CPU kernel gives.
_NORMS = (
    "native_batch_norm _native_batch_norm_legit _batch_norm_with_update _batch_norm_no_update _fused_rms_norm "
    "_native_batch_norm_legit_no_training _batch_norm_with_update_functional"
)
_LINEAR_ALGEBRA = (
    "_fft_c2r _fft_r2c _fft_c2c cholesky_inverse lu_solve ormqr linalg_qr triangular_solve _linalg_svd linalg_eig qr "
    "linalg_ldl_factor_ex linalg_ldl_solve linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_svd geqrf vdot "
    "linalg_householder_product"
)
_OTHERS = (
    "mkldnn_rnn_layer _embedding_bag _embedding_bag_forward_only _embedding_bag_backward max_unpool2d max_unpool3d "
    "nonzero_static col2im sort abs _native_multi_head_attention"
)
CPU_INFERRED = frozenset(f"aten::{name}" for name in f"{_NORMS} {_LINEAR_ALGEBRA} {_OTHERS}".split())

# Operators whose results have other sizes or strides on CUDA than on the CPU; fake tensors know them.
_OF_DEVICE = CPU_INFERRED | {"aten::log_sigmoid_forward"}

# Operators whose meta kernel gives statistics of half-precision inputs another dtype.
_REDUCED_PRECISION = frozenset({"aten::native_layer_norm", "aten::native_group_norm"})

# Operators whose meta kernel gives results of bool operands another dtype.
_BOOLEAN = frozenset({"aten::pow", "aten::pow_"})

# Operators whose meta kernel takes operands of several dtypes, which the CPU refuses.
_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul")
)

# Operators whose meta kernel does not know in which memory format the CPU answers to operands that are not contiguous.
_CONVOLUTIONS = frozenset({"aten::convolution", "aten::convolution_backward", "aten::convolution_overrideable"})

# Operators that refuse some numbers (a probability of 2), which their meta kernels do not.
_REFUSES_NUMBERS = frozenset(
    f"aten::{name}"
    for name in ("bernoulli_", "normal_", "uniform_", "exponential_", "geometric_", "log_normal_", "cauchy_")
)

# Operators that refuse zeros as data: pivots begin at 1.
_ONES = frozenset(f"aten::{name}" for name in ("linalg_lu_solve", "lu_solve", "linalg_ldl_solve", "cholesky_inverse"))

# Of `multinomial`.
_MOST_CATEGORIES = 2**24

_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

# Operators that may refuse zeros and ones as data.
_REFUSES_DATA = frozenset({"aten::_ctc_loss"})

# Its lengths have to sum up to something, unless it is told not to look.
_LOOKS_AT_LENGTHS = "aten::segment_reduce"

# Its offsets say how long its result is; where the length is given, there is a rule.
_SIZED_BY_DATA = "aten::_padded_dense_to_jagged_forward"

# Operators that take masks, of which the number of true elements decides what fits.
_MASKED = frozenset(f"aten::{name}" for name in ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"))

# Operators that may look at the part of a storage that none of their operands does; stand-ins have no such part.
_PAST_OPERANDS = frozenset(f"aten::{name}" for name in ("as_strided", "as_strided_copy", "as_strided_scatter"))

_memo: dict[object, Inferred] = {}
_checked: set[object] = set()


def infer(
    op: OpOverload,
    args: Sequence[object],
    kwargs: dict[str, object],
    specs: Sequence[Spec],
    groups: Sequence[int],
    signature: object,
) -> Inferred:
    """The shapes of a call's results; see `ShapeCall`. `signature` is the key of the call in the memo."""
    known = _memo.get(signature)
    if known is not None:
        return known
    inferred = _infer(ShapeCall(op, args, kwargs, specs, groups))
    if len(_memo) >= _MEMO_BOUND:
        _memo.clear()
    _memo[signature] = inferred
    return inferred


def clear_inference_cache() -> None:
    """Forget the results of earlier calls."""
    _memo.clear()
    _checked.clear()


def _infer(call: ShapeCall) -> Inferred:
    if any(isinstance(value, torch.dtype) and value in _QUANTIZED for value in (*call.args, *call.kwargs.values())):
        raise CannotInfer("its result is quantized")
    if call.name == _SIZED_BY_DATA and None in call.args:
        raise CannotInfer("its offsets say how long its result is")
    meta: Inferred | None = None
    meta_error: Exception | None = None
    of_library = _depends_on_library(call)
    checked = not of_library and _is_checked(call)
    if not checked and not _is_cpu_inferred(call):
        try:
            meta = _run_on_fake(call) if of_library else run_on("meta", call)
        except CannotInfer:
            raise
        except Exception as error:
            # Without its traceback: the frames in there would keep the caller's tensors alive, and live tensors are
            # outputs of the program.
            meta_error = error.with_traceback(None)
        if meta is not None and call.name in _PAST_OPERANDS:
            return meta
        if meta is not None and (settings.device_type != "cpu" or _is_trusted(call, meta)):
            return meta
    if not _can_run_on_cpu(call):
        if meta is not None:
            return meta
        if meta_error is not None and call.op.namespace != "aten":
            # It may have no meta kernel, or one that refuses these arguments: the real kernel knows.
            raise CannotInfer(f"it has no meta (fake) kernel that takes it: {_first_line(meta_error)}")
        if meta_error is not None:
            raise meta_error
        return run_on("meta", call)
    try:
        inferred = _run_on_cpu(call)
        if len(_checked) >= _MEMO_BOUND:
            _checked.clear()
        _checked.add(_pattern(call))
        return inferred
    except NotImplementedError as error:
        if not _is_missing_kernel(error) or (meta is not None and settings.device_type == "cpu"):
            # The kernel is there and refuses the dtype, or an operator of other devices is called: that is eager's own
            # error.
            raise
        if meta is not None:
            return meta
        if meta_error is None:
            # Not tried yet: an operator of another device.
            with contextlib.suppress(Exception):
                return run_on("meta", call)
        raise CannotInfer(f"neither a meta nor a CPU kernel can run it: {_first_line(error)}") from meta_error
    except Exception as error:
        if not _is_about_data(call, error) or meta_error is not None:
            raise
        return run_on("meta", call) if meta is None else meta


def _depends_on_library(call: ShapeCall) -> bool:
    """True for calls on another device than the CPU whose results depend on the library that computes them, of which
    the meta kernel knows nothing: so does the memory format of convolutions of images in channels_last."""
    if settings.device_type == "cpu":
        return False
    images = call.name in _CONVOLUTIONS and any(is_channels_last(spec) for spec in call.specs)
    return images or call.name in _OF_DEVICE


def _run_on_fake(call: ShapeCall) -> Inferred:
    """The call on tensors without memory that claim to be on the physical device."""
    try:
        with FakeTensorMode():
            return run_on(settings.device_type, call)
    except Exception:
        return run_on("meta", call)


def _run_on_cpu(call: ShapeCall) -> Inferred:
    """The call on CPU tensors of zeros, and of other data if it refuses those; its error if it refuses all."""
    if call.name == _LOOKS_AT_LENGTHS:
        call = replace(call, kwargs={**call.kwargs, "unsafe": True})
    first, second = (Fill.ONES, Fill.ZEROS) if call.name in _ONES else (Fill.ZEROS, Fill.ONES)
    try:
        return run_on("cpu", call, first)
    except torch.linalg.LinAlgError:
        return run_on("cpu", call, Fill.IDENTITY)
    except Exception as error:
        refused = error.with_traceback(None)
    if _has_masks(call):
        return _run_on_selections(call)
    try:
        return run_on("cpu", call, second)
    except Exception:
        raise refused from None


def _run_on_selections(call: ShapeCall) -> Inferred:
    """The call with as many true elements in its masks as may fit the values and the other indices; the error of the
    most if none does."""
    lengths = {length for spec in call.specs[1:] for length in spec.size}
    refused: Exception | None = None
    for count in sorted({1} | lengths):
        try:
            return run_on("cpu", call, Selected(count))
        except Exception as error:
            refused = error.with_traceback(None)
    assert refused is not None
    raise refused


def _has_masks(call: ShapeCall) -> bool:
    return call.name in _MASKED and any(spec.dtype in MASK_DTYPES for spec in call.specs[1:])


def _is_missing_kernel(error: NotImplementedError) -> bool:
    """True for the dispatcher's error when a device has no kernel of an operator."""
    return any(words in str(error) for words in ("Could not run", "There were no tensor arguments to this function"))


def _is_about_data(call: ShapeCall, error: Exception) -> bool:
    """True for an error that zeros and ones may cause where the shapes are right: then the meta kernel decides."""
    if _has_masks(call) and any(spec.dtype in MASK_DTYPES and spec.overlaps_itself() for spec in call.specs[1:]):
        # No number of true elements could be tried.
        return True
    return call.name in _REFUSES_DATA or isinstance(error, torch.linalg.LinAlgError)


def _is_checked(call: ShapeCall) -> bool:
    """True when the CPU kernel alone knows what eager refuses, or how it resizes an `out=` target."""
    if call.name in _REFUSES_NUMBERS or _needs_real_checks(call):
        return True
    arguments = call.op._schema.arguments
    return call.op.namespace == "aten" and any(a.kwarg_only and a.alias_info is not None for a in arguments)


def _is_cpu_inferred(call: ShapeCall) -> bool:
    if settings.device_type != "cpu":
        return False
    name, dtypes = call.name, [spec.dtype for spec in call.specs]
    if name in _REDUCED_PRECISION:
        return torch.bfloat16 in dtypes or torch.float16 in dtypes
    if name in _BOOLEAN:
        return all(dtype is torch.bool for dtype in dtypes)
    if name in _CONVOLUTIONS:
        return not all(spec.contiguous for spec in call.specs)
    # Meta kernels often do not know which results keep the memory format of images, and which of two formats an image
    # with a length of 1 suggests.
    return name in CPU_INFERRED or any(is_channels_last(spec) for spec in call.specs)


def _is_trusted(call: ShapeCall, meta: Inferred) -> bool:
    """True when the CPU kernel need not run to check what the meta kernel says: the call is too large for that, or it
    is not small and differs from one that was checked in lengths alone."""
    results = [item.spec for item in flatten_returns(meta.returns) if item.spec is not None]
    size_bytes = sum(spec.extent() * spec.dtype.itemsize for spec in (*call.specs, *results))
    if size_bytes > _CHECKED_BYTES:
        return True
    return size_bytes > _SMALL_BYTES and _pattern(call) in _checked


def _pattern(call: ShapeCall) -> object:
    """Dtypes, ranks, which lengths are equal or 1, and the kinds of numbers: what eager refuses mostly depends on."""
    lengths = sorted({length for spec in call.specs for length in spec.size} | {0, 1})
    operands = [(spec.dtype, tuple(map(lengths.index, spec.size))) for spec in call.specs]
    return (call.op, *operands, *map(_kind, call.args))


def _kind(item: Any) -> object:
    """Of an argument that is no tensor, what of it takes part in a pattern."""
    if isinstance(item, (list, tuple)):
        return tuple(map(_kind, item))
    return item if isinstance(item, (torch.dtype, str)) else type(item)


def _can_run_on_cpu(call: ShapeCall) -> bool:
    # A custom operator may have effects of its own: it is never run on made-up data.
    size_bytes = sum(spec.extent() * spec.dtype.itemsize for spec in call.specs)
    return call.op.namespace == "aten" and size_bytes <= _STAND_IN_BYTES


def _needs_real_checks(call: ShapeCall) -> bool:
    """True when eager checks what meta kernels do not: undefined gradients, dtypes of products and indices, memory
    overlap of what is written."""
    specs, groups = call.specs, call.groups
    if call.op.namespace != "aten":
        return False
    if call.has_undefined_gradient():
        return True
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        # Some operators refuse to run then.
        return True
    if call.name == "aten::embedding" and specs[-1].dtype.is_floating_point:
        # The meta kernel of torch 2.11 takes any indices.
        return True
    if call.name == "aten::multinomial" and specs[0].size[-1:] > (_MOST_CATEGORIES,):
        return True
    if call.name in _PRODUCTS and any(spec.dtype is not specs[0].dtype for spec in specs):
        return True
    for position, argument in enumerate(call.op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for index in call.operands_at(position):
            if specs[index].overlaps_itself():
                return True
            if any(groups[i] == groups[index] and specs[i] is not specs[index] for i in range(len(specs))):
                return True
    return False


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
