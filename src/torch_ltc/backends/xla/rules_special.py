"""Rules of special functions that JAX does not have, and of the orthogonal polynomials.

Bessel functions of the first and second kind are summed in double precision: near zero from their power series, far
from it from their asymptotic expansion. Those of the modified second kind are integrals, done by the trapezoidal rule,
which converges fast because the integrand vanishes with all its derivatives at both ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from torch_ltc.backends.xla.promotion import Operand, promote_float, widen
from torch_ltc.backends.xla.table import add_rules, rule

_EULER = 0.5772156649015329
# Below this the power series is used. Both are good to ten digits there.
_NEAR = 12.0
_WIDE = 50.0
_SERIES_TERMS = 40
_ASYMPTOTIC_TERMS = 22


def _series(x: Array, order: int) -> tuple[Array, Array]:
    """The power series of J, and the part of Y that is not a multiple of J's, for |x| below `_NEAR`."""
    quarter = -jnp.square(x / 2)
    term = (x / 2) ** order
    first, second = jnp.zeros_like(x), jnp.zeros_like(x)
    low, high = 0.0, float(order)
    for k in range(_SERIES_TERMS):
        if k:
            term = term * quarter / (k * (k + order))
            low, high = low + 1 / k, high + 1 / (k + order)
        first = first + term
        second = second + term * (low + high - 2 * _EULER)
    return first, second


def _asymptotic(x: Array, order: int) -> tuple[Array, Array]:
    """J and Y for `x` above `_NEAR`, by Hankel's expansion."""
    mu = 4.0 * order * order
    even, odd = jnp.ones_like(x), jnp.zeros_like(x)
    term = jnp.ones_like(x)
    for k in range(1, _ASYMPTOTIC_TERMS):
        term = term * (mu - (2 * k - 1) ** 2) / (k * 8 * x)
        sign = 1 if k % 4 < 2 else -1
        if k % 2:
            odd = odd + sign * term
        else:
            even = even + sign * term
    angle = x - (order / 2 + 0.25) * np.pi
    scale = jnp.sqrt(2 / (np.pi * x))
    first = scale * (even * jnp.cos(angle) - odd * jnp.sin(angle))
    return first, scale * (even * jnp.sin(angle) + odd * jnp.cos(angle))


def _bessel_j(order: int, x: Array) -> Array:
    wide = x.astype(jnp.float64)
    size = jnp.abs(wide)
    near = _series(jnp.minimum(size, _NEAR), order)[0]
    far = _asymptotic(jnp.maximum(size, _NEAR), order)[0]
    result = jnp.where(size < _NEAR, near, far)
    return result * jnp.sign(wide) if order % 2 else result


def _bessel_y(order: int, x: Array) -> Array:
    wide = x.astype(jnp.float64)
    small = jnp.clip(wide, jnp.finfo(jnp.float64).tiny, _NEAR)
    first, rest = _series(small, order)
    pole = 2 / small if order == 1 else 0.0
    near = (2 * jnp.log(small / 2) * first - rest - pole) / np.pi
    far = _asymptotic(jnp.maximum(wide, _NEAR), order)[1]
    result = jnp.where(wide < _NEAR, near, far)
    return jnp.where(wide == 0, -jnp.inf, jnp.where(wide < 0, jnp.nan, result))


def _bessel_k(order: int, scaled: bool, x: Array) -> Array:
    wide = x.astype(jnp.float64)
    positive = jnp.where(wide > 0, wide, 1.0)
    step, count = 0.05, 200

    def add(k: Array, total: Array) -> Array:
        # cosh(t) - 1, without the loss of digits near zero.
        rise = 2 * jnp.sinh(k * step / 2) ** 2
        return total + jnp.exp(-positive * rise) * jnp.cosh(order * k * step)

    total = lax.fori_loop(1, count, add, 0.5 * jnp.ones_like(positive))
    # Where the integrand is narrower than a few steps, the first terms of the asymptotic expansion.
    mu = 4.0 * order * order
    factor = 1 + (mu - 1) / (8 * positive) * (1 + (mu - 9) / (16 * positive) * (1 + (mu - 25) / (24 * positive)))
    result = jnp.where(positive < _WIDE, total * step, jnp.sqrt(np.pi / (2 * positive)) * factor)
    result = result if scaled else result * jnp.exp(-positive)
    # The integral runs out of range near zero, where the leading term is enough.
    tiny = -jnp.log(positive / 2) - _EULER if order == 0 else 1 / positive
    result = jnp.where(positive < 1e-6, tiny, result)
    return jnp.where(wide == 0, jnp.inf, jnp.where(wide < 0, jnp.nan, result))


add_rules(lambda x: jnp.sinc(widen(x) / np.pi), ["special_spherical_bessel_j0"])
for _order in (0, 1):
    add_rules(partial(_bessel_j, _order), [f"special_bessel_j{_order}"])
    add_rules(partial(_bessel_y, _order), [f"special_bessel_y{_order}"])
    add_rules(partial(_bessel_k, _order, False), [f"special_modified_bessel_k{_order}"])
    add_rules(partial(_bessel_k, _order, True), [f"special_scaled_modified_bessel_k{_order}"])


