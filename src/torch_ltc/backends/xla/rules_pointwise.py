"""Rules of elementwise operators: arithmetic, comparison, rounding, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from torch_ltc.backends.xla.promotion import (
    Operand,
    cast,
    category,
    is_floating,
    promote,
    promote_float,
    promote_wide,
    result_dtype,
    widen,
)
from torch_ltc.backends.xla.table import add_rules, rule

Functions = dict[str, Callable[..., Any]]
special = jax.scipy.special


def _named(home: Any, names: str) -> Functions:
    """Functions that have PyTorch's name in this module, too; older versions of JAX lack some."""
    return {name: getattr(home, name) for name in names.split() if hasattr(home, name)}


# Functions of one floating-point argument: integers are made floating point, half precision is widened.
FLOAT_UNARY: Functions = {
    **_named(jnp, "acos acosh asin asinh atan atanh cos cosh exp exp2 expm1 log log10 log1p log2 reciprocal"),
    **_named(jnp, "sin sinh sqrt tan tanh"),
    **_named(special, "erf erfc erfinv i0"),
    **{f"special_{name}": function for name, function in _named(special, "erfcx i0e i1 i1e ndtri").items()},
    "lgamma": special.gammaln,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "special_modified_bessel_i0": special.i0,
    "special_modified_bessel_i1": special.i1,
}


def _sign(x: Array) -> Array:
    # A nan has the sign zero in PyTorch.
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype) if x.dtype != jnp.bool_ else x


def _angle(x: Array) -> Array:
    # Of zeros that XLA knows when it compiles, `atan2` gives nan; of -0.0 it is pi, and not PyTorch's 0.
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    x = x if is_floating(x) else x.astype(jnp.float32)
    return jnp.where(x < 0, jnp.asarray(math.pi, x.dtype), jnp.where(jnp.isnan(x), x, jnp.zeros((), x.dtype)))


# Functions of one argument that keep its dtype, or give a boolean.
UNARY: Functions = {
    **_named(jnp, "abs bitwise_not ceil floor isinf isnan logical_not round"),
    "angle": _angle,
    "_conj": jnp.conj,
    "_conj_physical": jnp.conj,
    "_neg_view": jnp.negative,
    "neg": jnp.negative,
    "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)),
    "sign": _sign,
    "signbit": lambda x: jnp.signbit(x) if is_floating(x) else x < 0,
    "trunc": lambda x: jnp.trunc(x) if is_floating(x) else x,
}

# Functions of two arguments that are brought to one dtype first.
BINARY = _named(jnp, "fmax fmin gcd lcm logical_and logical_or logical_xor maximum minimum nextafter")
# The same; the second argument may be a number.
BINARY_SCALAR: Functions = {
    **_named(jnp, "bitwise_and bitwise_or bitwise_xor"),
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "eq": jnp.equal,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "lt": jnp.less,
    "ne": jnp.not_equal,
}
# The same, half precision widened.
ARITHMETIC: Functions = {"fmod": lax.rem, "mul": jnp.multiply, "remainder": jnp.remainder}
# The same for floating-point arguments.
FLOAT_BINARY: Functions = {
    "atan2": jnp.arctan2,
    "hypot": jnp.hypot,
    "igamma": special.gammainc,
    "igammac": special.gammaincc,
}
FLOAT_BINARY_SCALAR: Functions = {"copysign": jnp.copysign, "div": jnp.true_divide}


def _after(prepare: Callable[..., list[Array]], function: Callable[..., Any]) -> Callable[..., Array]:
    # lax functions do not broadcast, jnp's do.
    return lambda *operands: function(*jnp.broadcast_arrays(*prepare(*operands)))


def _add_table(functions: Functions, prepare: Callable[..., list[Array]], *overloads: str) -> None:
    for name, function in functions.items():
        add_rules(_after(prepare, function), [f"{name}.{overload}" for overload in overloads])


_add_table(FLOAT_UNARY, lambda x: [widen(x)], "default")
_add_table(UNARY, lambda x: [x], "default")
_add_table(BINARY, promote, "default")
_add_table(BINARY_SCALAR, promote, "Tensor", "Scalar")
_add_table({"bitwise_left_shift": jnp.left_shift, "bitwise_right_shift": jnp.right_shift}, promote, "Tensor")
_add_table(ARITHMETIC, promote_wide, "Tensor", "Scalar")
_add_table({"remainder": jnp.remainder}, promote_wide, "Scalar_Tensor")
_add_table(FLOAT_BINARY, promote_float, "default")
_add_table(FLOAT_BINARY_SCALAR, promote_float, "Tensor", "Scalar")


