"""Elementwise operators: fresh and in-place forms, and their backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.pytorch.private import SchemaArgument
from torch_ltc.shapes.broadcasting import broadcast, elementwise_strides, fits, is_odd, promoted, with_number
from torch_ltc.shapes.table import NoRule, contiguous, fresh, overload, require, rule, rules, same

Accepts = Callable[[torch.dtype], bool]


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _is_real(dtype: torch.dtype) -> bool:
    return not dtype.is_complex and dtype is not torch.bool


def _is_number(dtype: torch.dtype) -> bool:
    return not dtype.is_complex


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


# Operators by the dtypes that they surely take once their operands have met in one, and the dtype of the result where
# that is another one.
_FLOAT_UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf "
    "erfc erfinv lgamma digamma sigmoid reciprocal silu mish hardswish hardsigmoid relu floor ceil round trunc frac "
    "sgn sign leaky_relu elu softplus hardtanh celu threshold gelu"
)
_FLOAT_BINARY = "div atan2 remainder fmod fmax fmin hypot copysign xlogy addcmul addcdiv lerp pow"
# Gradient, what the forward saw or gave, numbers.
_BACKWARDS = (
    "sigmoid_backward tanh_backward threshold_backward gelu_backward silu_backward mish_backward "
    "leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward"
)
_FAMILIES: tuple[tuple[str, Accepts, torch.dtype | None], ...] = (
    (f"{_FLOAT_UNARY} {_FLOAT_BINARY} {_BACKWARDS}", _is_float, None),
    ("neg abs sub rsub clamp clamp_min clamp_max", _is_real, None),
    ("add mul maximum minimum", _is_number, None),
    ("bitwise_not bitwise_and bitwise_or bitwise_xor", _is_integral, None),
    ("eq ne lt le gt ge logical_and logical_or logical_xor", _is_number, torch.bool),
    ("logical_not isnan isinf", _is_number, torch.bool),
)
# Their other operands decide no dtype.
_OF_ONE_DTYPE = frozenset(f"{_FLOAT_UNARY} {_BACKWARDS} addcmul addcdiv lerp clamp clamp_min clamp_max".split())
_OPERANDS = frozenset(("Tensor", "number", "Optional[number]", "float", "bool", "str"))
# They take no tensor of truth values, whatever the other operand is.
_DIFFERENCES = frozenset(("sub", "rsub"))
# Those that refuse some numbers, whatever the data: the arguments that are certainly accepted.
_NUMBERS: dict[str, Callable[..., bool]] = {
    "celu": lambda operand, alpha: alpha != 0,
    "leaky_relu_backward": lambda gradient, operand, slope, is_result: not is_result or slope >= 0,
}
# They have rules of their own.
_APART = frozenset(("pow.Tensor_Scalar", "pow_.Scalar", "rsub.Tensor"))


def elementwise(dtype: torch.dtype, operands: Sequence[Spec]) -> Returns:
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
    return fresh(make_spec(dtype, size, elementwise_strides(size, operands)))


def written(dtype: torch.dtype, operands: Sequence[Spec]) -> Returns:
    """The first operand, when an elementwise kernel can write its result there."""
    target = operands[0]
    require(dtype is target.dtype)
    for operand in operands:
        if operand.size != target.size and broadcast(target.size, operand.size) != target.size:
            raise NoRule
    return same(target)


def _met(args: Sequence[Any], one_dtype: bool) -> tuple[torch.dtype, Sequence[Spec]]:
    """The dtype in which the arguments meet, and the tensors among them."""
    first = args[0]
    # `torch.add(2, tensor)` has a number in the place of its first tensor.
    require(first.__class__ is Spec)
    dtype: torch.dtype = first.dtype
    if len(args) == 1:
        return dtype, args
    second = args[1]
    if second.__class__ is Spec and second.dtype is dtype and (len(args) == 2 or (len(args) == 3 and args[2] == 1)):
        return dtype, args[:2]
    operands = [first]
    require(any(value is not None for value in args[1:]))
    for position, value in enumerate(args[1:]):
        if value.__class__ is Spec:
            if value.dtype is not dtype:
                require(not one_dtype and position == 0)
                dtype = promoted(first, value)
            operands.append(value)
        elif value.__class__ is str:
            require(value in ("none", "tanh"))
        elif value is not None:
            # A truth value is no operand of a difference.
            require(value.__class__ is not bool or position or dtype is torch.bool)
            kept = with_number(dtype, value)
            # The second argument is an operand; those after it are factors and bounds, which decide no dtype.
            require(kept is dtype or (position == 0 and not one_dtype))
            dtype = kept
            if position == 0 and not one_dtype and not first.contiguous:
                operands.append(contiguous(dtype, ()))
    return dtype, operands


def _are_no_truth_values(operands: Sequence[Spec]) -> bool:
    return all(operand.dtype is not torch.bool for operand in operands)


def _add_rules(name: str, accepts: Accepts, gives: torch.dtype | None) -> None:
    one_dtype, has_numbers = name in _OF_ONE_DTYPE, _NUMBERS.get(name)

    def made(*args: Any) -> Returns:
        dtype, operands = _met(args, one_dtype)
        require(has_numbers is None or has_numbers(*args))
        require(accepts(dtype) and (name not in _DIFFERENCES or _are_no_truth_values(operands)))
        if one_dtype and not all(operand.contiguous for operand in operands):
            # Some of their kernels look at the operands in another order.
            require(all(operand.stride == operands[0].stride for operand in operands))
        return elementwise(gives or dtype, operands)

    def in_place(*args: Any) -> Returns:
        dtype, operands = _met(args, one_dtype)
        require(has_numbers is None or has_numbers(*args))
        require(accepts(dtype) and (name not in _DIFFERENCES or _are_no_truth_values(operands)))
        return written(dtype if gives is None else operands[0].dtype, operands)

    for packet, function in ((name, made), (f"{name}_", in_place)):
        for tail in getattr(torch.ops.aten, packet).overloads() if hasattr(torch.ops.aten, packet) else ():
            full_name = packet if tail == "default" else f"{packet}.{tail}"
            if full_name not in _APART and _is_elementwise(overload(full_name)._schema.arguments):
                rules.add(full_name, function)


def _is_elementwise(arguments: Sequence[SchemaArgument]) -> bool:
    """True for a tensor and other operands, none of which is an `out=` target."""
    kinds = [str(argument.type) for argument in arguments]
    return kinds[0] == "Tensor" and _OPERANDS.issuperset(kinds) and not any(a.alias_info for a in arguments[1:])


for _names, _accepts, _gives in _FAMILIES:
    for _name in _names.split():
        _add_rules(_name, _accepts, _gives)


@rule("pow.Tensor_Scalar")
def power(base: Spec, exponent: Any) -> Returns:
    """A power by a number."""
    # The power 1 is a copy, which keeps odd strides.
    require(base.dtype.is_floating_point and not is_odd(base))
    return elementwise(with_number(base.dtype, exponent), (base,))


@rule("pow_.Scalar")
def power_in_place(base: Spec, exponent: Any) -> Returns:
    """A power by a number, in place."""
    require(base.dtype.is_floating_point)
    return written(with_number(base.dtype, exponent), (base,))


@rule("rsub.Tensor")
def reversed_difference(first: Spec, second: Spec, alpha: Any) -> Returns:
    """The second operand less the first."""
    difference = rules.get("sub.Tensor")
    assert difference is not None
    return difference(second, first, alpha)


@rule("where.self")
def where(condition: Spec, first: Spec, second: Spec) -> Returns:
    """A choice between two tensors."""
    require(condition.dtype is torch.bool)
    return elementwise(promoted(first, second), (condition, first, second))


def _check_fill(operand: Spec, mask: Spec, value: Any) -> None:
    require(mask.dtype is torch.bool and broadcast(operand.size, mask.size) == operand.size)
    if isinstance(value, Spec):
        require(not value.size and value.dtype is operand.dtype)
    elif isinstance(value, float) and value in (float("inf"), float("-inf")):
        require(operand.dtype.is_floating_point)
    else:
        require(with_number(operand.dtype, value) is operand.dtype)


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(operand: Spec, mask: Spec, value: Any) -> Returns:
    """The tensor with a number where the mask is true."""
    require(operand.contiguous)
    _check_fill(operand, mask, value)
    return fresh(operand)


@rule("masked_fill_.Scalar", "masked_fill_.Tensor")
def masked_fill_in_place(operand: Spec, mask: Spec, value: Any) -> Returns:
    """The tensor itself."""
    _check_fill(operand, mask, value)
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
