"""Rules that call PyTorch's own meta kernel, for operators that have one in C++.

Such a kernel takes 2 to 12 us; answers are memoized. One in Python takes 20 to 2,000 us and imports SymPy at its first
call, which takes a second: operators that have no other get a rule of ours.
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
    "view _unsafe_view _reshape_alias as_strided alias detach lift_fresh t transpose.int permute expand unsqueeze "
    "squeeze squeeze.dim squeeze.dims split.Tensor unsafe_split.Tensor split_with_sizes unsafe_split_with_sizes "
    "unbind.int diagonal unfold"
)
_FRESH = "index_select"
_META = torch.device("meta")
_BOUND = 16_384
_tensors: dict[Spec, torch.Tensor] = {}


def meta_tensor(spec: Spec) -> torch.Tensor:
    """A tensor of this spec without data, one for all calls: it must not be written to."""
    tensor = _tensors.get(spec)
    if tensor is None:
        if len(_tensors) >= _BOUND:
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
    call = op._op

    def by_meta_kernel(*given: Any) -> Returns:
        args = [meta_tensor(value) if value.__class__ is Spec else value for value in given]
        named = dict(zip(names, args[split:], strict=True)) if names else {}
        try:
            out = call(*args[:split], **named)
        except Exception:
            raise NoRule from None
        if isinstance(out, torch.Tensor):
            spec = spec_of(out)
            # Views are viewed again.
            _tensors.setdefault(spec, out)
            return view(spec) if kind is ReturnKind.VIEW else fresh(spec)
        found = tuple([Return(kind, spec_of(part), operand=0) for part in out])
        require(all(item.spec is not None and item.spec.plain for item in found))
        return (found,)

    return by_meta_kernel


def _memoized(rule: Rule) -> Rule:
    """The rule, called once for the calls of equal layers. Only for rules that look at their arguments alone."""
    known: dict[tuple[Any, ...], Returns] = {}

    def memoized(*given: Any) -> Returns:
        key = tuple([tuple(value) if value.__class__ is list else value for value in given])
        returns = known.get(key)
        if returns is None:
            if len(known) >= _BOUND:
                known.clear()
            returns = known[key] = rule(*given)
        return returns

    return memoized


for _name in _VIEWS.split():
    rules.add(_name, _memoized(_by_meta_kernel(overload(_name), ReturnKind.VIEW)))
for _name in _FRESH.split():
    rules.add(_name, _memoized(_by_meta_kernel(overload(_name), ReturnKind.FRESH)))
_padded = _memoized(_by_meta_kernel(overload("constant_pad_nd"), ReturnKind.FRESH))


@rule("constant_pad_nd")
def constant_pad(operand: Spec, pad: Any, value: Any) -> Returns:
    """The tensor with a number around it, which the meta kernel does not look at."""
    require(fits(value, operand.dtype))
    return _padded(operand, pad, 0)


def copied(spec: Spec, dtype: torch.dtype | None = None) -> Spec:
    """The spec of a copy that keeps the layout."""
    strides = spec.stride if spec.contiguous else torch.clone(meta_tensor(spec)).stride()
    return make_spec(dtype or spec.dtype, spec.size, strides)
