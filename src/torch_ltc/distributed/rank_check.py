"""Compares what the ranks of a group are about to do, so that ranks that differ are an error and not a hang.

Compared are collectives, in their order: operators, arguments and shapes. What ranks do besides is their own affair:
one may log, or read in between, so that its programs end elsewhere. Before a program runs, a rank writes into the
group's store where its next collectives are in the order of all, and what they are; then it looks what its neighbours
wrote. Nobody waits here: of two ranks that differ the later one finds out, and leaves word for those that wait for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import settings
from torch_ltc.distributed.groups import Note, groups
from torch_ltc.errors import RankMismatchError
from torch_ltc.execute.run import before_collectives
from torch_ltc.program.collectives import collectives_of
from torch_ltc.program.instruction import Call, Program, Value
from torch_ltc.program.spec import Spec
from torch_ltc.program.text import program_lines
from torch_ltc.pytorch.distributed import ProcessGroup

# What one rank does and another does not, by their nature.
_ONE_SIDED = ("send", "recv_")
# Arguments that ranks may have otherwise.
_UNLIKE = {
    "allgather_": ("input_tensors",),
    "allgather_coalesced_": ("input_list",),
    "reduce_scatter_": ("output_tensors",),
    "gather_": ("output_tensors", "output_tensors_lengths"),
    "gather_into_tensor_": ("output_tensor",),
    "scatter_": ("input_tensors", "input_tensors_lengths"),
    "alltoall_": ("output_tensors", "input_tensors", "output_tensors_lengths", "input_tensors_lengths"),
    "alltoall_base_": ("output", "input", "output_split_sizes", "input_split_sizes"),
}
_GROUP_ARGUMENT = "process_group"
# A line of a listing, and where the user has it.
Lines = list[list[str]]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The collectives of a program on one group, the whole program, and a digest of the former."""

    collectives: Lines
    program: Lines
    digest: str

    def to_json(self) -> str:
        return json.dumps([self.collectives, self.program])


@dataclass(slots=True)
class _Watched:
    """A group: how many collectives it has run, how many programs, and the plans of this rank and of others."""

    physical: ProcessGroup
    notes: Note
    position: int = 0
    programs: int = 0
    published: set[str] = field(default_factory=set)
    known: dict[tuple[int, str], tuple[Lines, Lines]] = field(default_factory=dict)


_watched: dict[str, _Watched] = {}
# Programs whose plans are kept.
_MOST_PLANS = 4096
_plans: dict[int, dict[str, _Plan]] = {}


def _described(operand: object, specs: dict[int, Spec]) -> str:
    if isinstance(operand, Value):
        spec = specs[operand.number]
        return f"{str(spec.dtype).removeprefix('torch.')}[{','.join(map(str, spec.size))}]"
    if isinstance(operand, tuple):
        return f"[{', '.join(_described(item, specs) for item in operand)}]"
    return repr(operand)


def _group_of(call: Call) -> str:
    """The name of the group that a collective is for."""
    names = [argument.name for argument in call.op._schema.arguments]
    return str(call.args[names.index(_GROUP_ARGUMENT)])


def _plans_of(program: Program) -> dict[str, _Plan]:
    """What a program does on each group."""
    known = _plans.get(program.identity)
    if known is not None:
        return known
    specs = program.specs()
    listing = [[text, str(source)] for text, source in program_lines(program)]
    by_group: dict[str, Lines] = {}
    for call in collectives_of(program):
        plain = call.op._schema.name.rpartition("::")[2]
        lines = by_group.setdefault(_group_of(call), [])
        if plain not in _ONE_SIDED:
            unlike = _UNLIKE.get(plain, ())
            pairs = zip(call.op._schema.arguments, call.args, strict=True)
            shown = ", ".join(_described(value, specs) for argument, value in pairs if argument.name not in unlike)
            lines.append([f"{plain}({shown})", str(call.source)])
    made = {
        name: _Plan(lines, listing, hashlib.sha256("\n".join(text for text, _ in lines).encode()).hexdigest()[:16])
        for name, lines in by_group.items()
        if lines
    }
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[program.identity] = made
    return made


def check(entry: CachedProgram) -> None:
    """Compare the collectives of a program that is about to run with those of the neighbours, if it is time to."""
    if not settings.rank_check:
        return
    for name, plan in _plans_of(entry.program).items():
        physical = groups.physical(name)
        if physical.size() == 1:
            continue
        watched = _watched.get(name)
        if watched is None or watched.physical is not physical:
            watched = _watched[name] = _Watched(physical, groups.notes(name))
        start, watched.position = watched.position, watched.position + len(plan.collectives)
        watched.programs += 1
        if watched.programs % settings.rank_check == 0:
            _publish(watched, physical.rank(), start, plan)
            for rank in {(physical.rank() + step) % physical.size() for step in (-1, 1)} - {physical.rank()}:
                _compare(watched, name, (physical.rank(), start, plan), rank)


def _publish(watched: _Watched, rank: int, start: int, plan: _Plan) -> None:
    if plan.digest not in watched.published:
        watched.notes.write(f"plan {rank} {plan.digest}", plan.to_json())
        watched.published.add(plan.digest)
    watched.notes.write(f"next {rank}", f"{start} {plan.digest}")


def _compare(watched: _Watched, name: str, own: tuple[int, int, _Plan], other: int) -> None:
    rank, start, plan = own
    text = watched.notes.read(f"next {other}")
    if text is None:
        return
    other_start, digest = int(text.split()[0]), text.split()[1]
    if (other_start, digest) == (start, plan.digest):
        return
    theirs = watched.known.get((other, digest))
    if theirs is None:
        found = json.loads(watched.notes.read(f"plan {other} {digest}") or "[[], []]")
        theirs = watched.known[other, digest] = (found[0], found[1])
    begin = max(start, other_start)
    end = min(start + len(plan.collectives), other_start + len(theirs[0]))
    for place in range(begin, end):
        mine, their = plan.collectives[place - start], theirs[0][place - other_start]
        if mine[0] != their[0]:
            sides = sorted([(rank, mine, plan.program), (other, their, theirs[1])], key=lambda side: side[0])
            raise _mismatch(watched, name, place, sides)


def _mismatch(watched: _Watched, name: str, place: int, sides: Sequence[Any]) -> RankMismatchError:
    (first, one, program), (second, two, other) = sides
    pairs = enumerate(zip(program, other, strict=False))
    line = next((i for i, (mine, their) in pairs if mine[0] != their[0]), min(len(program), len(other)))
    what = "\n".join(
        [
            f"ranks {first} and {second} of the process group {name!r} are about to run different collectives",
            f"  collective {place + 1} of the group:",
            *_shown(first, one),
            *_shown(second, two),
            f"  line {line + 1} of their programs:",
            *_shown(first, program[line] if line < len(program) else None),
            *_shown(second, other[line] if line < len(other) else None),
        ]
    )
    error = RankMismatchError(
        what, hint="make all ranks record the same; the setting rank_check = 0 turns the comparison off"
    )
    watched.notes.leave_word(str(error))
    return error


def _shown(rank: int, line: Sequence[str] | None) -> list[str]:
    return (
        [f"    rank {rank}: nothing more"] if line is None else [f"    rank {rank}: {line[0]}", f"      at {line[1]}"]
    )


before_collectives.add(check)