# How a polynomial of order n + 1 follows from those of order n and n - 1: (n, x, p_n, p_(n-1)).
_Recurrence = Callable[[Array, Array, Array, Array], Array]
# The result so far, and the polynomials of the last two orders.
_State = tuple[Array, Array, Array]
# The polynomial of order 1.
_First = Callable[[Array], Array]


def _polynomial(first: _First, recurrence: _Recurrence, shifted: bool = False) -> Callable[[Operand, Operand], Array]:
    def run(x: Operand, order: Operand) -> Array:
        place, wanted = jnp.broadcast_arrays(*promote_float(x, order))
        wanted = jnp.trunc(wanted)
        place = 2 * place - 1 if shifted else place
        before, here = jnp.ones_like(place), first(place)
        result = jnp.where(wanted < 0, 0.0, jnp.where(wanted == 0, before, here)).astype(place.dtype)

        def step(n: Array, state: _State) -> _State:
            result, here, before = state
            after = recurrence(n.astype(place.dtype), place, here, before)
            return jnp.where(wanted == n + 1, after, result), after, here

        # As many steps as the highest order asks for.
        last = jnp.max(wanted, initial=1).astype(jnp.int64)
        return lax.fori_loop(1, last, step, (result, here, before))[0]

    return run


def _chebyshev(n: Array, x: Array, here: Array, before: Array) -> Array:
    return 2 * x * here - before


# The polynomial of order 1, and the recurrence.
_POLYNOMIALS: dict[str, tuple[_First, _Recurrence]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev),
    "hermite_polynomial_h": (lambda x: 2 * x, lambda n, x, here, old: 2 * x * here - 2 * n * old),
    "hermite_polynomial_he": (lambda x: x, lambda n, x, here, old: x * here - n * old),
    "laguerre_polynomial_l": (lambda x: 1 - x, lambda n, x, here, old: ((2 * n + 1 - x) * here - n * old) / (n + 1)),
    "legendre_polynomial_p": (lambda x: x, lambda n, x, here, old: ((2 * n + 1) * x * here - n * old) / (n + 1)),
}
for _name, _parts in _POLYNOMIALS.items():
    for _prefix in ("special_", "special_shifted_") if "chebyshev" in _name else ("special_",):
        _overloads = [f"{_prefix}{_name}.{overload}" for overload in ("default", "x_scalar", "n_scalar")]
        add_rules(_polynomial(*_parts, shifted="shifted" in _prefix), _overloads)


@rule("special_zeta", "special_zeta.self_scalar", "special_zeta.other_scalar")
def zeta(s: Operand, q: Operand) -> Array:
    """Hurwitz' zeta function."""
    exponent, start = jnp.broadcast_arrays(*promote_float(s, q))
    return _zeta(exponent, start)


def _zeta(s: Array, q: Array) -> Array:
    """JAX's zeta function, and left of zero the terms of the series that lead there."""

    def left(state: tuple[Array, Array]) -> Array:
        return jnp.any((state[1] <= 0) & (state[1] > -1e4))

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        total, place = state
        return jnp.where(place <= 0, total + place**-s, total), jnp.where(place <= 0, place + 1, place)

    extra, place = lax.while_loop(left, step, (jnp.zeros_like(q), q))
    defined = (q > 0) | (s == jnp.floor(s))
    pole = (q <= 0) & (q == jnp.floor(q))
    result = jnp.where(defined, jnp.where(pole, jnp.inf, extra + lax.zeta(s, place)), jnp.nan)
    return jnp.where(s == 1, jnp.inf, jnp.where(s < 1, jnp.nan, result))


@rule("digamma")
def digamma(x: Array) -> Array:
    """The derivative of the logarithm of the gamma function; infinite at zero."""
    wide = widen(x)
    return jnp.where(wide == 0, -jnp.copysign(jnp.inf, wide), jax.scipy.special.digamma(wide))


@rule("polygamma")
def polygamma(order: int, x: Array) -> Array:
    """The derivative of this order of the digamma function."""
    wide = widen(x)
    if order == 0:
        return digamma(wide)
    if order == 1:
        # Reflection: the series behind zeta() wants positive arguments.
        mirrored = jnp.where(wide < 0.5, 1 - wide, wide)
        sine = jnp.sin(np.pi * wide)
        plain = lax.zeta(jnp.full_like(wide, 2.0), mirrored)
        return jnp.where(wide < 0.5, np.pi**2 / jnp.square(sine) - plain, plain)
    sign = 1.0 if order % 2 else -1.0
    factorial = jnp.exp(lax.lgamma(jnp.asarray(order + 1.0, wide.dtype)))
    return sign * factorial * _zeta(jnp.full_like(wide, order + 1.0), wide)
