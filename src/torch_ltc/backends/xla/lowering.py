"""A functional program as a function of JAX arrays, call by call through the table of rules.

The function is what JAX traces: everything here runs once per compilation, not once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from torch_ltc.backends.xla import (  # each fills the table  # noqa: F401
    rules_distances,
    rules_indexing,
    rules_linalg,
    rules_matmul,
    rules_pointwise,
    rules_pooling,
    rules_reductions,
    rules_resampling,
    rules_shape,
    rules_special,
)
from torch_ltc.backends.xla.checks import CHECKS
from torch_ltc.backends.xla.promotion import DTYPES, cast, jax_dtype
from torch_ltc.backends.xla.rules_memory import memory_of
from torch_ltc.backends.xla.table import RULES, Wants
from torch_ltc.errors import CompileError
from torch_ltc.program.instruction import Call, Program, Value
from torch_ltc.program.spec import Spec


def has_rule(call: Call) -> bool:
    """True when the call's operator has a rule and all its results have dtypes that JAX knows."""
    known = all(item.spec is None or item.spec.dtype in DTYPES for item in call.flat_returns)
    return known and call.op in RULES


class Lowering:
    """A program as a function of arrays."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._specs = program.specs()
        self._owners = _memory_owners(program)

    def run(self, *given: Array) -> tuple[list[Array], Array | None]:
        """From one array per input, then one per number, to the results and whether a call would fail in eager; None
        if no call can. This is what JAX traces."""
        program = self._program
        numbers = [i.number for i in program.inputs] + [i.number for i in program.numbers]
        values: dict[int, Array] = dict(zip(numbers, given, strict=True))
        failures: list[Array] = []
        for call in program.calls:
            try:
                self._run_call(call, values, failures)
            except Exception as error:
                reason = str(error).strip().split("\n")[0]
                raise CompileError(
                    f"the rule of {call.name} failed: {type(error).__name__}: {reason}", source=str(call.source)
                ) from error
        failed = jnp.any(jnp.stack(failures)) if failures else None
        return [values[number] for number in program.results], failed

    def _run_call(self, call: Call, values: dict[int, Array], failures: list[Array]) -> None:
        rule = RULES[call.op]
        args = [_filled(operand, values) for operand in call.args]
        kwargs = {name: _filled(operand, values) for name, operand in call.kwargs.items()}
        if rule.wants is Wants.MEMORY:
            number = call.operands[0]
            owner = self._owners.get(number, number)
            args[0] = memory_of(values[owner], self._specs[owner], self._specs[number])
        elif rule.wants is Wants.SPEC:
            kwargs["spec"] = self._specs[call.operands[0]]
        check = CHECKS.get(call.op)
        failure = None if check is None else check(*args, **kwargs)
        if failure is not None:
            failures.append(failure)
        results = rule.function(*args, **kwargs)
        flat = _flattened(results, call)
        for item, number, result in zip(call.flat_returns, call.numbers, flat, strict=True):
            if number >= 0:
                assert item.spec is not None
                values[number] = _checked(result, item.spec)


def _filled(operand: object, values: dict[int, Array]) -> Any:
    if isinstance(operand, Value):
        return values[operand.number]
    if isinstance(operand, tuple):
        return [_filled(item, values) for item in operand]
    return operand


def _flattened(results: Any, call: Call) -> list[Any]:
    parts: Sequence[Any] = results if len(call.returns) > 1 else (results,)
    flat: list[Any] = []
    for declared, part in zip(call.returns, parts, strict=True):
        if isinstance(declared, tuple):
            flat.extend(part)
        else:
            flat.append(part)
    return flat


def _checked(result: Any, spec: Spec) -> Array:
    array = cast(result, jax_dtype(spec.dtype))
    if array.shape != spec.size:
        raise ValueError(f"gives the shape {array.shape} where {spec.size} was recorded")
    return array


def _memory_owners(program: Program) -> dict[int, int]:
    """For each view the value in whose memory it lies."""
    owners: dict[int, int] = {}
    for call in program.calls:
        aliased = [returned.alias_info is not None for returned in call.op._schema.returns]
        if any(aliased) and call.operands:
            source = call.operands[0]
            owners.update({number: owners.get(source, source) for number in call.numbers if number >= 0})
    return owners
