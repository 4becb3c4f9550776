"""Cuts a program into segments: runs of calls that become one TorchScript function each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch_ltc.lowering.gil import yield_gil
from torch_ltc.program.instruction import Call, Program, Scalar, Size

# TorchScript's compiler recurses along chains of calls, some 150 bytes of stack for each.
SEGMENT_CALLS = 1_000


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of calls that becomes one function, or one call that TorchScript lacks and that is run as it is (`direct`):
    which values, numbers and symbols it takes, and which values it gives."""

    program: Program
    calls: tuple[Call, ...]
    # The place of the first call among those of the program.
    start: int
    takes: tuple[int, ...]
    scalars: tuple[int, ...]
    symbols: tuple[int, ...]
    gives: tuple[int, ...]
    # Values that nothing after this segment needs.
    dead: tuple[int, ...]
    random: bool
    direct: bool
    # Of the values it takes those that no one else holds: it frees each after its last use. And the others.
    moved: tuple[int, ...]
    kept: tuple[int, ...]


def split(program: Program, direct: set[int]) -> list[Segment]:
    """The program in segments short enough for TorchScript, which recurses along chains of calls; calls whose identity
    is in `direct` stand alone."""
    needed = set(program.outputs)
    given = {instruction.number for instruction in program.inputs}
    places = {symbol.name: place for place, symbol in enumerate(program.symbols)}
    start = len(program.calls)
    segments: list[Segment] = []
    for chunk in reversed(_chunks(program.calls, direct)):
        made = {n for call in chunk for n in call.numbers if n >= 0}
        used = {n for call in chunk for n in call.operands}
        slots = tuple(sorted({s.slot for call in chunk for s in scalars_of(call)}))
        symbols = tuple(sorted({places[s.expression] for call in chunk for s in _items(call) if isinstance(s, Size)}))
        start -= len(chunk)
        yield_gil()
        takes = tuple(sorted(used - made))
        # An output may also be a value that came in from outside.
        gives = tuple(n for n in sorted(needed) if n in made)
        dead = tuple(n for n in takes if n not in needed)
        random = any(call.random for call in chunk)
        alone = bool(chunk) and id(chunk[0]) in direct
        moved = () if alone else tuple(n for n in dead if n not in given)
        kept = tuple(n for n in takes if n not in moved)
        segments.append(
            Segment(program, tuple(chunk), start, takes, slots, symbols, gives, dead, random, alone, moved, kept)
        )
        needed = (needed - made) | set(takes)
    segments.reverse()
    return segments


def _chunks(calls: list[Call], direct: set[int]) -> list[list[Call]]:
    chunks: list[list[Call]] = [[]]
    for call in calls:
        alone = id(call) in direct
        if chunks[-1] and (alone or id(chunks[-1][0]) in direct or len(chunks[-1]) >= SEGMENT_CALLS):
            chunks.append([])
        chunks[-1].append(call)
    return chunks


def scalars_of(call: Call) -> Iterator[Scalar]:
    """The run-time numbers among the call's arguments, lists opened."""
    return (item for item in _items(call) if isinstance(item, Scalar))


def _items(call: Call) -> Iterator[object]:
    """The call's arguments, lists opened."""
    for operand in (*call.args, *call.kwargs.values()):
        if isinstance(operand, tuple):
            yield from operand
        else:
            yield operand
