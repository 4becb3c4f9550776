"""Registers the device's kernels with PyTorch's dispatcher: one for every overload that is not composed of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version

from torch_ltc.device import (
    composite_ops,
    copies,
    cpu_composites,
    group_norm,
    nested,
    other_layouts,
    padded_sequences,
    random_ops,
    recurrent,
    sparse,
    views,
    widened_ops,
)
from torch_ltc.device.fallback import run_eagerly
from torch_ltc.device.kernels import Kernel, eager_kernel, make_kernel, native_operators, record
from torch_ltc.device.registration import composed_explicitly
from torch_ltc.errors import DeviceMismatchError, LtcError
from torch_ltc.native.recording import native
from torch_ltc.pytorch.patches import registers
from torch_ltc.pytorch.private import OpOverload, all_schemas, has_kernel, has_kernel_for
from torch_ltc.pytorch.table import COMPOSITE_GRADIENTS, PIN_MEMORY
from torch_ltc.record.native_nodes import make_native_operator
from torch_ltc.record.operator import Kind, Operator

# Left to PyTorch's own kernels. The first group makes aliases that must not go through Python (`detach` of a tensor
# that has a Python object breaks nn.Parameter) or works on autograd's structures; the second composes other operators
# on whatever device its arguments name, or draws random numbers without taking a generator.
_ALIASES_AND_AUTOGRAD = (
    "detach detach_ alias _conj _neg_view lift lift_fresh _fw_primal _make_dual _unpack_dual "
    "is_pinned _pin_memory record_stream _backward requires_grad_ retain_grad rename_ rename align_to refine_names "
    "_efficientzerotensor is_same_size is_set_to _assert_tensor_metadata"
)
_COMPOSED_ANYWHERE = (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided new_full "
    "new_zeros new_ones rand randn randint randperm normal_functional empty.names to_dense to_sparse to_mkldnn"
)
_NOT_OURS = frozenset(f"{_ALIASES_AND_AUTOGRAD} {_COMPOSED_ANYWHERE}".split())
# They compute nothing, and raise an error that depends on which memory is shared, or on the indices of a sparse tensor.
_AT_ONCE = {
    "aten::_test_parallel_materialize": "it asks for the state of memory",
    "aten::_validate_compressed_sparse_indices": "it checks data",
}
# Factories whose bounds may be tensors.
_RANGES = frozenset({"linspace", "logspace"})
_COMPOSITE = "CompositeImplicitAutograd"
# In native/attention.cpp.
_COMPOSED_IN_CPP = frozenset({"aten::dropout", "aten::scaled_dot_product_attention"})

_libraries: list[torch.library.Library] = []
_operators: dict[str, Operator] = {}


def overloads() -> list[OpOverload]:
    """Every ATen overload that has a kernel of its own on the CPU and is not composed implicitly of others."""
    found: dict[str, OpOverload] = {}
    for schema in all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        if not has_kernel(name):
            continue
        composed = has_kernel_for(name, _COMPOSITE)
        # Where the CPU has a kernel beside the composition, eager takes the kernel.
        if composed and not has_kernel_for(name, "CPU"):
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        # A schema may be listed twice, where two libraries declare it.
        found[name] = getattr(packet, schema.overload_name or "default")
    return list(found.values())


def kernel_for(op: OpOverload) -> Kernel | None:
    """The device's kernel for `op`, or None where PyTorch's own does."""
    name = op.name()
    special: dict[str, Any] = {
        **copies.KERNELS,
        **views.KERNELS,
        **random_ops.KERNELS,
        **cpu_composites.KERNELS,
        **other_layouts.KERNELS,
        **padded_sequences.KERNELS,
        **recurrent.KERNELS,
        **widened_ops.KERNELS,
        **composite_ops.KERNELS,
    }
    if name in special:
        kernel: Kernel = special[name]
        return kernel
    plain = op._schema.name.removeprefix("aten::")
    operator = Operator(op)
    # Factories into `out=` end in one kernel or another of the CPU's own.
    left_out = plain in _NOT_OURS or f"{plain}.{op._overloadname}" in _NOT_OURS
    if left_out and not (_has_out(operator) and has_kernel_for(name, "CPU")):
        return None
    if name in _AT_ONCE:
        return eager_kernel(operator, _AT_ONCE[name])
    if torch.Tag.inplace_view in op.tags:
        return views.inplace_view_kernel(op)
    if operator.random:
        return random_ops.random_kernel(op)
    if not operator.dynamic and _has_out(operator):
        return views.out_kernel(operator)
    if plain in _RANGES and operator.kinds[:2].count(Kind.TENSOR):
        return _on_any_device(op, make_kernel(op))
    if plain.startswith("_foreach_"):
        kernel = _on_several_devices(op, _counting_versions(operator, make_kernel(op)))
        return (
            _with_numbers(plain, kernel)
            if plain.startswith("_foreach_addc") and op._overloadname == "Tensor"
            else kernel
        )
    return make_kernel(op)


def _on_any_device(op: OpOverload, kernel: Kernel) -> Kernel:
    """The kernel of a factory with tensors among its arguments: asked for another device than theirs, which is the
    default, PyTorch's own reads them."""

    def on_any_device(*args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        if device is None or device.type == "ltc":
            return kernel(*args, device=device, **kwargs)
        return composed_explicitly(op, *args, device=device, **kwargs)

    return on_any_device


def _on_several_devices(op: OpOverload, kernel: Kernel) -> Kernel:
    """The kernel of an operator on lists: where they hold tensors of the CPU, too, each element is computed by itself,
    as on PyTorch's other devices."""
    if not has_kernel_for(op.name(), "CompositeExplicitAutograd"):
        return kernel

    def on_several_devices(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except DeviceMismatchError:
            lists = [arg for arg in args if isinstance(arg, (list, tuple))]
            if all(len({item.device for item in items if isinstance(item, torch.Tensor)}) < 2 for items in lists):
                raise
            return composed_explicitly(op, *args, **kwargs)

    vars(on_several_devices).update(vars(kernel))
    return on_several_devices


def _with_numbers(name: str, kernel: Kernel) -> Kernel:
    """The kernel of an operator that takes numbers in a tensor of the CPU, and reads them when it is called."""
    with_list = getattr(torch.ops.aten, name).ScalarList

    def with_numbers(self: Any, tensor1: Any, tensor2: Any, scalars: torch.Tensor) -> Any:
        if scalars.is_cpu and scalars.dim() == 1 and len(scalars) == len(self):
            return with_list(self, tensor1, tensor2, scalars.tolist())
        return kernel(self, tensor1, tensor2, scalars)

    return with_numbers


# As eager says it.
_IN_VAIN = (
    "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a normal "
    "tensor before doing inplace update.See https://github.com/pytorch/rfcs/pull/17 for more details."
)


def _first_of_inference(args: tuple[Any, ...], positions: list[int]) -> int | None:
    """The place in lists of the first tensor made in inference mode: outside of it nobody may write to it."""
    given = [args[position] for position in positions if position < len(args)]
    places = [place for tensors in given for place, tensor in enumerate(tensors) if tensor.is_inference()]
    return min(places, default=None)


def _counting_versions(operator: Operator, kernel: Kernel) -> Kernel:
    """The kernel of an operator on lists, which counts up the versions of the tensors that it writes to: autograd's own
    kernels, which do so elsewhere, leave that to those of the device."""
    listed = [position for position, a in enumerate(operator.op._schema.arguments) if "List" in str(a.type)]
    positions = [position for position in listed if operator.arguments[position].written]
    if not positions:
        return kernel

    def counting(*args: Any, **kwargs: Any) -> Any:
        last = None if torch.is_inference_mode_enabled() else _first_of_inference(args, positions)
        if last is not None:
            # Eager writes one after the other, and raises when it has written this one.
            args = tuple([arg[: last + 1] if isinstance(arg, (list, tuple)) else arg for arg in args])
        try:
            made = kernel(*args, **kwargs)
        except LtcError:
            raise
        except RuntimeError:
            _write_until_refused(counting, args, kwargs)
            raise
        for position in positions:
            if position < len(args):
                written = [tensor for tensor in args[position] if not tensor.is_inference()]
                increment_version(written)
        if last is not None:
            raise RuntimeError(_IN_VAIN)
        return made

    # The one that is part of the keys.
    counting.operator = kernel.operator  # type: ignore[attr-defined]
    counting.versions = positions  # type: ignore[attr-defined]
    return counting


def _write_until_refused(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a call on lists that is refused for each of their elements: eager has written to those before the one that
    it refuses."""
    lengths = {len(arg) for arg in args if isinstance(arg, (list, tuple))}
    if len(lengths) != 1 or lengths <= {0, 1}:
        return
    for place in range(lengths.pop()):
        kernel(*[arg[place : place + 1] if isinstance(arg, (list, tuple)) else arg for arg in args], **kwargs)


def _has_out(operator: Operator) -> bool:
    """True for an overload with `out=` targets."""
    return any(a.written and a.keyword_only for a in operator.arguments)


def _unregistered(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Backend fallback: operators of other libraries, recorded when they have a meta kernel."""
    operator = _operators.get(op.name())
    if operator is None:
        operator = _operators[op.name()] = Operator(op)
    values = operator.values(args, kwargs)
    if operator.dynamic or (operator.returns == 0 and not operator.written):
        return run_eagerly(operator, values, "its result's shape depends on data")
    return views.out_kernel(operator)(*args, **kwargs) if _has_out(operator) else record(operator, values)


def _implement(aten: Any, name: str, kernel: Kernel) -> None:
    """Register a kernel of the device; one that records and does nothing else behind the hit path in C++."""
    operator: Operator | None = getattr(kernel, "operator", None)
    if native is None or operator is None:
        aten.impl(name, "PrivateUse1", kernel, False)
        return
    unrecorded = getattr(kernel, "unrecorded", False)
    operator.native = make_native_operator(operator, getattr(kernel, "versions", []), unrecorded)
    # No tensor has this key: the kernel in C++ calls what is registered there.
    aten.impl(name, "PrivateUse2", kernel, False)
    if name not in copies.EMPTIES:
        operator.native.register()
    native_operators.append(operator)


def register_kernels() -> None:
    """Register everything. Once per process."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    aten: Any = library.m
    for op in overloads():
        kernel = kernel_for(op)
        if kernel is not None:
            _implement(aten, op.name(), kernel)
    composites: dict[str, Any] = {
        **copies.COMPOSITES,
        **random_ops.COMPOSITES,
        **cpu_composites.COMPOSITES,
        **recurrent.COMPOSITES,
        **sparse.CHECKS,
        **sparse.CHECKED,
    }
    for name, kernel in composites.items():
        # What the kernels in C++ leave to Python has a key that no tensor has.
        behind = native is not None and name in _COMPOSED_IN_CPP
        aten.impl(name, "AutogradPrivateUse2" if behind else "AutogradPrivateUse1", kernel, False)
        aten.impl(name, "PrivateUse1", kernel, False)
    layouts = {"Sparse": sparse.KERNELS, "SparseCsr": sparse.COMPRESSED_KERNELS, "NestedTensor": nested.KERNELS}
    for layout, own in layouts.items():
        for name, kernel in {**other_layouts.eager_kernels(layout, own), **own}.items():
            aten.impl(name, f"{layout}PrivateUse1", kernel, False)
    for name, kernel in composite_ops.COMPOSED.items():
        _implement(aten, name, kernel)
    for name, kernel in group_norm.AUTOGRAD.items():
        aten.impl(name, "AutogradPrivateUse1", kernel, False)
    for name, kernel in group_norm.COMPOSED.items():
        aten.impl(name, "PrivateUse1", kernel, False)
    for name, kernel in composite_ops.AUTOGRAD.items():
        aten.impl(name, "AutogradPrivateUse1" if native is None else "AutogradPrivateUse2", kernel, False)
    if native is not None:
        native.register_composites()
        native.register_attention()
        native.register_empties(*(kernel.operator.native for kernel in copies.EMPTIES.values()))
    others = torch.library.Library("_", "IMPL")
    _libraries.append(others)
    everything: Any = others.m
    everything.fallback("PrivateUse1", _unregistered, False)
    for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1", "NestedTensorPrivateUse1", "QuantizedPrivateUse1"):
        everything.fallback(key, other_layouts.run_on_physical_device, False)


def _register(key: str, kernels: Mapping[str, Kernel]) -> Callable[[], None]:
    """Register kernels that other devices see; returns what takes them out again."""
    # Its kernels are taken out when it is collected.
    library = torch.library.Library("aten", "IMPL")
    aten: Any = library.m
    for name, kernel in kernels.items():
        aten.impl(name, key, kernel, False)

    def take_out(library: Any = library) -> None:
        library.m.reset()

    return take_out


@registers(COMPOSITE_GRADIENTS)
def _register_gradients() -> Callable[[], None]:
    return _register("CompositeExplicitAutograd", composite_ops.EVERYWHERE)


@registers(PIN_MEMORY)
def _register_pin_memory() -> Callable[[], None]:
    return _register("CPU", {"aten::_pin_memory": copies.pin_memory})


__all__ = ["kernel_for", "overloads", "register_kernels"]
