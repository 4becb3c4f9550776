"""Operands meet in the dtype in which PyTorch computes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from torch_ltc.backends.xla.promotion import DTYPES, all_bits, cast, jax_dtype, promote, result_dtype
from torch_ltc.errors import CompileError

OPERANDS: dict[str, tuple[Any, Any]] = {
    **{
        f"{dtype}[{size}]": (torch.ones(size, dtype=dtype), lambda d=dtype, s=size: jnp.ones(s, jax_dtype(d)))
        for dtype in (torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64)
        for size in ((2,), ())
    },
    "complex64[(2,)]": (torch.ones(2, dtype=torch.complex64), lambda: jnp.ones(2, jnp.complex64)),
    "True": (True, lambda: True),
    "2": (2, lambda: 2),
    "2.5": (2.5, lambda: 2.5),
    "1j": (1j, lambda: 1j),
}


@pytest.mark.parametrize(("first", "second"), itertools.product(OPERANDS, OPERANDS))
def test_two_operands_promote_as_in_pytorch(first: str, second: str) -> None:
    with all_bits():
        expected = jax_dtype(torch.result_type(OPERANDS[first][0], OPERANDS[second][0]))
        assert result_dtype(OPERANDS[first][1](), OPERANDS[second][1]()) == expected


def test_a_number_that_jax_traces_counts_as_a_number() -> None:
    with all_bits():
        (made,) = jax.jit(lambda x, number: promote(x, number)[:1])(jnp.ones(2, jnp.float32), 2.5)
    assert made.dtype == jnp.float32


def test_complex_to_real_drops_the_imaginary_part() -> None:
    assert cast(jnp.asarray([1 + 2j, 3j]), jnp.float32).tolist() == [1.0, 0.0]
    assert cast(jnp.asarray([0j, 3j]), jnp.bool_).tolist() == [False, True]


def test_every_dtype_has_its_name_in_jax() -> None:
    with all_bits():
        for dtype in DTYPES:
            assert jnp.zeros((), jax_dtype(dtype)).dtype.name == str(dtype).removeprefix("torch.")


def test_a_dtype_that_jax_lacks_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="complex32"):
        jax_dtype(torch.complex32)


def test_64_bits_are_for_the_block_only() -> None:
    with all_bits():
        assert jnp.arange(2).dtype == jnp.int64
    assert jnp.arange(2).dtype == jnp.int32
