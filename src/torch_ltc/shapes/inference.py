"""Memoized shape inference: sizes, strides, dtypes and aliasing of the results of a call, without its data.

The meta kernel runs first. Where PyTorch has none, where it raises, or where it is known to give other strides than the
real kernel (`CPU_INFERRED`), the call runs on zero-filled CPU tensors of the same specs: that yields either the real
shape or the very error eager would raise. Data-dependent calls never come here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.config import settings
from torch_ltc.program.composite_gradients import FORMULAS
from torch_ltc.program.instruction import Return, ReturnKind, Returns, flatten_returns
from torch_ltc.program.spec import Spec, spec_of
from torch_ltc.pytorch.private import OpOverload, conj_view, neg_view

# Largest total size of CPU stand-ins; past it the meta kernel's own error is raised instead of trying the real kernel.
_STAND_IN_BYTES = 2**31
_MEMO_BOUND = 65_536

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
    "nonzero_static col2im sort abs"
)
CPU_INFERRED = frozenset(f"aten::{name}" for name in f"{_NORMS} {_LINEAR_ALGEBRA} {_OTHERS}".split())

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

# Operators that return views of their first operand without saying so in their schema.
_SILENT_VIEWS = frozenset(
    f"aten::{name}" for name in ("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "_unsafe_view")
)


_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

# Arguments by which autograd says which gradients it asks for.
_MASKS = ("output_mask", "grad_input_mask", "mask")


class CannotInfer(Exception):
    """The shape of this call's results cannot be known without running it; the text says why."""


@dataclass(frozen=True, slots=True)
class Inferred:
    """The returns of a call, and the new specs of operands that it resizes (`out=` targets), by operand position."""

    returns: Returns
    resized: tuple[tuple[int, Spec], ...] = ()


class OperandIndex(int):
    """Stands for a tensor operand inside an argument template."""


@dataclass(frozen=True, slots=True)
class ShapeCall:
    """A call without tensors. `args` and `kwargs` hold an `OperandIndex` where the call has a tensor; `specs` and
    `groups` describe those operands, operands of one group sharing a storage."""

    op: OpOverload
    args: Sequence[object]
    kwargs: dict[str, object]
    specs: Sequence[Spec]
    groups: Sequence[int]

    @property
    def name(self) -> str:
        """The operator without overload."""
        return self.op._schema.name

    def operands_at(self, position: int) -> list[int]:
        """The operands in the argument at this position of the schema."""
        named = self.op._schema.arguments[position].name
        value = self.args[position] if position < len(self.args) else self.kwargs.get(named)
        items = value if isinstance(value, (list, tuple)) else (value,)
        return [int(item) for item in items if isinstance(item, OperandIndex)]

    def has_undefined_gradient(self) -> bool:
        """True when autograd passes None for a tensor that the schema asks for, or for all gradients of the results."""
        gradients: list[object] = []
        for argument, value in zip(self.op._schema.arguments, self.args, strict=False):
            kind = str(argument.type)
            if value is None and kind == "Tensor":
                return True
            if kind == "Optional[Tensor]" and argument.name.startswith("grad"):
                gradients.append(value)
        return bool(gradients) and all(value is None for value in gradients)

    def gradient_mask(self) -> Sequence[bool] | None:
        """The argument by which autograd says which gradients it asks for, if there is one."""
        for argument, value in zip(self.op._schema.arguments, self.args, strict=False):
            if argument.name in _MASKS and isinstance(value, (list, tuple)):
                return value
        return None


_memo: dict[object, Inferred] = {}


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


def _infer(call: ShapeCall) -> Inferred:
    if any(isinstance(value, torch.dtype) and value in _QUANTIZED for value in (*call.args, *call.kwargs.values())):
        raise CannotInfer("its result is quantized")
    meta: Inferred | None = None
    meta_error: Exception | None = None
    checked = call.name in _REFUSES_NUMBERS or _needs_real_checks(call)
    if not checked and not _is_cpu_inferred(call):
        try:
            meta = run_on("meta", call)
        except CannotInfer:
            raise
        except Exception as error:
            # Without its traceback: the frames in there would keep the caller's tensors alive, and live tensors are
            # outputs of the program.
            meta_error = error.with_traceback(None)
        # The strides of tensors without elements differ between meta and real kernels; running those costs nothing.
        if meta is not None and (settings.device_type != "cpu" or not _is_empty(meta, call.specs)):
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
        return run_on("cpu", call)
    except NotImplementedError as error:
        if "not implemented for" in str(error):
            # The kernel is there and refuses the dtype: that is eager's own error.
            raise
        raise CannotInfer(f"neither a meta nor a CPU kernel can run it: {_first_line(error)}") from meta_error
    except Exception:
        # Made-up data may be refused where the shapes are right: then the meta kernel decides.
        if meta is not None:
            return meta
        if checked or meta_error is not None:
            raise
        with contextlib.suppress(Exception):
            return run_on("meta", call)
        raise


def _is_cpu_inferred(call: ShapeCall) -> bool:
    if settings.device_type != "cpu":
        return False
    name, dtypes = call.name, [spec.dtype for spec in call.specs]
    if name in _REDUCED_PRECISION:
        return torch.bfloat16 in dtypes or torch.float16 in dtypes
    if name in _BOOLEAN:
        return all(dtype is torch.bool for dtype in dtypes)
    return name in CPU_INFERRED or (name in _CONVOLUTIONS and not all(spec.contiguous for spec in call.specs))


