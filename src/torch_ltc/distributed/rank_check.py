"""Compares what the ranks of a group are about to do, so that ranks that differ are an error and not a hang.

Compared are the collectives of programs: their operators, arguments and shapes. What ranks do besides is their own
affair: one may log, or read in between. The comparison goes over a gloo group of its own, on the worker, right before
the program runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import settings
from torch_ltc.distributed.groups import groups
from torch_ltc.errors import GroupError, RankMismatchError
from torch_ltc.execute.run import before_collectives
from torch_ltc.program.collectives import collectives_of
from torch_ltc.program.instruction import Call, Program, Value
from torch_ltc.program.spec import Spec
from torch_ltc.program.text import program_lines

# What one rank does and another does not, by their nature.
_ONE_SIDED = ("send", "recv_")
_GROUP_ARGUMENT = "process_group"
Lines = list[tuple[str, str]]


@dataclass(slots=True)
class _Watched:
    """A group: the connection for the comparison, and what its programs did since the last one."""

    checks: Any = None
    programs: int = 0
    done: Lines = field(default_factory=list)


_watched: dict[tuple[str, int], _Watched] = {}


def group_of(call: Call) -> str:
    """The name of the group that a collective is for."""
    for argument, operand in zip(call.op._schema.arguments, call.args, strict=True):
        if argument.name == _GROUP_ARGUMENT:
            return str(operand)
    raise AssertionError(call.name)


def described(call: Call, specs: dict[int, Spec]) -> str:
    """A collective as all ranks must have it: operator, shapes, other arguments."""
    plain = call.op._schema.name.rpartition("::")[2]
    return f"{plain}({', '.join(_described(operand, specs) for operand in call.args)})"


def _described(operand: object, specs: dict[int, Spec]) -> str:
    if isinstance(operand, Value):
        spec = specs[operand.number]
        return f"{str(spec.dtype).removeprefix('torch.')}[{','.join(map(str, spec.size))}]"
    if isinstance(operand, tuple):
        return f"[{', '.join(_described(item, specs) for item in operand)}]"
    return repr(operand)


def _collective_lines(program: Program) -> dict[str, Lines]:
    """The collectives of each group, with the user's lines."""
    specs = program.specs()
    found: dict[str, Lines] = {}
    for call in collectives_of(program):
        lines = found.setdefault(group_of(call), [])
        if call.op._schema.name.rpartition("::")[2] not in _ONE_SIDED:
            lines.append((described(call, specs), str(call.source)))
    return found


def check(entry: CachedProgram) -> None:
    """Compare the collectives of a program that is about to run with those of the other ranks, if it is time to."""
    every = settings.rank_check
    if not every:
        return
    for name, lines in _collective_lines(entry.program).items():
        physical = groups.physical(name)
        watched = _watched.setdefault((name, id(physical)), _Watched())
        watched.programs += 1
        watched.done += lines
        if watched.programs % every == 0 and physical.size() > 1:
            done, watched.done = watched.done, []
            try:
                _compare(watched, name, done, entry.program)
            except RankMismatchError:
                raise
            except RuntimeError as error:
                what = f"a rank of the process group {name!r} is gone, or does not come: {str(error).strip()}"
                raise GroupError(what, source=lines[0][1] if lines else None) from error


def _compare(watched: _Watched, name: str, done: Lines, program: Program) -> None:
    if watched.checks is None:
        watched.checks = groups.make_side_group(name)
    digest = hashlib.sha256("\n".join(text for text, _ in done).encode()).digest()
    digests = _gathered(watched.checks, torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    other = next((rank for rank, one in enumerate(digests) if not torch.equal(one, digests[0])), None)
    if other is None:
        return
    # All ranks see the same digests, and so all come here.
    listing = [[text, str(source)] for text, source in program_lines(program)]
    texts = _gathered_texts(watched.checks, json.dumps([done, listing]))
    first, second = json.loads(texts[0]), json.loads(texts[other])
    raise RankMismatchError(
        f"ranks 0 and {other} of the process group {name!r} are about to run different collectives\n"
        f"{_difference_text(first[0], second[0], 'collective', other)}\n"
        f"{_difference_text(first[1], second[1], 'line of the program', other)}",
        hint="make all ranks record the same; torch_ltc.config.settings.rank_check = 0 turns the comparison off",
    )


def _difference_text(first: Sequence[Any], second: Sequence[Any], what: str, other: int) -> str:
    """The first place where two listings differ."""
    pairs = enumerate(zip(first, second, strict=False))
    place = next((i for i, (one, two) in pairs if one[0] != two[0]), min(len(first), len(second)))

    def shown(listing: Sequence[Any]) -> str:
        return f"{listing[place][0]}\n      at {listing[place][1]}" if place < len(listing) else "nothing more"

    return f"  {what} {place + 1}:\n    rank 0: {shown(first)}\n    rank {other}: {shown(second)}"


def _gathered(group: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of each rank."""
    made = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather(made, tensor).wait()
    return made


def _gathered_texts(group: Any, text: str) -> list[str]:
    data = text.encode()
    sizes = [int(size) for size in _gathered(group, torch.tensor([len(data)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = _gathered(group, padded)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


before_collectives.add(check)