@rule("add.Tensor", "add.Scalar")
def add(x: Operand, y: Operand, alpha: Operand = 1) -> Array:
    """`x + alpha * y`."""
    a, b = promote_wide(x, y)
    return jnp.add(a, _scaled(b, alpha))


@rule("sub.Tensor", "sub.Scalar")
def sub(x: Operand, y: Operand, alpha: Operand = 1) -> Array:
    """`x - alpha * y`."""
    a, b = promote_wide(x, y)
    return jnp.subtract(a, _scaled(b, alpha))


def _scaled(x: Array, alpha: Operand) -> Array:
    return x if not isinstance(alpha, Array) and alpha == 1 else x * cast(alpha, x.dtype)


@rule("div.Tensor_mode", "div.Scalar_mode")
def div_mode(x: Operand, y: Operand, *, rounding_mode: str | None) -> Array:
    """Division, rounded towards zero or downward."""
    if rounding_mode is None:
        return jnp.true_divide(*promote_float(x, y))
    a, b = jnp.broadcast_arrays(*promote(x, y))
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    return jnp.trunc(a / b) if is_floating(a) else lax.div(a, b)


def _floor_divide(a: Array, b: Array) -> Array:
    if not is_floating(a):
        return jnp.floor_divide(a, b)
    # JAX gives nan for a division by zero, PyTorch what the division itself gives.
    return jnp.where(b == 0, a / b, jnp.floor_divide(a, b))


@rule("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def power(x: Operand, y: Operand) -> Array:
    """`x ** y`."""
    dtype = result_dtype(x, y)
    base, exponent = promote_wide(x, y)
    if category(dtype) == 1:
        return _integer_power(base, exponent)
    if isinstance(y, (int, float)) and math.isfinite(y) and y == int(y) and abs(y) <= 64:
        return lax.integer_pow(base, int(y))
    return jnp.power(base, exponent)


def _integer_power(base: Array, exponent: Array) -> Array:
    # One over an integer is zero, but for one and minus one.
    sign = jnp.where((base == -1) & (exponent % 2 != 0), -1, 1).astype(base.dtype)
    inverse = jnp.where(jnp.abs(base) == 1, sign, 0)
    return jnp.where(exponent < 0, inverse, jnp.power(base, jnp.maximum(exponent, 0)))


@rule("frexp.Tensor")
def frexp(x: Array) -> tuple[Array, Array]:
    """Mantissa and exponent."""
    mantissa, exponent = jnp.frexp(widen(x))
    return mantissa, exponent


@rule("where.self")
def where(condition: Array, x: Operand, y: Operand) -> Array:
    """`x` where the condition holds, else `y`."""
    return jnp.where(condition.astype(jnp.bool_), *promote(x, y))


@rule("clamp", "clamp.Tensor")
def clamp(x: Array, low: Operand | None = None, high: Operand | None = None) -> Array:
    """`x` limited to `[low, high]`."""
    dtype = result_dtype(*[operand for operand in (x, low, high) if operand is not None])
    result = cast(x, dtype)
    if low is not None:
        result = jnp.maximum(result, cast(low, dtype))
    return result if high is None else jnp.minimum(result, cast(high, dtype))


@rule("round.decimals")
def round_decimals(x: Array, *, decimals: int = 0) -> Array:
    """`x` rounded to so many decimals."""
    scale = 10.0 ** abs(decimals)
    wide = widen(x)
    return jnp.round(wide * scale) / scale if decimals >= 0 else jnp.round(wide / scale) * scale


@rule("complex")
def complex_(real: Array, imaginary: Array) -> Array:
    """A complex array from its parts."""
    return lax.complex(*jnp.broadcast_arrays(*promote_float(real, imaginary)))


@rule("polar")
def polar(length: Array, angle: Array) -> Array:
    """A complex array from length and angle."""
    return complex_(length * jnp.cos(angle), length * jnp.sin(angle))


@rule("softshrink_backward", "hardshrink_backward")
def shrink_backward(gradient: Array, x: Array, bound: Operand) -> Array:
    """Gradient of both shrink functions: zero where they are."""
    limit = cast(bound, x.dtype)
    return jnp.where((x >= -limit) & (x <= limit), jnp.zeros((), gradient.dtype), gradient)
