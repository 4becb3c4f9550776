"""Rules that call PyTorch's own meta kernel, for operators that have one in C++.

Such a kernel takes 2 to 12 us. One in Python takes 20 to 2,000 us and imports SymPy at its first call, which takes a
second: operators that have no other get a rule of ours.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ltc.program.instruction import Return, ReturnKind, Returns
from torch_ltc.program.spec import Spec, make_spec, spec_of
from torch_ltc.pytorch.private import OpOverload
from torch_ltc.shapes.broadcasting import fits
from torch_ltc.shapes.table import NoRule, Rule, fresh, overload, require, rule, rules, view

_VIEWS = (
    "view _unsafe_view _reshape_alias as_strided alias detach lift_fresh t transpose.int permute expand select.int "
    "slice.Tensor unsqueeze squeeze squeeze.dim squeeze.dims split.Tensor unsafe_split.Tensor split_with_sizes "
    "unsafe_split_with_sizes unbind.int diagonal unfold"
)
_COPIES = "clone _to_copy constant_pad_nd index_select max min"
_FACTORIES = "zeros ones full scalar_tensor empty.memory_format empty_strided new_zeros new_ones new_empty"
_META = torch.device("meta")
_TENSORS_BOUND = 16_384
_tensors: dict[Spec, torch.Tensor] = {}


def meta_tensor(spec: Spec) -> torch.Tensor:
    """A tensor of this spec without data, one for all calls: it must not be written to."""
    tensor = _tensors.get(spec)
    if tensor is None:
        if len(_tensors) >= _TENSORS_BOUND:
            _tensors.clear()
        tensor = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=_META)
        if spec.offset:
            tensor = tensor.as_strided(spec.size, spec.stride, spec.offset)
        _tensors[spec] = tensor
    return tensor


def _by_meta_kernel(op: OpOverload, kind: ReturnKind) -> Rule:
    arguments = op._schema.arguments
    split = sum(not argument.kwarg_only for argument in arguments)
    names = [argument.name for argument in arguments[split:]]

    def by_meta_kernel(*given: Any) -> Returns:
        args = [meta_tensor(value) if value.__class__ is Spec else value for value in given]
        named = dict(zip(names, args[split:], strict=True))
        if "device" in named:
            named["device"] = _META
        try:
            out = op(*args[:split], **named)
        except Exception:
            raise NoRule from None
        if isinstance(out, torch.Tensor):
            return view(spec_of(out)) if kind is ReturnKind.VIEW else fresh(spec_of(out))
        found = tuple([Return(kind, spec_of(part), operand=0) for part in out])
        require(all(item.spec is not None and item.spec.plain for item in found))
        return (found,)

    return by_meta_kernel


for _name in _VIEWS.split():
    rules.add(_name, _by_meta_kernel(overload(_name), ReturnKind.VIEW))
for _name in (*_COPIES.split(), *_FACTORIES.split()):
    rules.add(_name, _by_meta_kernel(overload(_name), ReturnKind.FRESH))


def copied(spec: Spec, dtype: torch.dtype | None = None) -> Spec:
    """The spec of a copy that keeps the layout."""
    strides = spec.stride if spec.contiguous else torch.clone(meta_tensor(spec)).stride()
    return make_spec(dtype or spec.dtype, spec.size, strides)


@rule("zeros_like", "ones_like", "empty_like")
def like(
    spec: Spec, dtype: torch.dtype | None, layout: Any, device: Any, pin_memory: Any, memory_format: Any
) -> Returns:
    """A new tensor in the layout of another."""
    require(layout in (None, torch.strided) and memory_format in (None, torch.preserve_format))
    return fresh(copied(spec, dtype))


@rule("full_like")
def full_like(spec: Spec, value: Any, *options: Any) -> Returns:
    """A new tensor in the layout of another, filled with a number."""
    require(fits(value, options[0] or spec.dtype))
    return like(spec, *options)
