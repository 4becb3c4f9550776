"""The calls of a program as C++ runs them: with PyTorch's kernels, one after the other, without the GIL.

Only a program whose calls have run before is taken: it is known then how their results lie in memory. A call that C++
does not take is left to the caller, and so is one that fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.lowering.interface import Arguments
from torch_ltc.lowering.kernel_call import fill
from torch_ltc.native.library import extension
from torch_ltc.program.instruction import Call, DeviceGenerator, PhysicalDevice, Program, Scalar, Size, Value

__all__ = ["NativeCalls", "native_calls"]

# Kinds of operands, as native/interpreter.cpp has them.
_CONSTANT, _DEFAULT, _TENSOR, _TENSORS, _VARYING = range(5)
_VARYING_CLASSES = (Scalar, DeviceGenerator, PhysicalDevice)
_NO_VALUE = -1
_SINGLE = -1
# Kernels of others may be Python, and look at what calls them.
_NAMESPACES = frozenset({"aten", "prims"})
# Each time that a call is left to Python, all values go there and back.
_MOST_FOREIGN = 4


class NativeCalls:
    """The calls of one program, in C++."""

    def __init__(self, program: Program, prepared: Any, varying: list[object]) -> None:
        self._calls = program.calls
        self._prepared = prepared
        # Operands that are filled in at each run.
        self._varying = varying

    def run(self, values: list[Any], arguments: Arguments, begin: int) -> tuple[int, Exception | None]:
        """Run the calls from `begin` on, with the tensors of `values` by number: the index of the first that is left,
        and its error if it has failed. `values` then has the outputs, or all that is alive where a call is left."""
        given = [fill(operand, _no_value, arguments) for operand in self._varying]
        index, error, told = self._prepared.run(values, given, begin)
        for number, text, deprecated in told:
            _warn(self._calls[number], text, DeprecationWarning if deprecated else UserWarning)
        return index, error


def native_calls(program: Program, dead: Sequence[Sequence[int]]) -> NativeCalls | None:
    """The calls of a program that has run; None where it is better left to Python. `dead` are the values that end with
    each call."""
    if extension is None:
        return None
    prepared = extension.NativeCalls(list(program.outputs))
    varying: list[object] = []
    foreign = 0
    for call, ended in zip(program.calls, dead, strict=True):
        if not _add(prepared, call, ended, varying):
            prepared.add_foreign()
            foreign += 1
            if foreign > _MOST_FOREIGN:
                return None
    return NativeCalls(program, prepared, varying) if foreign < len(program.calls) else None


def _add(prepared: Any, call: Call, dead: Sequence[int], varying: list[object]) -> bool:
    """Give a call to C++, with the operands that vary; False when it does not take the call."""
    if call.layout.copied != () or call.op.namespace not in _NAMESPACES:
        return False
    schema = call.op._schema
    given = dict(zip((argument.name for argument in schema.arguments), call.args, strict=False)) | call.kwargs
    operands: list[tuple[int, object]] = []
    filled: list[object] = []
    for argument in schema.arguments:
        operand = _operand(given[argument.name]) if argument.name in given else (_DEFAULT, None)
        if operand is None:
            return False
        if operand[0] == _VARYING:
            filled.append(given[argument.name])
        operands.append(operand)
    returns = [len(item) if isinstance(item, tuple) else _SINGLE for item in call.returns]
    try:
        prepared.add(schema.name, schema.overload_name, operands, returns, list(call.numbers), list(dead))
    except Exception:
        # Something that the dispatcher has another form for.
        return False
    varying += filled
    return True


def _operand(operand: Any) -> tuple[int, object] | None:
    """The kind of an operand and what is known of it; None for one that C++ does not take."""
    if isinstance(operand, Value):
        return _TENSOR, operand.number
    if isinstance(operand, _VARYING_CLASSES):
        return _VARYING, None
    if isinstance(operand, (Size, torch.Tensor)):
        return None
    if not isinstance(operand, tuple):
        return _CONSTANT, operand
    if any(isinstance(item, Value) for item in operand):
        if all(item is None or isinstance(item, Value) for item in operand):
            return _TENSORS, [_NO_VALUE if item is None else item.number for item in operand]
        return None
    kinds = [_operand(item) for item in operand]
    if None in kinds:
        return None
    if any(kind is not None and kind[0] == _VARYING for kind in kinds):
        return _VARYING, None
    return (_CONSTANT, list(operand)) if all(kind is not None and kind[0] == _CONSTANT for kind in kinds) else None


def _no_value(number: int) -> Any:
    raise AssertionError(f"an operand that varies has value {number}")


def _warn(call: Call, text: str, category: type[Warning]) -> None:
    """Warn as the call would have. Whoever keeps warnings finds it in this frame."""
    warnings.warn(text, category, stacklevel=1)
