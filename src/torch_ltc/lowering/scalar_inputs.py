"""Operators with a number as an argument, in a form that takes a tensor without dimensions instead.

A number that changes from run to run is then an input of the compiled program, not a reason to compile it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from torch_ltc.program.spec import make_spec
from torch_ltc.pytorch.private import OpOverload

aten = torch.ops.aten
Form = Callable[..., Any]

_HALF = (torch.bfloat16, torch.float16)
NUMBER_SPECS = {
    float: make_spec(torch.float64, (), ()),
    int: make_spec(torch.int64, (), ()),
    bool: make_spec(torch.bool, (), ()),
}


def _like(number: Any, tensor: torch.Tensor) -> Any:
    """The number in the dtype that arithmetic with `tensor` has, so that it decides no more than a Python number."""
    if not isinstance(number, torch.Tensor):
        return number
    dtype = tensor.dtype
    if number.dtype is torch.float64 and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    if number.dtype is torch.int64 and dtype is torch.bool:
        dtype = torch.int64
    return number if dtype is number.dtype else aten._to_copy.default(number, dtype=dtype)


def _scaled(tensor: Any, factor: Any) -> Any:
    if not isinstance(factor, torch.Tensor) and factor == 1:
        return tensor
    return aten.mul.Tensor(tensor, _like(factor, tensor) if isinstance(tensor, torch.Tensor) else factor)


def _wide(number: Any, tensor: torch.Tensor) -> Any:
    """As `_like`, for calls whose result is a float also of integers: a negative number keeps its sign beside uint8."""
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if whole and isinstance(number, torch.Tensor):
        return aten._to_copy.default(number, dtype=torch.get_default_dtype())
    return _like(number, tensor)


def _div(self: torch.Tensor, other: Any) -> Any:
    return aten.div.Tensor(self, _wide(other, self))


def _binary(op: Form) -> Form:
    def run(self: torch.Tensor, other: Any) -> Any:
        return op(self, _like(other, self))

    return run


def _sum(sign: Form) -> Form:
    def run(self: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
        if not isinstance(other, torch.Tensor):
            return sign(self, aten.mul.Tensor(_like(alpha, self), other))
        return sign(self, _scaled(_like(other, self), alpha))

    return run


def _rsub(self: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    return aten.sub.Tensor(_like(other, self), _scaled(self, alpha))


def _addcmul(self: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, value: Any = 1) -> Any:
    return aten.add.Tensor(self, _scaled(aten.mul.Tensor(first, second), value))


def _addcdiv(self: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, value: Any = 1) -> Any:
    if self.dtype in _HALF:
        wide = [aten._to_copy.default(tensor, dtype=torch.float32) for tensor in (self, first, second)]
        return aten._to_copy.default(_addcdiv(*wide, value=value), dtype=self.dtype)
    return aten.add.Tensor(self, aten.div.Tensor(_scaled(first, value), second))


def _lerp(self: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    return aten.lerp.Tensor(self, end, aten.expand.default(_like(weight, self), self.size()))


def _pow(self: torch.Tensor, exponent: Any) -> Any:
    return aten.pow.Tensor_Tensor(self, _like(exponent, self))


def _power_of_number(self: Any, exponent: torch.Tensor) -> Any:
    return aten.pow.Tensor_Tensor(_like(self, exponent), exponent)


def _clamp(self: torch.Tensor, min: Any = None, max: Any = None) -> Any:
    bounds = [bound for bound in (min, max) if bound is not None]
    fractional = any(_is_fractional(bound) for bound in bounds)
    like = _wide if fractional else _like
    low, high = (None if bound is None else like(_as_tensor(bound, self), self) for bound in (min, max))
    return aten.clamp.Tensor(self, low, high)


def _is_fractional(number: Any) -> bool:
    return number.dtype.is_floating_point if isinstance(number, torch.Tensor) else isinstance(number, float)


def _as_tensor(number: Any, like: torch.Tensor) -> Any:
    if isinstance(number, torch.Tensor):
        return number
    dtype = torch.float64 if isinstance(number, float) else torch.int64
    return aten.scalar_tensor.default(number, dtype=dtype, device=like.device)


def _fill(self: torch.Tensor, value: Any) -> Any:
    return aten.copy.default(self, aten.expand.default(_cast(value, self), self.size()))


def _masked_fill(self: torch.Tensor, mask: torch.Tensor, value: Any) -> Any:
    return aten.masked_fill.Tensor(self, mask, _cast(value, self))


def _cast(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The number in the dtype of what it fills, at once: a detour over float32 would round large integers."""
    cast: torch.Tensor = aten._to_copy.default(value, dtype=target.dtype)
    return cast


