"""What a call will return: sizes, strides, dtypes and aliasing, found without its data and remembered.

The meta kernel is asked first. Where PyTorch has none, where it raises, or where it is known to give other strides than
the real kernel (`CPU_INFERRED`), the call is tried on zero-filled CPU tensors of the same geometry: that yields either the
real result geometry or the very error eager would raise. Data-dependent calls never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from torch_ltc.program.instruction import Return, ReturnKind, Returns, flatten_returns
from torch_ltc.program.spec import Spec, spec_of

# Largest total size of CPU stand-ins; past it the meta kernel's own error is raised instead of trying the real kernel.
_STAND_IN_BYTES = 2**31
_MEMO_BOUND = 65_536

# Operators whose meta kernel promises another layout (or another set of returns) than the CPU kernel gives.
CPU_INFERRED = {"aten::mkldnn_rnn_layer"}

# Operators that return views of their first operand without saying so in their schema.
_SILENT_VIEWS = frozenset({"aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"})


class CannotInfer(Exception):
    """This call has no result geometry that can be known without running it; the text says why."""


_memo: dict[object, Returns] = {}


def infer(
    op: OpOverload,
    args: Sequence[object],
    kwargs: dict[str, object],
    specs: Sequence[Spec],
    groups: Sequence[int],
    signature: object,
) -> Returns:
    """Returns of the call, by memory or by trying it without data.

    `args` and `kwargs` hold ints (`OperandIndex`) where the call has tensors; `specs` and `groups` describe those
    operands, operands of one group sharing a storage. `signature` identifies all of it for the memory.
    """
    known = _memo.get(signature)
    if known is not None:
        return known
    returns = _infer(op, args, kwargs, specs, groups)
    if len(_memo) >= _MEMO_BOUND:
        _memo.clear()
    _memo[signature] = returns
    return returns


class OperandIndex(int):
    """Stands for a tensor operand inside an argument template."""


def _infer(
    op: OpOverload, args: Sequence[object], kwargs: dict[str, object], specs: Sequence[Spec], groups: Sequence[int]
) -> Returns:
    if op.name() not in CPU_INFERRED and not _needs_real_checks(op, args, kwargs, specs, groups):
        try:
            return _attempt(op, args, kwargs, specs, groups, "meta")
        except CannotInfer:
            raise
        except Exception as error:
            if not _can_stand_in(op, specs):
                raise
            meta_error = error
    else:
        meta_error = None
    try:
        return _attempt(op, args, kwargs, specs, groups, "cpu")
    except NotImplementedError as error:
        raise CannotInfer(f"neither a meta nor a CPU kernel can run it: {_first_line(error)}") from meta_error


def _can_stand_in(op: OpOverload, specs: Sequence[Spec]) -> bool:
    # A custom operator may have effects of its own: it is never run on made-up data.
    if op.namespace != "aten" and op.namespace != "prims":
        raise CannotInfer("it has no meta (fake) kernel")
    return sum(spec.extent() * spec.dtype.itemsize for spec in specs) <= _STAND_IN_BYTES


def _needs_real_checks(
    op: OpOverload, args: Sequence[object], kwargs: dict[str, object], specs: Sequence[Spec], groups: Sequence[int]
) -> bool:
    """True when eager checks the memory overlap of what is written, which meta kernels do not."""
    if op.namespace != "aten":
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for index in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(index, OperandIndex):
                continue
            if specs[index].overlaps_itself():
                return True
            if any(groups[i] == groups[index] and specs[i] is not specs[index] for i in range(len(specs))):
                return True
    return False


def _attempt(
    op: OpOverload,
    args: Sequence[object],
    kwargs: dict[str, object],
    specs: Sequence[Spec],
    groups: Sequence[int],
    device: str,
) -> Returns:
    operands = stand_ins(specs, groups, device)

    def fill(item: object) -> object:
        if isinstance(item, OperandIndex):
            return operands[item]
        if isinstance(item, torch.device):
            return torch.device(device)
        if isinstance(item, (list, tuple)):
            return [fill(part) for part in item]
        return item

    real_args = [fill(item) for item in args]
    real_kwargs = {name: fill(item) for name, item in kwargs.items()}
    if any(argument.name == "generator" for argument in op._schema.arguments):
        real_kwargs["generator"] = torch.Generator(device="cpu") if device == "cpu" else None
    # Grad mode on, as in the executor: some kernels return more when it is.
    with torch.enable_grad():
        out = op(*real_args, **real_kwargs)
    return _classify(op, out, args, kwargs, operands)


def stand_ins(specs: Sequence[Spec], groups: Sequence[int], device: str) -> list[torch.Tensor]:
    """Tensors without data (meta) or full of zeros (cpu) with these geometries, sharing storage as `groups` say."""
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
            tensor = torch._conj(tensor)
        if spec.neg:
            tensor = torch._neg_view(tensor)
        made.append(tensor)
    return made


def _classify(
    op: OpOverload, out: object, args: Sequence[object], kwargs: dict[str, object], operands: list[torch.Tensor]
) -> Returns:
    schema = op._schema
    if not schema.returns:
        return ()
    values: tuple[Any, ...] = tuple(out) if len(schema.returns) > 1 else (out,)  # type: ignore[arg-type]
    owners: dict[int, int] = {}
    result: list[Return | tuple[Return, ...]] = []
    position = 0
    for declared, value in zip(schema.returns, values, strict=True):
        aliased = _aliased_operands(op, declared.alias_info, args, kwargs)
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
    returns = tuple(result)
    _check_storages(returns, operands)
    return returns


def _classify_one(value: object, aliased: list[int], write: bool, owners: dict[int, int], position: int) -> Return:
    if value is None:
        return Return(ReturnKind.NOTHING)
    if not isinstance(value, torch.Tensor):
        return Return(ReturnKind.CONSTANT, constant=value)
    if value.layout is not torch.strided or value.is_quantized or value.is_mkldnn:
        raise CannotInfer(f"its result is not a plain strided tensor (layout {value.layout})")
    if aliased:
        kind = ReturnKind.SAME if write else ReturnKind.VIEW
        return Return(kind, spec_of(value), operand=aliased[0])
    group = owners.setdefault(value.untyped_storage()._cdata, position)
    return Return(ReturnKind.FRESH, spec_of(value), group=group)


def _aliased_operands(op: OpOverload, alias: Any, args: Sequence[object], kwargs: dict[str, object]) -> list[int]:
    """Operands that a return with this alias annotation may share memory with, in order."""
    if op.name() in _SILENT_VIEWS:
        return [0]
    if alias is None:
        return []
    wanted = set(alias.before_set) | set(alias.after_set)
    for position, argument in enumerate(op._schema.arguments):
        info = argument.alias_info
        # A list's annotation has empty sets: it names the only argument that is annotated too.
        if info is None or (wanted and not set(info.before_set) & wanted):
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        items = value if isinstance(value, (list, tuple)) else (value,)
        return [int(item) for item in items if isinstance(item, OperandIndex)]
    return []


def _check_storages(returns: Returns, operands: list[torch.Tensor]) -> None:
    for item in flatten_returns(returns):
        if item.kind is ReturnKind.VIEW and not 0 <= item.operand < len(operands):
            raise CannotInfer("its result aliases something that is not one of its tensors")


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
