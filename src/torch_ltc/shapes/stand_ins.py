"""Calls run on stand-ins, tensors without the data of the operands: on PyTorch's meta device, or filled on the CPU."""

from __future__ import annotations

import contextlib
import enum
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.program.composite_gradients import FORMULAS
from torch_ltc.program.instruction import Return, ReturnKind, Returns
from torch_ltc.program.spec import Spec, spec_of
from torch_ltc.pytorch.kernel_calls import call_kernel
from torch_ltc.pytorch.private import OpOverload, conj_view, neg_view

# Operators that return views of their first operand without saying so in their schema.
_SILENT_VIEWS = frozenset(
    f"aten::{name}" for name in ("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "_unsafe_view")
)

MASK_DTYPES = frozenset({torch.bool, torch.uint8})
# Arguments by which autograd says which gradients it asks for.
_MASKS = ("output_mask", "grad_input_mask", "mask")


class Fill(enum.Enum):
    """The data of stand-ins on the CPU."""

    ZEROS = "every element is 0"
    ONES = "every element is 1"
    IDENTITY = "matrices have an inverse: 1 on the diagonal, else 0"


class Selected(int):
    """The data of stand-ins on the CPU: so many elements of each mask are true, every other element is 0."""


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


def run_on(device: str, call: ShapeCall, fill: Fill | Selected = Fill.ZEROS) -> Inferred:
    """The shapes that the kernel of a device gives on stand-ins for the operands."""
    operands = stand_ins(call.specs, call.groups, device, fill)

    def placed(item: object) -> object:
        if isinstance(item, OperandIndex):
            return operands[item]
        if isinstance(item, torch.device):
            return torch.device(device)
        if isinstance(item, (list, tuple)):
            return [placed(part) for part in item]
        return item

    args = [placed(item) for item in call.args]
    kwargs = {name: placed(item) for name, item in call.kwargs.items()}
    for position, argument in enumerate(call.op._schema.arguments):
        if argument.name == "generator":
            generator = torch.Generator(device="cpu") if device == "cpu" else None
            if position < len(args):
                args[position] = generator
            else:
                kwargs["generator"] = generator
    # Grad mode on, as in the executor: some kernels return more when it is.
    with torch.enable_grad(), _unnoticed(call.op):
        out = call_kernel(FORMULAS.get(call.op, call.op), args, kwargs)
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


@contextlib.contextmanager
def _unnoticed(op: OpOverload) -> Iterator[None]:
    """Keep what a run leaves behind from the user: its warnings, which the real run repeats, and random numbers that it
    draws without being handed a generator."""
    state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in op.tags else None
    try:
        with dropped_warnings():
            yield
    finally:
        if state is not None:
            torch.set_rng_state(state)


@contextlib.contextmanager
def dropped_warnings() -> Iterator[None]:
    """Warnings that this thread raises inside the block are dropped."""
    filters: Any = warnings.filters
    if not filters or filters[0] is not _IGNORED:
        filters.insert(0, _IGNORED)
    _thread.runs += 1
    try:
        yield
    finally:
        _thread.runs -= 1


class _Thread(threading.local):
    """The runs that are under way on this thread."""

    runs = 0


_thread = _Thread()


class _Runs:
    """In the place of a filter's pattern for messages: `warnings.catch_warnings` would change all threads' filters."""

    def match(self, text: str) -> bool:
        """True while a call runs on stand-ins on this thread."""
        return _thread.runs > 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Libraries send the filters to other processes: a pattern that never matches.
        return re.compile, ("(?!)",)


_IGNORED = ("ignore", _Runs(), Warning, None, 0)


def stand_ins(
    specs: Sequence[Spec], groups: Sequence[int], device: str, fill: Fill | Selected = Fill.ZEROS
) -> list[torch.Tensor]:
    """Tensors without data (meta) or filled (cpu) with these specs, sharing storage as `groups` say."""
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
        if fill is Fill.ONES:
            tensor.fill_(1)
        elif fill is Fill.IDENTITY and tensor.dim() > 1 and not spec.overlaps_itself():
            tensor.diagonal(dim1=-2, dim2=-1).fill_(1)
        elif isinstance(fill, Selected) and spec.dtype in MASK_DTYPES:
            tensor.copy_((torch.arange(spec.numel) < fill).view(spec.size))
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
