"""Rules of elementwise operators: arithmetic, comparison, rounding, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
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
    to_torch_dtype,
    widen,
)
from torch_ltc.backends.xla.table import add_rules, rule

# Functions of one floating-point argument: integers are made floating point, half precision is widened.
FLOAT_UNARY: dict[str, Callable[..., Any]] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "erfinv": jax.scipy.special.erfinv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "i0": jax.scipy.special.i0,
    "lgamma": jax.scipy.special.gammaln,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "reciprocal": jnp.reciprocal,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "special_i0e": jax.scipy.special.i0e,
    "special_i1": jax.scipy.special.i1,
    "special_i1e": jax.scipy.special.i1e,
    "special_modified_bessel_i0": jax.scipy.special.i0,
    "special_modified_bessel_i1": jax.scipy.special.i1,
    "special_ndtri": jax.scipy.special.ndtri,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}


def _sign(x: Array) -> Array:
    # A nan has the sign zero in PyTorch.
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype) if x.dtype != jnp.bool_ else x


# Functions of one argument that keep its dtype, or give a boolean.
UNARY: dict[str, Callable[..., Any]] = {
    "_conj": jnp.conj,
    "_conj_physical": jnp.conj,
    "_neg_view": jnp.negative,
    "abs": jnp.abs,
    "angle": jnp.angle,
    "bitwise_not": jnp.invert,
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "logical_not": jnp.logical_not,
    "neg": jnp.negative,
    "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)),
    "round": jnp.round,
    "sign": lambda x: _sign(x),
    "signbit": lambda x: jnp.signbit(x) if is_floating(x) else x < 0,
    "trunc": lambda x: jnp.trunc(x) if is_floating(x) else x,
}

# Functions of two arguments that are brought to one dtype first.
BINARY: dict[str, Callable[..., Any]] = {
    "__lshift__.Scalar": jnp.left_shift,
    "__lshift__.Tensor": jnp.left_shift,
    "__rshift__.Scalar": jnp.right_shift,
    "__rshift__.Tensor": jnp.right_shift,
    "bitwise_and.Scalar": jnp.bitwise_and,
    "bitwise_and.Tensor": jnp.bitwise_and,
    "bitwise_left_shift.Tensor": jnp.left_shift,
    "bitwise_or.Scalar": jnp.bitwise_or,
    "bitwise_or.Tensor": jnp.bitwise_or,
    "bitwise_right_shift.Tensor": jnp.right_shift,
    "bitwise_xor.Scalar": jnp.bitwise_xor,
    "bitwise_xor.Tensor": jnp.bitwise_xor,
    "eq.Scalar": jnp.equal,
    "eq.Tensor": jnp.equal,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "gcd": jnp.gcd,
    "ge.Scalar": jnp.greater_equal,
    "ge.Tensor": jnp.greater_equal,
    "gt.Scalar": jnp.greater,
    "gt.Tensor": jnp.greater,
    "lcm": jnp.lcm,
    "le.Scalar": jnp.less_equal,
    "le.Tensor": jnp.less_equal,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "lt.Scalar": jnp.less,
    "lt.Tensor": jnp.less,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "ne.Scalar": jnp.not_equal,
    "ne.Tensor": jnp.not_equal,
    "nextafter": jnp.nextafter,
}

# The same, half precision widened.
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "fmod.Scalar": lax.rem,
    "fmod.Tensor": lax.rem,
    "mul.Scalar": jnp.multiply,
    "mul.Tensor": jnp.multiply,
    "remainder.Scalar": jnp.remainder,
    "remainder.Scalar_Tensor": jnp.remainder,
    "remainder.Tensor": jnp.remainder,
}

# The same for floating-point arguments.
FLOAT_BINARY: dict[str, Callable[..., Any]] = {
    "atan2": jnp.arctan2,
    "copysign.Scalar": jnp.copysign,
    "copysign.Tensor": jnp.copysign,
    "div.Scalar": jnp.true_divide,
    "div.Tensor": jnp.true_divide,
    "hypot": jnp.hypot,
    "igamma": jax.scipy.special.gammainc,
    "igammac": jax.scipy.special.gammaincc,
}


def _float_unary(function: Callable[..., Any]) -> Callable[[Array], Array]:
    return lambda x: function(widen(x))


def _binary(function: Callable[..., Any]) -> Callable[[Operand, Operand], Array]:
    # lax functions do not broadcast, jnp's do.
    return lambda x, y: function(*jnp.broadcast_arrays(*promote(x, y)))


def _arithmetic(function: Callable[..., Any]) -> Callable[[Operand, Operand], Array]:
    return lambda x, y: function(*jnp.broadcast_arrays(*promote_wide(x, y)))


def _float_binary(function: Callable[..., Any]) -> Callable[[Operand, Operand], Array]:
    return lambda x, y: function(*promote_float(x, y))


# Older versions of JAX do not have it.
if hasattr(jax.scipy.special, "erfcx"):
    FLOAT_UNARY["special_erfcx"] = jax.scipy.special.erfcx
for _name, _function in FLOAT_UNARY.items():
    add_rules(_float_unary(_function), [_name])
for _name, _function in UNARY.items():
    add_rules(_function, [_name])
for _name, _function in BINARY.items():
    add_rules(_binary(_function), [_name])
for _name, _function in ARITHMETIC.items():
    add_rules(_arithmetic(_function), [_name])
for _name, _function in FLOAT_BINARY.items():
    add_rules(_float_binary(_function), [_name])


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


@rule("ldexp.Tensor")
def ldexp(x: Array, exponent: Array) -> Array:
    """`x * 2 ** exponent`."""
    a, b = promote_float(x, exponent)
    return a * jnp.exp2(b)


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


@rule("elu")
def elu(x: Array, alpha: Operand = 1, scale: Operand = 1, input_scale: Operand = 1) -> Array:
    """Exponential linear unit."""
    wide = widen(x)
    return jnp.where(wide > 0, wide * scale, alpha * scale * jnp.expm1(jnp.minimum(wide, 0) * input_scale))


@rule("hardtanh")
def hardtanh(x: Array, low: Operand = -1, high: Operand = 1) -> Array:
    """`x` limited to `[low, high]`."""
    return clamp(x, cast(low, x.dtype), cast(high, x.dtype))


@rule("leaky_relu")
def leaky_relu(x: Array, slope: Operand = 0.01) -> Array:
    """`x`, its negative part scaled."""
    return jnp.where(x > 0, x, x * cast(slope, x.dtype))


@rule("gelu")
def gelu(x: Array, *, approximate: str = "none") -> Array:
    """Gaussian error linear unit."""
    return jax.nn.gelu(widen(x), approximate=approximate == "tanh")


@rule("softshrink_backward", "hardshrink_backward")
def shrink_backward(gradient: Array, x: Array, bound: Operand) -> Array:
    """Gradient of both shrink functions: zero where they are."""
    limit = cast(bound, x.dtype)
    return jnp.where((x >= -limit) & (x <= limit), jnp.zeros((), gradient.dtype), gradient)


@rule("_to_copy")
def to_copy(x: Array, *, dtype: torch.dtype | None = None, **result: Any) -> Array:
    """`x` in another dtype. Where and how it lies in memory means nothing here."""
    return to_torch_dtype(x, dtype)


@rule("prims:convert_element_type")
def convert_element_type(x: Array, dtype: torch.dtype) -> Array:
    """`x` in another dtype."""
    return to_torch_dtype(x, dtype)


@rule("view_as_real")
def view_as_real(x: Array) -> Array:
    """Real and imaginary part in a last dimension of two."""
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@rule("view_as_complex")
def view_as_complex(x: Array) -> Array:
    """The inverse of `view_as_real`."""
    return lax.complex(widen(x[..., 0]), widen(x[..., 1]))
