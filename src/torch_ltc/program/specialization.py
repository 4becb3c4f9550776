"""The choice of the integers of a symbolic key that are constants of compiled code, and of those that are symbols.

Owns the choice, made from the values that were seen, and the evaluation of expressions over symbols. Expressions are
Python text: they are printed, compared, kept in files, and evaluated with integers or with PyTorch's symbolic ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch_ltc.program.instruction import Integer, Size, Symbol

# What a slot becomes: a constant, an expression over symbols, or None where any value will do.
Slot = int | str | None
Values = tuple[int, ...]

# Of how many known expressions a new one is sought as a multiple or a product.
_MOST_TRIED = 16
# What expressions may use besides the symbols and operators.
NAMES: dict[str, Any] = {"max": max, "min": min, "math": math, "abs": abs, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Specialization:
    """A constant or an expression for each slot of a symbolic key, and the symbols of the expressions; `places` are
    their slots."""

    slots: tuple[Slot, ...]
    symbols: tuple[Symbol, ...] = ()
    places: tuple[int, ...] = ()

    def values_of(self, values: Values) -> Values:
        """The values of the symbols in a program with these integers."""
        return tuple([values[place] for place in self.places])

    def mismatches(self, values: Values) -> list[int]:
        """The slots in which a program with these integers differs."""
        wrong = [slot for slot, what in enumerate(self.slots) if type(what) is int and values[slot] != what]
        slots = [slot for slot, what in enumerate(self.slots) if type(what) is str]
        texts = tuple([what for what in self.slots if type(what) is str])
        found = evaluator(self.names, texts)(*self.values_of(values)) if texts else ()
        return wrong + [slot for slot, value in zip(slots, found, strict=True) if values[slot] != value]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the symbols."""
        return tuple([symbol.name for symbol in self.symbols])


@lru_cache(maxsize=512)
def evaluator(names: tuple[str, ...], expressions: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    """A function of the symbols that gives the value of each expression."""
    body = "".join(f"({text})," for text in expressions)
    function: Callable[..., tuple[Any, ...]] = eval(f"lambda {','.join(names)}: ({body})", dict(NAMES))
    return function


def evaluated(expression: str, symbols: Mapping[str, Any]) -> Any:
    """The value of one expression, with anything for symbols that has arithmetic."""
    return eval(_code(expression), {**NAMES, **symbols})


def known_sizes(sizes: Sequence[Integer], symbols: Mapping[str, int]) -> Values:
    """Sizes with these values of the symbols."""
    return tuple([evaluated(n.expression, symbols) if isinstance(n, Size) else n for n in sizes])


@lru_cache(maxsize=4_096)
def _code(expression: str) -> Any:
    return compile(expression, "<size>", "eval")


def separate_symbols(seen: Sequence[Values], free: Sequence[bool]) -> Specialization:
    """A specialization in which each integer that differs is a symbol of its own; those in `free` slots may be any.
    `seen` ends with the integers of the program to be compiled."""
    slots: list[Slot] = []
    symbols: list[Symbol] = []
    places: list[int] = []
    for place, (column, any_value) in enumerate(zip(zip(*seen, strict=True), free, strict=True)):
        if any_value:
            slots.append(None)
        elif column.count(column[-1]) == len(column):
            slots.append(column[-1])
        else:
            symbols.append(Symbol(f"s{len(symbols)}", column[-1], False))
            places.append(place)
            slots.append(symbols[-1].name)
    return Specialization(tuple(slots), tuple(symbols), tuple(places))


def shared_symbols(seen: Sequence[Values], lengths: Sequence[bool]) -> Specialization:
    """A specialization with few symbols: integers that were always equal are one symbol, and one that was always the
    multiple, the sum with a constant, or the product of others is an expression. `lengths` marks sizes and strides of
    inputs."""
    return _Chooser(len(seen)).choose(seen, lengths)


class _Chooser:
    """Holds the columns, each the values of one slot in all programs seen, that have an expression already."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._known: dict[Values, str] = {}
        self._symbols: list[tuple[str, Values]] = []

    def choose(self, seen: Sequence[Values], lengths: Sequence[bool]) -> Specialization:
        """The specialization."""
        slots: list[Slot] = []
        places: dict[str, int] = {}
        measured: set[str] = set()
        for place, (column, length) in enumerate(zip(zip(*seen, strict=True), lengths, strict=True)):
            if column.count(column[-1]) == self._count:
                slots.append(column[-1])
                continue
            text = self._known.get(column)
            if text is None:
                text = self._known[column] = self._derived(column) or self._symbol(column)
            slots.append(text)
            places.setdefault(text, place)
            if length:
                measured.add(text)
        symbols = tuple(Symbol(name, column[-1], name in measured) for name, column in self._symbols)
        return Specialization(tuple(slots), symbols, tuple(places[name] for name, _ in self._symbols))

    def _symbol(self, column: Values) -> str:
        name = f"s{len(self._symbols)}"
        self._symbols.append((name, column))
        return name

    def _derived(self, column: Values) -> str | None:
        known = list(self._known.items())[:_MOST_TRIED]
        for other, text in known:
            factor = _factor(column, other)
            if factor is not None:
                return f"{factor}*({text})"
        for name, other in self._symbols[:_MOST_TRIED]:
            distance = column[0] - other[0]
            if all(a - b == distance for a, b in zip(column, other, strict=True)):
                return f"{name} + {distance}" if distance > 0 else f"{name} - {-distance}"
        for place, (first, text) in enumerate(known):
            for second, other_text in known[place:]:
                product = tuple([a * b for a, b in zip(first, second, strict=True)])
                factor = _factor(column, product)
                if factor is not None:
                    return f"{factor}*({text})*({other_text})"
        return None


def _factor(column: Values, other: Values) -> int | None:
    """The positive integer that the one is a multiple of the other by, everywhere."""
    if 0 in other or column[0] % other[0]:
        return None
    factor = column[0] // other[0]
    return factor if factor > 0 and all(a == factor * b for a, b in zip(column, other, strict=True)) else None
