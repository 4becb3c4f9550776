"""What must hold of every program that is cut and of every run, verified with the setting `check = "invariants"`.

A program is looked at when it is cut, with the recorder's lock held, and again when it has run, on the thread that ran
it. What is wrong is raised as an InvariantError on the user's thread, at the end of the next sync: nothing is lost or
stopped because of it. Each text names the invariant and the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import settings
from torch_ltc.errors import InvariantError
from torch_ltc.execute.run import program_queued, program_ran
from torch_ltc.execute.sync import program_cut, program_synced
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.spec import Spec
from torch_ltc.record.buffer import Buffer
from torch_ltc.record.recorder import recorder

__all__ = ["Invariants", "invariants"]

_MOST_KEPT = 100
# Programs of which the part that never changes was verified; they are identified by a number that is used once.
_MOST_VERIFIED = 10_000


class Invariants:
    """Verifies, and keeps what was found until it is raised."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._verified: set[int] = set()
        # By the identity of the list of outputs, which lives until the program has run: what waits to be run.
        self._waiting: dict[int, tuple[int, list[weakref.ref[Buffer]]]] = {}
        self._removes: list[Callable[[], None]] = []

    def apply_setting(self) -> None:
        """Begin or end to verify, as the setting says."""
        wanted = settings.check == "invariants"
        if wanted == bool(self._removes):
            return
        for remove in self._removes:
            remove()
        self._removes = []
        self._waiting.clear()
        if wanted:
            self._removes = [
                program_cut.add(self._cut),
                program_queued.add(self._queued),
                program_ran.add(self._ran),
                program_synced.add(lambda entry: self.raise_found()),
            ]

    def raise_found(self) -> None:
        """Raise what was found since the last time, if there is something."""
        if self.found:
            found, self.found = self.found, []
            raise InvariantError("\n  ".join(["an invariant of the device does not hold:", *dict.fromkeys(found)]))

    def check_idle(self) -> None:
        """Raise if a program that was queued has left an output without a value. Everything that is queued has run."""
        for identity, outputs in list(self._waiting.values()):
            for reference in outputs:
                buffer = reference()
                if buffer is not None and buffer.data is None and buffer.error is None:
                    self._note(identity, "an output that is alive never got its value")
        self._waiting.clear()
        self.raise_found()

    def _note(self, identity: int, what: str) -> None:
        if len(self.found) < _MOST_KEPT:
            self.found.append(f"program {identity}: {what}")

    # ---- when it is cut ---------------------------------------------------------------------------------------------

    def _cut(self, entry: CachedProgram, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> None:
        """With the lock held, before the recorder begins the next program."""
        program = entry.program
        wrong: list[str] = []
        path = recorder.tree.path(recorder.node)
        recorded = [node.instruction for node in path]
        if len(recorded) != len(program.instructions) or any(
            mine is not known for mine, known in zip(recorded, program.instructions, strict=True)
        ):
            wrong.append("the program that was found is not the one that was recorded")
        if program.identity not in self._verified:
            if len(self._verified) >= _MOST_VERIFIED:
                self._verified.clear()
            self._verified.add(program.identity)
            wrong += _wrong_numbers(program)
        if sum(node.made for node in path) != recorder.count - recorder.base or recorder.count < recorder.base:
            wrong.append("the values that were counted are not those of the path in the tree")
        if len(scalars) != program.scalars:
            wrong.append(f"{len(scalars)} run-time numbers were recorded, the program takes {program.scalars}")
        wrong += _wrong_buffers(program, inputs, outputs, recorder.base)
        for what in wrong:
            self._note(program.identity, what)

    def _queued(self, entry: CachedProgram, outputs: list[Buffer]) -> None:
        self._waiting[id(outputs)] = (entry.program.identity, [weakref.ref(buffer) for buffer in outputs])

    # ---- when it has run --------------------------------------------------------------------------------------------

    def _ran(self, entry: CachedProgram, inputs: list[Buffer], outputs: list[Buffer]) -> None:
        """Its results are installed, and nothing behind it has run."""
        program = entry.program
        if self._waiting.pop(id(outputs), None) is None:
            self._note(program.identity, "it ran twice, or without having been queued")
        for what in (*_wrong_results(outputs), *_shared_memory(inputs, outputs)):
            self._note(program.identity, what)


def _wrong_numbers(program: Program) -> Iterator[str]:
    """Every value is made once, in order, before it is used; what is alive is made."""
    following = 0
    for instruction in program.instructions:
        if isinstance(instruction, Call):
            made = [number for number in instruction.numbers if number >= 0]
            if any(not 0 <= operand < following for operand in instruction.operands):
                yield f"{instruction.name} takes a value that is not made before it"
        else:
            made = [instruction.number]
        if made != list(range(following, following + len(made))):
            yield f"values {made} are made where value {following} comes next"
        following += len(made)
    if following != program.values:
        yield f"{following} values are made, {program.values} were counted"
    if len(set(program.outputs)) != len(program.outputs) or any(not 0 <= n < following for n in program.outputs):
        yield "an output is named twice, or is no value of the program"


def _wrong_buffers(program: Program, inputs: Sequence[Buffer], outputs: Sequence[Buffer], base: int) -> Iterator[str]:
    """Inputs and outputs are different buffers, each at its place."""
    identities = {id(buffer) for buffer in inputs}
    if len(identities) != len(inputs):
        yield "one buffer is two inputs"
    if len({item.buffer for item in program.inputs}) != len(inputs):
        yield "the program takes another number of buffers than it is given"
    if any(buffer.number >= base for buffer in inputs):
        yield "an input is made by the program itself"
    if len({id(buffer) for buffer in outputs}) != len(outputs) or any(id(buffer) in identities for buffer in outputs):
        yield "one buffer is two outputs, or input and output"
    if tuple([buffer.number - base for buffer in outputs]) != program.outputs:
        yield "the outputs are not the values that the program names"


def _wrong_results(outputs: Sequence[Buffer]) -> Iterator[str]:
    """Every output has data with the recorded geometry, or an error."""
    for buffer in outputs:
        data: Any = buffer.data
        if data is None and buffer.error is None:
            yield "an output has neither data nor an error"
        elif isinstance(data, torch.Tensor) and buffer.error is None and not _fits(data, buffer.spec):
            yield f"an output was recorded as {buffer.spec!r} and is {data.dtype}, {tuple(data.shape)}, {data.stride()}"


def _fits(data: torch.Tensor, spec: Spec) -> bool:
    if data.dtype is not spec.dtype or tuple(data.shape) != tuple(spec.size):
        return False
    # The step of a dimension with one element says nothing.
    steps = zip(data.shape, data.stride(), spec.stride, strict=True)
    return data.numel() == 0 or all(mine == recorded for size, mine, recorded in steps if size != 1)


def _shared_memory(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Iterator[str]:
    """No two buffers lie in the same memory: a write to one would be seen in the other."""
    seen: dict[int, int] = {}
    for buffer in (*inputs, *outputs):
        data = buffer.data
        if not isinstance(data, torch.Tensor) or not data.untyped_storage().nbytes():
            continue
        owner = seen.setdefault(data.untyped_storage()._cdata, id(buffer))
        if owner != id(buffer):
            yield "two buffers lie in the same memory"


invariants = Invariants()
settings.watch("check", invariants.apply_setting)
