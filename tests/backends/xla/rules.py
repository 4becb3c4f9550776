"""Running one rule by itself, and comparing it with PyTorch's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.support.backends import record
from torch_ltc.backends.xla import XlaBackend
from torch_ltc.backends.xla.data import array_of
from torch_ltc.backends.xla.executable import Executable
from torch_ltc.backends.xla.promotion import all_bits, cast, jax_dtype
from torch_ltc.backends.xla.rules_memory import memory_of
from torch_ltc.backends.xla.table import RULES, Wants, overload
from torch_ltc.lowering.lower import functional_form
from torch_ltc.program.instruction import Program
from torch_ltc.program.spec import Spec, make_spec, spec_of


def contiguous(tensor: Tensor) -> Spec:
    return make_spec(tensor.dtype, tuple(tensor.size()), tuple(tensor.contiguous().stride()))


def functional(function: Callable[..., object], *tensors: Tensor) -> Program:
    """The functional program of a function on tensors of the device. What it returns are the outputs."""
    program, numbers = record(function, *tensors)
    return functional_form(XlaBackend(), program, numbers, set()).program


def run_decomposed(name: str, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The results of an operator without a rule, by the rules of what it is decomposed into."""
    op = overload(name)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def call(*moved: Tensor) -> object:
        rest = iter(moved)
        given, named = pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in leaves], tree)
        return op(*given, **named)

    return [result.tensor() for result in Executable(functional(call, *tensors))(*tensors)]


def run_rule(name: str, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """The rule's results as tensors, in its own dtypes."""
    op = overload(name)
    assert op is not None, name
    rule = RULES[op]
    leaves, tree = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    first = leaves[places[0]] if places else None

    def path_values(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        given, named = pytree.tree_unflatten(filled, tree)
        if rule.wants is Wants.SPEC:
            named["spec"] = spec_of(first)
        if rule.wants is Wants.MEMORY:
            given = (memory_of(given[0], contiguous(first), spec_of(first)), *given[1:])
        return rule.function(*given, **named)

    with all_bits():
        arrays = [array_of(leaves[i], contiguous(leaves[i])) for i in places]
        results = jax.jit(path_values)(*arrays)
        flat = results if isinstance(results, (tuple, list)) else [results]
        return [None if each is None else torch.from_dlpack(each) for each in flat]


def assert_as_eager(name: str, *args: Any, tolerance: float = 1e-5, **kwargs: Any) -> None:
    """The rule, or the decomposition, gives what the kernel gives, in the kernel's dtype."""
    op = overload(name)
    assert op is not None, name
    expected = op(*args, **kwargs)
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    actual = run_rule(name, *args, **kwargs) if op in RULES else run_decomposed(name, *args, **kwargs)
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is None or wanted is None:
            continue
        with all_bits():
            got = torch.from_dlpack(cast(array_of(got, spec_of(got)), jax_dtype(wanted.dtype)))
        torch.testing.assert_close(got, wanted.detach().resolve_conj(), rtol=tolerance, atol=tolerance, equal_nan=True)
