"""Elementwise operators: fresh and in-place forms, and their backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.shapes.broadcasting import broadcast, elementwise_strides, fits, is_odd, promoted, with_number
from torch_ltc.shapes.table import Rule, Unsure, fresh, require, rule, rules, same

Accepts = Callable[[torch.dtype], bool]
Answer = Callable[[torch.dtype, Sequence[Spec]], Returns]

_FLOAT_UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf "
    "erfc erfinv lgamma digamma sigmoid reciprocal silu mish hardswish hardsigmoid relu floor ceil round trunc frac "
    "sgn sign"
)
_COMPARISONS = "eq ne lt le gt ge"
_LOGICAL = "logical_and logical_or logical_xor"
_BITWISE = "bitwise_and bitwise_or bitwise_xor"
# Arithmetic, and which dtypes it surely takes when both operands meet in one.
_ARITHMETIC = "add mul"
_DIFFERENCE = "sub"
_QUOTIENT = "div true_divide"
_ANY = "maximum minimum"
_FLOATS = "pow atan2 remainder fmod fmax fmin hypot copysign xlogy"
# Gradient, what the forward saw or gave, numbers.
_BACKWARDS = (
    "sigmoid_backward tanh_backward threshold_backward gelu_backward silu_backward mish_backward "
    "leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward"
)
_NUMBERED_UNARY = "leaky_relu elu softplus hardtanh celu threshold"


def elementwise(dtype: torch.dtype, operands: Sequence[Spec], mixed: bool = False) -> Returns:
    """One new tensor in the layout that elementwise kernels choose."""
    first = operands[0]
    size = first.size
    if first.contiguous and first.dtype is dtype:
        for operand in operands:
            if operand is not first and not (operand.contiguous and (operand.size == size or not operand.size)):
                break
        else:
            return fresh(first)
    for operand in operands:
        size = broadcast(size, operand.size)
    return fresh(make_spec(dtype, size, elementwise_strides(size, operands, mixed)))


def arithmetic(dtype: torch.dtype, operands: Sequence[Spec]) -> Returns:
    """As `elementwise`, for operators that mix layouts as the real kernels do."""
    return elementwise(dtype, operands, mixed=True)


def written(dtype: torch.dtype, operands: Sequence[Spec]) -> Returns:
    """The first operand, when an elementwise kernel can write its result there."""
    target = operands[0]
    require(dtype is target.dtype)
    for operand in operands:
        if operand.size != target.size and broadcast(target.size, operand.size) != target.size:
            raise Unsure
    return same(target)


def is_float(dtype: torch.dtype) -> bool:
    """True for real floating dtypes."""
    return dtype.is_floating_point


def _is_real(dtype: torch.dtype) -> bool:
    return not dtype.is_complex and dtype is not torch.bool


def _is_number(dtype: torch.dtype) -> bool:
    return not dtype.is_complex


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _unary(answer: Answer, accepts: Accepts) -> Rule:
    def unary(operand: Spec, **_: Any) -> Returns:
        require(accepts(operand.dtype))
        return answer(operand.dtype, (operand,))

    return unary


def _binary(answer: Answer, accepts: Accepts) -> Rule:
    def binary(first: Any, second: Any, alpha: Any = 1) -> Returns:
        dtype = promoted(first, second)
        require(accepts(dtype))
        if alpha != 1 and not fits(alpha, dtype):
            raise Unsure
        if not isinstance(second, Spec):
            return answer(dtype, (first,))
        return answer(dtype, (first, second) if isinstance(first, Spec) else (second,))

    return binary


def _comparison(accepts: Accepts, answers: bool = True) -> Rule:
    def comparison(first: Any, second: Any) -> Returns:
        require(accepts(promoted(first, second)))
        operands = (first, second) if isinstance(second, Spec) else (first,)
        return elementwise(torch.bool, operands)

    def in_place(first: Any, second: Any) -> Returns:
        require(accepts(promoted(first, second)))
        operands = (first, second) if isinstance(second, Spec) else (first,)
        return written(first.dtype, operands)

    return comparison if answers else in_place


def _add_families() -> None:
    for name in _FLOAT_UNARY.split():
        rules.add(name, _unary(elementwise, is_float))
        rules.add(f"{name}_", _unary(written, is_float))
    for name, accepts in (("neg", _is_real), ("abs", _is_real), ("bitwise_not", _is_integral)):
        rules.add(name, _unary(elementwise, accepts))
        rules.add(f"{name}_", _unary(written, accepts))
    for names, answer, accepts in (
        (_ARITHMETIC, arithmetic, _is_number),
        (_DIFFERENCE, arithmetic, _is_real),
        (_QUOTIENT, arithmetic, is_float),
        (_ANY, elementwise, _is_number),
        (_FLOATS, elementwise, is_float),
        (_BITWISE, elementwise, _is_integral),
    ):
        for name in names.split():
            _add_binary(name, answer, accepts)
    for name in _COMPARISONS.split():
        for overload in ("Tensor", "Scalar"):
            rules.add(f"{name}.{overload}", _comparison(_is_number))
            rules.add(f"{name}_.{overload}", _comparison(_is_number, answers=False))
    for name in _LOGICAL.split():
        rules.add(name, _comparison(_is_number))


def _add_binary(name: str, answer: Answer, accepts: Accepts) -> None:
    made, in_place = _binary(answer, accepts), _binary(written, accepts)
    packet = getattr(torch.ops.aten, name)
    for overload, tail in (("Tensor", ".Tensor"), ("Scalar", ".Scalar"), ("default", ""), ("Tensor_Tensor", None)):
        if overload in packet.overloads():
            rules.add(name + (f".{overload}" if tail is None else tail), made)
    if hasattr(torch.ops.aten, f"{name}_"):
        for overload, tail in (("Tensor", ".Tensor"), ("Scalar", ".Scalar"), ("default", "")):
            if overload in getattr(torch.ops.aten, f"{name}_").overloads():
                rules.add(f"{name}_{tail}", in_place)


_add_families()


@rule("logical_not", "isnan", "isinf", "isfinite")
def to_bool(operand: Spec) -> Returns:
    """A truth value per element."""
    require(not operand.dtype.is_complex)
    return elementwise(torch.bool, (operand,))


@rule("pow.Tensor_Scalar")
def power(base: Spec, exponent: Any) -> Returns:
    """A power by a number."""
    # The power 1 is a copy, which keeps odd strides.
    require(base.dtype.is_floating_point and not is_odd(base))
    return elementwise(with_number(base.dtype, exponent), (base,))


@rule("rsub.Scalar", "rsub.Tensor")
def reversed_difference(first: Spec, second: Any, alpha: Any) -> Returns:
    """The second operand less the first."""
    dtype = promoted(first, second)
    require(_is_real(dtype) and fits(alpha, dtype))
    return elementwise(dtype, (first, second) if isinstance(second, Spec) else (first,))


@rule("gelu")
def gelu(operand: Spec, approximate: str) -> Returns:
    """The same geometry."""
    require(is_float(operand.dtype) and approximate in ("none", "tanh"))
    return elementwise(operand.dtype, (operand,))


def _clamp(answer: Answer) -> Rule:
    def clamp(operand: Spec, *bounds: Any) -> Returns:
        dtype = operand.dtype
        given = [bound for bound in bounds if bound is not None]
        require(given and _is_real(dtype))
        for bound in given:
            require(not isinstance(bound, Spec) and with_number(dtype, bound) is dtype)
        return answer(dtype, (operand,))

    return clamp


for _name in ("clamp", "clamp_min", "clamp_max"):
    rules.add(_name, _clamp(elementwise))
    rules.add(f"{_name}_", _clamp(written))


def _numbered(answer: Answer) -> Rule:
    def numbered(operand: Spec, *numbers: Any) -> Returns:
        dtype = operand.dtype
        require(is_float(dtype) and all(fits(number, dtype) for number in numbers))
        return answer(dtype, (operand,))

    return numbered


for _name in _NUMBERED_UNARY.split():
    rules.add(_name, _numbered(elementwise))
    if hasattr(torch.ops.aten, f"{_name}_"):
        rules.add(f"{_name}_", _numbered(written))


def backward(gradient: Spec, saved: Spec, *numbers: Any, **_: Any) -> Returns:
    """The gradient of an elementwise operator of one tensor."""
    dtype = gradient.dtype
    require(is_float(dtype) and saved.dtype is dtype and saved.size == gradient.size)
    return elementwise(dtype, (gradient, saved))


for _name in _BACKWARDS.split():
    rules.add(_name, backward)


@rule("where.self")
def where(condition: Spec, first: Spec, second: Spec) -> Returns:
    """A choice between two tensors."""
    require(condition.dtype is torch.bool)
    operands = (condition, first, second)
    return elementwise(promoted(first, second), operands)


def _three(answer: Answer) -> Rule:
    def three(first: Spec, second: Spec, third: Spec, value: Any = 1) -> Returns:
        dtype = first.dtype
        require(is_float(dtype) and second.dtype is dtype and third.dtype is dtype and fits(value, dtype))
        return answer(dtype, (first, second, third))

    return three


for _name in ("addcmul", "addcdiv", "lerp.Tensor"):
    rules.add(_name, _three(elementwise))
    rules.add(_name.replace("lerp", "lerp_") if "." in _name else f"{_name}_", _three(written))


def _lerp(answer: Answer) -> Rule:
    def lerp(first: Spec, second: Spec, weight: Any) -> Returns:
        require(is_float(first.dtype) and second.dtype is first.dtype and fits(weight, first.dtype))
        return answer(first.dtype, (first, second))

    return lerp


rules.add("lerp.Scalar", _lerp(elementwise))
rules.add("lerp_.Scalar", _lerp(written))


def _fill_value(operand: Spec, value: Any) -> bool:
    if isinstance(value, Spec):
        return not value.size and value.dtype is operand.dtype
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return operand.dtype.is_floating_point
    return with_number(operand.dtype, value) is operand.dtype


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(operand: Spec, mask: Spec, value: Any) -> Returns:
    """The tensor with a number where the mask is true."""
    require(mask.dtype is torch.bool and operand.contiguous and _fill_value(operand, value))
    require(broadcast(operand.size, mask.size) == operand.size)
    return fresh(operand)


@rule("masked_fill_.Scalar", "masked_fill_.Tensor")
def masked_fill_in_place(operand: Spec, mask: Spec, value: Any) -> Returns:
    """The tensor itself."""
    require(mask.dtype is torch.bool and _fill_value(operand, value))
    require(broadcast(operand.size, mask.size) == operand.size)
    return same(operand)


@rule("fill_.Scalar", "fill_.Tensor")
def fill(operand: Spec, value: Any) -> Returns:
    """The tensor itself."""
    require(not value.size if isinstance(value, Spec) else fits(value, operand.dtype))
    return same(operand)


@rule("zero_")
def zero(operand: Spec) -> Returns:
    """The tensor itself."""
    return same(operand)


@rule("copy_")
def copy(target: Spec, source: Spec, non_blocking: bool) -> Returns:
    """The target itself."""
    require(source.size == target.size or broadcast(target.size, source.size) == target.size)
    require(not source.dtype.is_complex or target.dtype.is_complex)
    return same(target)
