"""Differences of two programs, line by line, whatever numbers their values have.

A call more shifts the numbers of all values after it, so lines are aligned on what they do, and numbers are compared
through the values that they stand for in both programs. It works on listings: saved programs can be compared, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache

from torch_ltc.program.instruction import Program
from torch_ltc.program.text import Sources, program_lines, source_text
from torch_ltc.source import Source

__all__ = ["Difference", "Listing", "Row", "difference", "difference_text", "distinct_changes"]

# Lines with their sources, as `program_lines` gives them.
Listing = Sequence[tuple[str, Source]]

# Everything in a line that is numbered: values, input buffers, outputs, run-time numbers.
_NUMBERED = re.compile(
    r"%(?P<value>\d+)(?P<made>:?)|buffer=(?P<buffer>\d+)|ROOT=\d+|\$\d+:|slot=\d+|^input \d+ becomes"
)
_VALUE = re.compile(r"%(\d+)")
_NAME = re.compile(r"(?:^| = )([\w:.]+)\(")
_WORD = re.compile(r"[\w.:]+|\S")
_ROOT = " ROOT="
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a difference. `mark` is "-" for a line of the first program, "+" for one of the second, " " for one
    of both. Values are numbered as in the second; `%3'` is value 3 of the first program that the second lacks."""

    mark: str
    text: str
    source: Source


@dataclass(frozen=True, slots=True)
class Difference:
    """All lines of both programs; the names of the calls that are in both but not the same, only in the first, and only
    in the second; and how many lines that are the same were recorded at another line of the user's code."""

    rows: tuple[Row, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    moved: int

    @property
    def same(self) -> bool:
        """True when the programs do the same."""
        return not (self.changed or self.removed or self.added)

    def summary(self) -> str:
        """One line: how many lines differ, and which calls they are."""
        if self.same:
            moved = f"; {_lines(self.moved)} recorded elsewhere" if self.moved else ""
            return f"no difference in {_lines(len(self.rows))}{moved}"
        kinds = (("changed", self.changed), ("removed", self.removed), ("added", self.added))
        count = len(self.changed) + len(self.removed) + len(self.added)
        parts = [f"{len(names)} {kind} ({_names(names)})" for kind, names in kinds if names]
        return f"{_lines(count)} differ{'s' if count == 1 else ''}: {', '.join(parts)}"


def _lines(count: int) -> str:
    return f"{count} line" if count == 1 else f"{count} lines"


def _names(names: tuple[str, ...]) -> str:
    counted = [name if count == 1 else f"{name} {count} times" for name, count in Counter(names).items()]
    more = [f"{len(counted) - _MOST_NAMES} more"] if len(counted) > _MOST_NAMES else []
    return ", ".join(counted[:_MOST_NAMES] + more)


@dataclass(frozen=True, slots=True)
class _Line:
    """A parsed line: `shape` is its text without numbers, `made` and `used` are the values in it."""

    text: str
    source: Source
    shape: str
    name: str
    made: tuple[int, ...]
    used: tuple[int, ...]
    buffer: int


# Programs that are compared have most of their lines in common.
@lru_cache(maxsize=16_384)
def _parts(text: str) -> tuple[str, str, tuple[int, ...], tuple[int, ...], int]:
    """What a `_Line` has beside text and source."""
    made: list[int] = []
    used: list[int] = []
    buffer = -1
    for match in _NUMBERED.finditer(text):
        if match["value"] is not None:
            (made if match["made"] else used).append(int(match["value"]))
        elif match["buffer"] is not None:
            buffer = int(match["buffer"])
    name = _NAME.search(text)
    shape = _NUMBERED.sub(lambda match: re.sub(r"\d+", "", match[0]), text)
    return shape, name[1] if name else "new value of an input", tuple(made), tuple(used), buffer


def _opcodes(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, int, int, int, int]]:
    """As difflib has them, equal ends found first: programs are long, and differ in a few places."""
    shorter = min(len(first), len(second))
    head = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    tail = next((i for i in range(shorter - head) if first[-1 - i] != second[-1 - i]), shorter - head)
    first_end, second_end = len(first) - tail, len(second) - tail
    matcher = SequenceMatcher(None, first[head:first_end], second[head:second_end], autojunk=False)
    middle = [(kind, i + head, k + head, j + head, n + head) for kind, i, k, j, n in matcher.get_opcodes()]
    return [("equal", 0, head, 0, head), *middle, ("equal", first_end, len(first), second_end, len(second))]


_Pair = tuple[_Line | None, _Line | None]


def _aligned(first: Sequence[_Line], second: Sequence[_Line]) -> Iterator[_Pair]:
    """Lines that belong together: those that look the same, and between these, those of the same operator."""
    for kind, i, k, j, n in _opcodes([line.shape for line in first], [line.shape for line in second]):
        if kind == "equal":
            yield from zip(first[i:k], second[j:n], strict=True)
            continue
        left, right = first[i:k], second[j:n]
        for inner, a, b, c, d in _opcodes([line.name for line in left], [line.name for line in right]):
            if inner == "equal":
                yield from zip(left[a:b], right[c:d], strict=True)
            else:
                yield from ((line, None) for line in left[a:b])
                yield from ((None, line) for line in right[c:d])


