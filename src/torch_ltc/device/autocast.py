"""Autocast on the device: which operators cast their arguments, and to what, as on the physical device.

PyTorch has a list of operators for each device type. The operators are read from the dispatcher, so that those of the
installed PyTorch count; the few that do not run in float32 are named here. Casts are recorded like any other call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ltc.config import settings
from torch_ltc.pytorch.higher_order import pass_over
from torch_ltc.pytorch.patches import registers, replaces
from torch_ltc.pytorch.private import (
    AUTOCAST,
    AUTOCAST_CUDA,
    OpOverload,
    all_schemas,
    has_kernel,
    has_kernel_for,
    is_view,
    without_keys,
)
from torch_ltc.pytorch.table import AUTOCAST_KERNELS

_KEY = "AutocastPrivateUse1"

# fmt: off
# In the dtype of the region.
_LOWER = {
    "cpu": frozenset([
        "_addmm_activation", "_convolution.deprecated", "_native_multi_head_attention", "addbmm", "addmm", "baddbmm",
        "bmm", "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc",
        "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "linalg_vecdot", "linear", "matmul",
        "mkldnn_rnn_layer", "mm", "prelu", "scaled_dot_product_attention",
    ]),
    "cuda": frozenset([
        "_convolution", "_convolution.deprecated", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d",
        "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
        "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot",
        "linalg_vecdot", "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
        "scaled_dot_product_attention",
    ]),
}
# In the widest dtype among the arguments.
_PROMOTED = {
    "cpu": frozenset(["cat", "index_copy", "index_copy.dimname", "stack"]),
    "cuda": frozenset([
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
        "tensordot", "vdot",
    ]),
}
# Results in float32, by the argument `dtype`.
_FLOAT_RESULT = {
    "cpu": frozenset[str](),
    "cuda": frozenset([
        "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm",
        "log_softmax.int", "norm.Scalar", "norm.ScalarOpt_dim", "prod", "prod.dim_int", "softmax.int", "sum",
        "sum.dim_IntList",
    ]),
}
# fmt: on
_NORMS = {
    "norm.Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
    "norm.ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
}
_REFUSED = {"cpu": frozenset[str](), "cuda": frozenset({"binary_cross_entropy"})}

Policy = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

# Parameters cast in this region: by identity, with a reference that tells whether it is still the same one.
_cast_parameters: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
_chosen = threading.local()


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "ltc"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The value in the dtype where autocast may choose it; in lists, each."""
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    if not _is_kept(value, dtype):
        return value.to(dtype)
    known = _cast_parameters.get(id(value))
    if known is not None and known[0]() is value and known[1].dtype is dtype:
        return known[1]
    cast = value.to(dtype)
    _cast_parameters[id(value)] = (weakref.ref(value), cast)
    return cast


def _is_kept(value: Tensor, dtype: torch.dtype) -> bool:
    """True for parameters, which one region casts once."""
    return (
        value.dtype is torch.float32
        and dtype is torch.get_autocast_dtype("ltc")
        and value.requires_grad
        and value.is_leaf
        and not is_view(value)
        and torch.is_grad_enabled()
        and torch.is_autocast_cache_enabled()
    )