def _scalar_tensor(
    s: torch.Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    return aten._to_copy.default(s, dtype=dtype or torch.get_default_dtype(), device=device)


def _full(
    size: Any,
    fill_value: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    kind = dtype
    if kind is None:
        kind = torch.get_default_dtype() if fill_value.dtype is torch.float64 else fill_value.dtype
    number = aten._to_copy.default(fill_value, dtype=kind, device=device)
    return aten.clone.default(aten.expand.default(number, size), memory_format=torch.contiguous_format)


def _full_like(self: torch.Tensor, fill_value: torch.Tensor, *, dtype: Any = None, **options: Any) -> Any:
    return _fill(aten.empty_like.default(self, dtype=dtype, **options), fill_value)


def _faded(tensor: torch.Tensor, beta: Any) -> Any:
    """`beta * tensor`, in which a beta of 0 leaves no trace of the tensor, not even NaN."""
    if not isinstance(beta, torch.Tensor):
        return aten.zeros_like.default(tensor) if beta == 0 else _scaled(tensor, beta)
    faded = _scaled(tensor, beta)
    return aten.where.self(aten.eq.Scalar(beta, 0), aten.zeros_like.default(faded), faded)


def _addmm(self: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return aten.add.Tensor(_faded(self, beta), _scaled(aten.mm.default(first, second), alpha))


def _baddbmm(self: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return aten.add.Tensor(_faded(self, beta), _scaled(aten.bmm.default(first, second), alpha))


def _where(condition: torch.Tensor, self: Any, other: Any) -> Any:
    like = other if isinstance(other, torch.Tensor) and other.dim() else self
    return aten.where.self(condition, _like(self, like), _like(other, like))


def _div_mode(self: torch.Tensor, other: Any, *, rounding_mode: Any = None) -> Any:
    return aten.div.Tensor_mode(self, _like(other, self), rounding_mode=rounding_mode)


def _each(form: Form) -> Form:
    """A `_foreach` form: lists of tensors element by element, anything else as it is."""

    def run(self: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[Any]:
        def item(value: Any, index: int) -> Any:
            return value[index] if isinstance(value, (list, tuple)) else value

        return [
            form(tensor, *(item(a, i) for a in args), **{k: item(v, i) for k, v in kwargs.items()})
            for i, tensor in enumerate(self)
        ]

    return run


def _each_addcdiv(form: Form) -> Form:
    """`_foreach_addcmul` and `_foreach_addcdiv`, whose value or values stand by position."""

    def run(self: list[torch.Tensor], first: Any, second: Any, value: Any = 1, scalars: Any = None) -> Any:
        values = value if scalars is None else scalars
        return _each(lambda a, b, c, v: form(a, b, c, value=v))(self, first, second, values)

    return run


def _each_power_of_number(self: Any, exponent: list[torch.Tensor]) -> list[Any]:
    return [_power_of_number(self, tensor) for tensor in exponent]


_ADD, _SUB = _sum(aten.add.Tensor), _sum(aten.sub.Tensor)
_FORMS: dict[str, Form] = {
    "add": _ADD,
    "sub": _SUB,
    "rsub": _rsub,
    "mul": _binary(aten.mul.Tensor),
    "div": _div,
    "div.Tensor_mode": _div_mode,
    "div.Scalar_mode": _div_mode,
    "remainder": _binary(aten.remainder.Tensor),
    "fmod": _binary(aten.fmod.Tensor),
    "floor_divide": _binary(aten.floor_divide.default),
    **{name: _binary(getattr(aten, name).Tensor) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "maximum": _binary(aten.maximum.default),
    "minimum": _binary(aten.minimum.default),
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp.Scalar": _lerp,
    "pow.Tensor_Scalar": _pow,
    "pow.Tensor_Tensor": _pow,
    "pow.Scalar": _power_of_number,
    "pow_.Scalar": _pow,
    "scalar_tensor": _scalar_tensor,
    "clamp": _clamp,
    "clamp_min": lambda self, min: _clamp(self, min),
    "clamp_max": lambda self, max: _clamp(self, None, max),
    "fill": _fill,
    "masked_fill.Scalar": _masked_fill,
    "masked_fill.Tensor": _masked_fill,
    "full": _full,
    "full_like": _full_like,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "where": _where,
    "_foreach_add": _each(_ADD),
    "_foreach_sub": _each(_SUB),
    "_foreach_mul": _each(_binary(aten.mul.Tensor)),
    "_foreach_div": _each(_div),
    "_foreach_addcmul": _each_addcdiv(_addcmul),
    "_foreach_addcdiv": _each_addcdiv(_addcdiv),
    "_foreach_lerp.Scalar": _each(_lerp),
    "_foreach_pow.Scalar": _each(_pow),
    "_foreach_pow.ScalarList": _each(_pow),
    "_foreach_pow.ScalarAndTensor": _each_power_of_number,
    "_foreach_clamp_min": _each(lambda self, min: _clamp(self, min)),
    "_foreach_clamp_max": _each(lambda self, max: _clamp(self, None, max)),
    "_foreach_maximum": _each(_binary(aten.maximum.default)),
    "_foreach_minimum": _each(_binary(aten.minimum.default)),
}
_LISTS_IN_PLACE = "_foreach_"


@cache
def tensor_form(op: OpOverload) -> Form | None:
    """A function with the arguments of `op` in which any number may be a tensor without dimensions; None if there is
    none."""
    if op.namespace != "aten":
        return None
    name = op._schema.name.removeprefix("aten::")
    overload = op._schema.overload_name
    in_place = name.endswith("_") and not name.endswith("__")
    plain = name.removesuffix("_") if in_place else name
    form = _FORMS.get(f"{name}.{overload}") or _FORMS.get(f"{plain}.{overload}") or _FORMS.get(plain)
    if form is None or "out" in [argument.name for argument in op._schema.arguments]:
        return None
    return _written_back(form, plain.startswith(_LISTS_IN_PLACE)) if in_place else form


def _written_back(form: Form, lists: bool) -> Form:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = form(self, *args, **kwargs)
        if lists:
            for target, value in zip(self, made, strict=True):
                aten.copy_.default(target, value)
            return None
        return aten.copy_.default(self, made)

    return run
