"""Dtypes: PyTorch's names in JAX's, and PyTorch's type promotion on JAX arrays.

JAX promotes in another way than PyTorch: it does not rank tensors with dimensions above those without, and it sends
integers to float64 where PyTorch takes float32. Rules bring their operands to one dtype here before they compute.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from torch_ltc.errors import CompileError

Operand: TypeAlias = Array | bool | int | float | complex

_NAMES = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
DTYPES: dict[torch.dtype, Any] = {getattr(torch, name): getattr(jnp, name) for name in _NAMES.split()}
DTYPES[torch.bool] = jnp.bool_

_PYTHON_DTYPES = {bool: jnp.bool_, int: jnp.int64, float: jnp.float32, complex: jnp.complex64}


def all_bits() -> AbstractContextManager[None]:
    """While the block runs, JAX has 64-bit types, as PyTorch has. The rest of the process keeps its own setting."""
    # The name that came first has gone from later versions.
    home: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    context: AbstractContextManager[None] = home.enable_x64(True)
    return context


def jax_dtype(dtype: torch.dtype) -> Any:
    """JAX's dtype of the same name."""
    if dtype not in DTYPES:
        raise CompileError(f"JAX has no dtype like {dtype}")
    return np.dtype(DTYPES[dtype])


def category(dtype: Any) -> int:
    """0 bool, 1 integer, 2 floating, 3 complex: what decides promotion first."""
    if dtype == jnp.bool_:
        return 0
    if jnp.issubdtype(dtype, jnp.integer):
        return 1
    return 3 if jnp.issubdtype(dtype, jnp.complexfloating) else 2


def is_floating(x: Array) -> bool:
    """True for real floating-point arrays."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def is_complex(x: Array) -> bool:
    """True for complex arrays."""
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def _rank(operand: Operand) -> int:
    """2 for arrays with dimensions, 1 for arrays without, 0 for numbers (JAX calls them weakly typed)."""
    if not isinstance(operand, Array):
        return 0
    return 2 if operand.ndim else 0 if operand.aval.weak_type else 1


def _dtype_of(operand: Operand) -> Any:
    if isinstance(operand, Array):
        return operand.dtype
    return np.dtype(_PYTHON_DTYPES[type(operand)])


def result_dtype(*operands: Operand) -> Any:
    """The dtype in which PyTorch computes an elementwise operator on these operands."""
    result: Any = None
    for rank in (2, 1, 0):
        dtypes = [_dtype_of(x) for x in operands if _rank(x) == rank]
        if not dtypes:
            continue
        here = functools.reduce(jnp.promote_types, dtypes)
        if result is None:
            result = here
        elif category(here) > category(result):
            # A number, or a tensor without dimensions, changes the kind of the result but not its width.
            result = _of_kind(here, result)
    return result


def _of_kind(kind: Any, width: Any) -> Any:
    if category(kind) == 3 and category(width) == 2:
        return np.dtype(jnp.complex128 if width == jnp.float64 else jnp.complex64)
    return kind


def promote(*operands: Operand) -> list[Array]:
    """The operands as arrays of the one dtype in which PyTorch would compute."""
    dtype = result_dtype(*operands)
    return [cast(x, dtype) for x in operands]


def promote_wide(*operands: Operand) -> list[Array]:
    """As `promote`, half precision widened: arithmetic of half-precision tensors with numbers is done in float32."""
    dtype = result_dtype(*operands)
    if category(dtype) != 2 or dtype.itemsize != 2:
        return [cast(x, dtype) for x in operands]
    return [cast(cast(x, dtype) if _rank(x) else x, jnp.float32) for x in operands]


def promote_float(*operands: Operand) -> list[Array]:
    """As `promote`, integers made floating point and half precision widened: what transcendental functions want."""
    return [widen(x) for x in promote_wide(*operands)]


def cast(x: Operand, dtype: Any) -> Array:
    """The operand as an array of this dtype. Complex to real drops the imaginary part, as PyTorch does."""
    array = jnp.asarray(x)
    if category(array.dtype) == 3 and category(dtype) < 3:
        array = (array != 0) if dtype == jnp.bool_ else jnp.real(array)
    return jax.lax.convert_element_type(array, dtype)


def widen(x: Array) -> Array:
    """Half precision as float32 and integers as floating point: the dtype in which PyTorch's kernels compute."""
    kind = category(x.dtype)
    if kind <= 1:
        return x.astype(jnp.float64 if x.dtype.itemsize > 2 else jnp.float32)
    if kind == 2 and x.dtype.itemsize == 2:
        return x.astype(jnp.float32)
    return x


def to_torch_dtype(x: Array, dtype: torch.dtype | None) -> Array:
    """The array cast to PyTorch's dtype; as it is when None."""
    return x if dtype is None else cast(x, jax_dtype(dtype))