def _in_dtype(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    return op(*(_cast(each, dtype) for each in args), **{name: _cast(each, dtype) for name, each in kwargs.items()})


def _lower(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _in_dtype(op, args, kwargs, torch.get_autocast_dtype("ltc"))


def _float32(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _in_dtype(op, args, kwargs, torch.float32)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif _is_eligible(value):
            yield value


def _promoted(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lower = torch.get_autocast_dtype("ltc")
    found = {tensor.dtype for tensor in _tensors((*args, *kwargs.values()))}
    if not found <= {lower, torch.float32}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return _in_dtype(op, args, kwargs, torch.float32 if torch.float32 in found else lower)


def _float_result(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_eligible(args[0]) or kwargs.get("dtype") is not None:
        return op(*args, **kwargs)
    names = [argument.name for argument in op._schema.arguments]
    if "dtype" in names[: len(args)]:
        # `softmax` and others take it by position.
        place = names.index("dtype")
        chosen = torch.float32 if args[place] is None else args[place]
        return op(*args[:place], chosen, *args[place + 1 :], **kwargs)
    if "dtype" in names:
        return op(*args, **{**kwargs, "dtype": torch.float32})
    with_dtype = _NORMS[op.name().removeprefix("aten::")]
    given = dict(zip(names, args, strict=False)) | {"p": args[1] if len(args) > 1 else 2} | kwargs
    return with_dtype(**given, dtype=torch.float32)


def _refused(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # PyTorch's own kernel has the message.
    return op.redispatch(AUTOCAST_CUDA, *args, **kwargs)


def policy(name: str, physical: str) -> Policy | None:
    """What autocast does with an operator on a physical device; None if nothing."""
    for names, found in (
        (_LOWER, _lower),
        (_PROMOTED, _promoted),
        (_FLOAT_RESULT, _float_result),
        (_REFUSED, _refused),
    ):
        if name in names[physical]:
            return found
    return _float32 if has_kernel_for(f"aten::{name}", f"Autocast{physical.upper()}") else None


def _kernel(op: OpOverload, policies: Mapping[str, Policy | None]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        chosen = policies[settings.device_type]
        with without_keys(AUTOCAST):
            return op(*args, **kwargs) if chosen is None else chosen(op, args, kwargs)

    return kernel


def operators() -> dict[str, OpOverload]:
    """Every operator that autocast changes on the CPU or on CUDA, by name."""
    found = {}
    for schema in all_schemas():
        name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        if not name.startswith("aten::") or not has_kernel(name):
            continue
        if has_kernel_for(name, "AutocastCPU") or has_kernel_for(name, "AutocastCUDA"):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            found[name.removeprefix("aten::")] = getattr(packet, schema.overload_name or "default")
    return found


@registers(AUTOCAST_KERNELS)
def _register() -> Callable[[], None]:
    # Kernels are taken out when their library is collected.
    everything: Any = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    # Operators that take functions, as `torch.cond`: they have a list of the keys that they pass over.
    stop = pass_over(_KEY)
    library: Any = torch.library.Library("aten", "IMPL")
    for name, op in operators().items():
        policies = {physical: policy(name, physical) for physical in ("cpu", "cuda")}
        library.m.impl(f"aten::{name}", _KEY, _kernel(op, policies), False)

    def take_out() -> None:
        library.m.reset()
        everything.m.reset()
        stop()

    return take_out


@replaces("torch.clear_autocast_cache")
def _clearing(clear: Any) -> Any:
    def clear_autocast_cache() -> None:
        _cast_parameters.clear()
        clear()

    return clear_autocast_cache


def _is_ours(device_type: str) -> bool:
    """PyTorch takes the name of a device, `ltc:0`, for that of its type."""
    return device_type.partition(":")[0] == "ltc"


@replaces("torch.set_autocast_dtype")
def _setting(set_dtype: Any) -> Any:
    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, dtype)
        if _is_ours(device_type):
            # A block of autocast sets what it has found at its end: nothing is chosen by that.
            _chosen.dtype = dtype is not torch.get_autocast_dtype(settings.device_type)

    return set_autocast_dtype


@replaces("torch.get_autocast_dtype")
def _getting(get_dtype: Any) -> Any:
    def get_autocast_dtype(device_type: str) -> torch.dtype:
        if _is_ours(device_type) and not getattr(_chosen, "dtype", False):
            # As on the physical device, until one is chosen.
            return get_dtype(settings.device_type)  # type: ignore[no-any-return]
        return get_dtype(device_type)  # type: ignore[no-any-return]

    return get_autocast_dtype


__all__ = ["operators", "policy"]