def _is_empty(inferred: Inferred, specs: Sequence[Spec]) -> bool:
    results = [item.spec for item in flatten_returns(inferred.returns) if item.spec is not None]
    return any(spec.numel == 0 for spec in (*specs, *results))


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


def run_on(device: str, call: ShapeCall) -> Inferred:
    """The shapes that the kernel of a device gives on stand-ins for the operands."""
    operands = stand_ins(call.specs, call.groups, device, fill_value=int(call.name in _ONES))

    def fill(item: object) -> object:
        if isinstance(item, OperandIndex):
            return operands[item]
        if isinstance(item, torch.device):
            return torch.device(device)
        if isinstance(item, (list, tuple)):
            return [fill(part) for part in item]
        return item

    args = [fill(item) for item in call.args]
    kwargs = {name: fill(item) for name, item in call.kwargs.items()}
    for position, argument in enumerate(call.op._schema.arguments):
        if argument.name == "generator":
            generator = torch.Generator(device="cpu") if device == "cpu" else None
            if position < len(args):
                args[position] = generator
            else:
                kwargs["generator"] = generator
    # Grad mode on, as in the executor: some kernels return more when it is.
    with torch.enable_grad():
        out = FORMULAS.get(call.op, call.op)(*args, **kwargs)
    if device == "meta":
        out = _without_masked(call, out)
    resized = tuple((i, spec_of(t)) for i, t in enumerate(operands) if spec_of(t) is not call.specs[i])
    return Inferred(_classify(call, out), resized)


def _without_masked(call: ShapeCall, out: Any) -> Any:
    """The results without the gradients that nobody asked for: some meta kernels do not look at the mask."""
    mask = call.gradient_mask()
    if mask is None or any(declared.alias_info is not None for declared in call.op._schema.returns):
        return out
    return tuple(value if wanted else None for value, wanted in zip(out, mask, strict=True))


def stand_ins(specs: Sequence[Spec], groups: Sequence[int], device: str, fill_value: int = 0) -> list[torch.Tensor]:
    """Tensors without data (meta) or of one value (cpu) with these specs, sharing storage as `groups` say."""
    sizes: dict[int, int] = {}
    for spec, group in zip(specs, groups, strict=True):
        sizes[group] = max(sizes.get(group, 0), spec.extent() * spec.dtype.itemsize)
    storages = {
        group: torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage() for group, size in sizes.items()
    }
    made: list[torch.Tensor] = []
    for spec, group in zip(specs, groups, strict=True):
        tensor = torch.empty(0, dtype=spec.dtype, device=device)
        tensor.set_(storages[group], spec.offset, spec.size, spec.stride)
        if spec.conj:
            tensor = conj_view(tensor)
        if spec.neg:
            tensor = neg_view(tensor)
        if fill_value:
            tensor.fill_(fill_value)
        made.append(tensor)
    return made


def _classify(call: ShapeCall, out: object) -> Returns:
    schema = call.op._schema
    if not schema.returns:
        return ()
    values: tuple[Any, ...] = tuple(out) if len(schema.returns) > 1 else (out,)  # type: ignore[arg-type]
    owners: dict[int, int] = {}
    result: list[Return | tuple[Return, ...]] = []
    position = 0
    for declared, value in zip(schema.returns, values, strict=True):
        aliased = _aliased_operands(call, declared.alias_info)
        write = declared.alias_info is not None and declared.alias_info.is_write
        if isinstance(value, (list, tuple)):
            items = []
            for i, item in enumerate(value):
                items.append(_classify_one(item, aliased[i : i + 1] if write else aliased, write, owners, position))
                position += 1
            result.append(tuple(items))
        else:
            result.append(_classify_one(value, aliased, write, owners, position))
            position += 1
    return tuple(result)


def _classify_one(value: object, aliased: list[int], write: bool, owners: dict[int, int], position: int) -> Return:
    if value is None:
        return Return(ReturnKind.NOTHING)
    if not isinstance(value, torch.Tensor):
        return Return(ReturnKind.CONSTANT, constant=value)
    if value.layout is not torch.strided or value.is_quantized or value.is_mkldnn or value.is_nested:
        raise CannotInfer(f"its result is not a plain strided tensor (layout {value.layout})")
    if aliased:
        kind = ReturnKind.SAME if write else ReturnKind.VIEW
        return Return(kind, spec_of(value), operand=aliased[0])
    group = owners.setdefault(value.untyped_storage()._cdata, position)
    return Return(ReturnKind.FRESH, spec_of(value), group=group)


def _aliased_operands(call: ShapeCall, alias: Any) -> list[int]:
    """Operands that a return with this alias annotation may share memory with, in order."""
    if call.name in _SILENT_VIEWS:
        return [0]
    if alias is None:
        return []
    wanted = set(alias.before_set) | set(alias.after_set)
    for position, argument in enumerate(call.op._schema.arguments):
        info = argument.alias_info
        # A list's annotation has empty sets: it names the only argument that is annotated too.
        if info is not None and (not wanted or set(info.before_set) & wanted):
            return call.operands_at(position)
    return []


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
