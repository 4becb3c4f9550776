"""The symbols of a program as PyTorch's symbolic integers, with the guards that PyTorch finds while it computes.

Owns the way from expressions in text to symbolic integers and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_ltc.errors import CompileError
from torch_ltc.lowering.program_builder import hint_of
from torch_ltc.program.instruction import Integer, Size, Symbol, SymbolicShape
from torch_ltc.program.specialization import evaluated
from torch_ltc.pytorch.private import symbolic_function
from torch_ltc.pytorch.symbolic import ConstantSource, DimDynamic, PythonPrinter, ShapeEnv

_ROUNDING = frozenset({"floor", "ceil", "trunc"})


class _Math:
    """The functions of `math` for symbolic numbers. Those that round know them by themselves."""

    def __getattr__(self, name: str) -> Any:
        return getattr(math, name) if name in _ROUNDING else symbolic_function(name)


# What the text of expressions calls, for symbolic numbers.
SYMBOLIC_FUNCTIONS: dict[str, Any] = {
    "max": torch.sym_max,
    "min": torch.sym_min,
    "int": torch.sym_int,
    "float": torch.sym_float,
    "math": _Math(),
}


class _Printer(PythonPrinter):
    """Prints symbols under the names that the program has for them, and functions under those that expressions are
    evaluated with: PyTorch's text names functions of `torch`."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, expression: Any) -> str:
        return self._names[str(expression.name)]

    def _print_ToFloat(self, expression: Any) -> str:
        return f"float({self._print(expression.args[0])})"

    def _helper_sqrt(self, expression: Any) -> str:
        return f"math.sqrt({self._print(expression)})"


class SymbolicSizes:
    """The symbols of one program, in a shape environment of their own."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        # Two symbols with one value in this program are still two.
        self.env: Any = ShapeEnv(duck_shape=False)
        self.integers: dict[str, Any] = {}
        names: dict[str, str] = {}
        self._lengths = [symbol.name for symbol in symbols if symbol.length]
        for symbol in symbols:
            source = ConstantSource(f"torch_ltc_{symbol.name}")
            made = self.env.create_symbol(
                symbol.hint,
                source,
                dynamic_dim=DimDynamic.DYNAMIC,
                constraint_dim=None,
                positive=True if symbol.length else None,
                do_not_specialize_zero_one=not symbol.length,
            )
            names[made.name] = symbol.name
            self.integers[symbol.name] = self.env.create_symintnode(made, hint=symbol.hint, source=source)
        self._printer = _Printer(names)

    def integer(self, value: Integer) -> Any:
        """The symbolic integer of an expression, or the constant."""
        if not isinstance(value, Size):
            return value
        return evaluated(value.expression, {**SYMBOLIC_FUNCTIONS, **self.integers})

    def all(self, values: Iterable[Integer]) -> tuple[Any, ...]:
        """The symbolic integers of several expressions."""
        return tuple([self.integer(value) for value in values])

    def operand(self, value: Any) -> Any:
        """The expression behind a symbolic integer; anything else as it is."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        expression = value.node.expr
        hint: Any = hint_of(value)
        if not expression.free_symbols:
            return hint
        if isinstance(value, torch.SymBool):
            raise CompileError(f"a condition on sizes, {expression}, is an argument")
        return Size(self._text(expression), hint)

    def _text(self, expression: Any) -> str:
        try:
            return str(self._printer.doprint(expression))
        except KeyError as error:
            raise CompileError(f"{expression} is no expression over sizes of inputs") from error

    def shape(self, tensor: torch.Tensor) -> SymbolicShape | None:
        """The shape of a tensor if it depends on symbols."""
        shape = SymbolicShape(
            tuple([self.operand(n) for n in tensor.size()]),
            tuple([self.operand(n) for n in tensor.stride()]),
            self.operand(tensor.storage_offset()),
        )
        parts = (*shape.size, *shape.stride, shape.offset)
        return shape if any(isinstance(part, Size) for part in parts) else None

    def guards(self) -> tuple[str, ...]:
        """Conditions on the symbols under which what was computed with them is right."""
        found = [f"{name} >= 2" for name in self._lengths]
        found += [self._text(guard.expr) for guard in self.env.guards if guard.expr.free_symbols]
        return tuple(dict.fromkeys(found))
