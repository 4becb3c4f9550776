"""Splits a functional program into parts for the backend and calls that PyTorch's own kernels run.

Values are immutable, so that calls may change places: as many as can be are gathered into each part. Random calls and
collectives keep their order among themselves, and none of them reaches a backend: random numbers are those of eager,
and every rank talks to the others in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch_ltc.program.collectives import is_ordered
from torch_ltc.program.instruction import Call, Input, Instruction, Program, Update


@dataclass(frozen=True, slots=True)
class Part:
    """A program for the backend, or with `direct` one call for PyTorch. Nothing after it needs the values `dead`."""

    program: Program
    direct: Call | None
    dead: tuple[int, ...] = ()


def partition(program: Program, supports: Callable[[Call], bool]) -> list[Part]:
    """The parts of the program, in the order in which they run."""
    direct = _direct_calls(program, supports)
    available = {i.number for i in program.instructions if not isinstance(i, Call)}
    waiting = program.calls
    groups: list[list[Call]] = []
    while waiting:
        waiting, apart = _take(waiting, available, direct, ordered=True)
        groups += [[call] for call in apart]
        waiting, together = _take(waiting, available, direct, ordered=False)
        if together:
            groups.append(together)
        assert apart or together
    return _with_deaths([_part(program, group, groups[i + 1 :], direct) for i, group in enumerate(groups)], program)


def _direct_calls(program: Program, supports: Callable[[Call], bool]) -> set[int]:
    direct = {id(call) for call in program.calls if is_ordered(call) or not call.numbers or not supports(call)}
    if not direct:
        return direct
    users: dict[int, list[Call]] = {}
    for call in program.calls:
        for number in call.operands:
            users.setdefault(number, []).append(call)
    kept = set(program.results)
    for call in program.calls:
        # Memory for a direct call to fill would otherwise be a part by itself.
        used_by = [user for number in call.numbers for user in users.get(number, ())]
        if not call.operands and used_by and kept.isdisjoint(call.numbers) and all(id(u) in direct for u in used_by):
            direct.add(id(call))
    return direct


def _take(
    waiting: list[Call], available: set[int], direct: set[int], *, ordered: bool
) -> tuple[list[Call], list[Call]]:
    """Take the calls that can run now: direct ones (`ordered`), or the others."""
    taken: list[Call] = []
    left: list[Call] = []
    ordered_waits = False
    for call in waiting:
        ready = (id(call) in direct) is ordered and available.issuperset(call.operands)
        if ready and not (ordered_waits and is_ordered(call)):
            taken.append(call)
            available.update(number for number in call.numbers if number >= 0)
        else:
            left.append(call)
            ordered_waits |= is_ordered(call)
    return left, taken


def _part(program: Program, calls: list[Call], later: list[list[Call]], direct: set[int]) -> Part:
    if id(calls[0]) in direct:
        return Part(program, calls[0])
    made = {number for call in calls for number in call.numbers if number >= 0}
    used = {number for call in calls for number in call.operands}
    needed = {number for group in later for call in group for number in call.operands}
    specs = program.specs()
    inputs = {i.number: position for position, i in enumerate(program.inputs)}
    taken = sorted(used - made - {i.number for i in program.numbers})
    leading: list[Instruction] = [Input(i, specs[number], number, calls[0].source) for i, number in enumerate(taken)]
    leading += [i for i in program.numbers if i.number in used]
    # An input of the whole program may be overwritten here if its new value is made here and nothing needs the old.
    by_input = {update.input: update.number for update in program.updates}
    kept = set(program.outputs)
    updates = tuple(
        Update(position, by_input[inputs[number]])
        for position, number in enumerate(taken)
        if inputs.get(number) in by_input
        and by_input[inputs[number]] in made
        and number not in needed
        and number not in kept
    )
    updated = {update.number for update in updates}
    wanted = kept | needed | {update.number for update in program.updates if update.number not in updated}
    return Part(
        replace(
            program,
            instructions=(*leading, *calls),
            outputs=tuple(sorted(made & wanted)),
            random=False,
            updates=updates,
        ),
        None,
    )


def _with_deaths(parts: list[Part], program: Program) -> list[Part]:
    needed = set(program.results)
    marked: list[Part] = []
    for part in reversed(parts):
        used = set(part.direct.operands if part.direct is not None else [i.number for i in part.program.inputs])
        marked.append(replace(part, dead=tuple(sorted(used - needed))))
        needed |= used
    marked.reverse()
    return marked