@dataclass(slots=True)
class _Numbers:
    """Values and input buffers of the first program, by those of the second that they are."""

    values: dict[int, int] = field(default_factory=dict)
    buffers: dict[int, int] = field(default_factory=dict)

    def agree(self, first: _Line, second: _Line) -> bool:
        """True when two lines of one shape do the same; from then on their results are taken for the same values."""
        same = first.shape == second.shape and [self.values.get(n) for n in first.used] == list(second.used)
        if first.buffer >= 0:
            known = self.buffers.get(first.buffer)
            if known is None and second.buffer not in self.buffers.values():
                known = self.buffers[first.buffer] = second.buffer
            same = same and known == second.buffer
        self.values.update(zip(first.made, second.made, strict=False))
        return same

    def translated(self, text: str) -> str:
        """A line of the first program in the numbers of the second."""

        def number(match: re.Match[str]) -> str:
            known = self.values.get(int(match[1]))
            return f"%{match[1]}'" if known is None else f"%{known}"

        return _VALUE.sub(number, text)


def difference(first: Program | Listing, second: Program | Listing) -> Difference:
    """The difference of the second program from the first."""
    rows: list[Row] = []
    changed: list[str] = []
    removed: list[str] = []
    added: list[str] = []
    moved = 0
    numbers = _Numbers()
    for old, new in _aligned(_parsed_lines(first), _parsed_lines(second)):
        if old is not None and new is not None and numbers.agree(old, new):
            rows.append(Row(" ", new.text, new.source))
            moved += (old.source.file, old.source.line) != (new.source.file, new.source.line)
            continue
        if old is not None:
            rows.append(Row("-", numbers.translated(old.text), old.source))
        if new is not None:
            rows.append(Row("+", new.text, new.source))
        names = removed if new is None else added if old is None else changed
        names.append((new or old).name)  # type: ignore[union-attr]
    return Difference(tuple(rows), tuple(changed), tuple(removed), tuple(added), moved)


def distinct_changes(first: Program | Listing, second: Program | Listing) -> int:
    """The number of changes that make the second program of the first: each line more or less is one, and so is each
    replacement of one word, as of a dtype or a size, in however many lines it is."""
    replaced: set[tuple[str, ...]] = set()
    lines = 0
    for old, new in _aligned(_parsed_lines(first), _parsed_lines(second)):
        if old is None or new is None:
            lines += 1
        elif old.shape != new.shape:
            # Which results are outputs is one change, too.
            if old.shape.count(_ROOT) != new.shape.count(_ROOT):
                replaced.add((_ROOT,))
            words, others = (_WORD.findall(line.shape.replace(_ROOT, "")) for line in (old, new))
            if len(words) == len(others):
                replaced.update(pair for pair in zip(words, others, strict=True) if pair[0] != pair[1])
            else:
                replaced.add((old.shape, new.shape))
    return lines + len(replaced)


def _parsed_lines(program: Program | Listing) -> list[_Line]:
    lines = program_lines(program) if isinstance(program, Program) else program
    return [_Line(text, source, *_parts(text)) for text, source in lines]


def _title(program: Program | Listing, otherwise: str) -> str:
    return f"program {program.identity}" if isinstance(program, Program) else otherwise


def difference_text(
    first: Program | Listing,
    second: Program | Listing,
    names: tuple[str, str] | None = None,
    context: int = 3,
    sources: Sources = "short",
) -> str:
    """The difference in the unified form, below a line that sums it up; `context` lines around each change."""
    found = difference(first, second)
    if found.same:
        return found.summary() + "\n"
    names = names or (_title(first, "first"), _title(second, "second"))
    lines = [found.summary(), f"--- {names[0]}", f"+++ {names[1]}"]
    old = new = position = 0
    for begin, end in _hunks(found.rows, context):
        skipped = begin - position
        rows = found.rows[begin:end]
        old, new, position = old + skipped, new + skipped, end
        old_count, new_count = (sum(row.mark != other for row in rows) for other in "+-")
        lines.append(f"@@ -{old + 1},{old_count} +{new + 1},{new_count} @@")
        lines += [_row_text(row, sources) for row in rows]
        old, new = old + old_count, new + new_count
    return "\n".join(lines) + "\n"


def _row_text(row: Row, sources: Sources) -> str:
    where = source_text(row.source, sources)
    return f"{row.mark} {row.text}{f'  # {where}' if where else ''}"


def _hunks(rows: tuple[Row, ...], context: int) -> list[tuple[int, int]]:
    """Stretches of rows to show: each change with what is around it."""
    found: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        if row.mark != " ":
            begin, end = max(0, index - context), min(len(rows), index + context + 1)
            if found and begin <= found[-1][1]:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
    return found
