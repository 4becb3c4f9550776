"""Finding the call that made the first NaN or infinity, by running the program again call by call.

Only a program whose results hold one is run again. From each such result the search goes back through calls whose
results hold one too, to those that were given finite numbers: what is infinite on purpose and does not reach a result,
as the mask of an attention, is not taken for the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_ltc.backends.interpreter import memory_roots
from torch_ltc.compile.hooks import Run
from torch_ltc.config import settings
from torch_ltc.debug.messages import Message, message
from torch_ltc.debug.replay import (
    MOST_SHOWN,
    Figures,
    Operand,
    Replay,
    SavedInputs,
    comparable,
    figures,
    operands,
    source_of,
    tensor_of,
)
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcWarning, NonFiniteWarning
from torch_ltc.events import NonFiniteEvent, emit
from torch_ltc.execute.executor import executor
from torch_ltc.execute.sync import sync
from torch_ltc.lowering.interface import Arguments
from torch_ltc.program.instruction import Call, Program, Value
from torch_ltc.source import Source

_MADE = message(
    "LTC301",
    "non-finite",
    "An operation made a NaN or an infinity out of finite numbers, and it reached a result of the program.",
    "Look at the ranges of the inputs that the message shows, and at the line that it names.",
)
_GIVEN = message(
    "LTC302",
    "non-finite-input",
    "A NaN or an infinity in the results of a program was in one of its inputs already.",
    "Look for it where the input comes from: data, a checkpoint, or a program that ran before the check was on.",
)

_NAN, _INF = 1, 2
# A program is searched this often without anything new, then no more.
_MOST_FRUITLESS = 8
_MOST_ORIGINS = 1024

# Calls that overwrite what they write to without reading it.
_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_"}
    | {"geometric_", "bernoulli_"}
)
_ADVICE = {
    "log": "keep its input above 0: x.clamp_min(1e-8), or log1p for small numbers",
    "log2": "keep its input above 0: x.clamp_min(1e-8)",
    "log10": "keep its input above 0: x.clamp_min(1e-8)",
    "sqrt": "keep its input at 0 or above: x.clamp_min(0)",
    "rsqrt": "keep its input above 0: x + 1e-8",
    "reciprocal": "keep its input away from 0",
    "div": "keep the divisor away from 0: add a small number to it, or torch.where before the division",
    "pow": "keep the base above 0 where the exponent is not a whole number",
    "exp": "keep its input small: subtract the maximum first, or use logsumexp or log_softmax",
    "_softmax": "a row whose numbers are all -inf has no softmax: leave one position unmasked",
    "empty": "nothing was written to this memory: use torch.zeros, or write to all of it",
    "empty_strided": "nothing was written to this memory: use torch.zeros, or write to all of it",
    "acos": "keep its input in -1 .. 1",
    "asin": "keep its input in -1 .. 1",
}


# ---- findings --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The origin of a NaN or an infinity.

    `op` made it out of `inputs`, at `source`; or, if `op` is empty, an input of the program held it already, which is
    then in `results`, `source` is the line that used it first, `position` its place among the inputs, and `origin` what
    made it in an earlier program, if that is known. `note` is what else is known.
    """

    program: int
    op: str
    source: Source
    inputs: tuple[Operand, ...]
    results: tuple[Figures, ...]
    note: str = ""
    position: int = -1
    origin: NonFinite | None = None

    @property
    def message(self) -> Message:
        """The stable id of what is said."""
        return _MADE if self.op else _GIVEN

    @property
    def keys(self) -> set[tuple[str, Source]]:
        """The keys of what is reported once: this operation at this line, and its origin."""
        own = {(self.op, self.source)}
        return own if self.origin is None else own | self.origin.keys

    def __str__(self) -> str:
        lines = [f"{self.message.code}: {self._title()}"]
        lines += [f"  input: {shown}" for shown in self.inputs]
        if self.op:
            lines += [f"  result: {shown}" for shown in self.results]
            lines.append(f"  recorded at {self.source.describe()}")
        else:
            lines.append(f"  first used at {self.source.describe()}")
        if self.origin is not None:
            made = f"{self.origin.op} made it" if self.origin.op else "it was an input"
            lines.append(f"  {made} in program {self.origin.program}, recorded at {self.origin.source.describe()}")
        if self.note:
            lines.append(f"  {self.note}")
        plain = self.op.removeprefix("aten::").partition(".")[0].rstrip("_")
        lines.append(f"  try: {_ADVICE.get(plain, self.message.advice)}")
        return "\n".join(lines)

    def _title(self) -> str:
        if not self.op:
            return f"an input of program {self.program} was not finite before it ran: {self.results[0]}"
        made = [(sum(f.nans for f in self.results), "NaN"), (sum(f.infinities for f in self.results), "Inf")]
        what = " and ".join(f"{count} {name}" for count, name in made if count)
        finite = all(f.finite for f in self.inputs if isinstance(f, Figures))
        out_of = "finite numbers" if finite else "infinities"
        return f"{self.op} made {what} out of {out_of} in program {self.program}"


def _state(tensor: Any) -> int:
    """Flags for a tensor that holds a NaN, an infinity, or both."""
    if not isinstance(tensor, torch.Tensor) or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return 0
    plain = comparable(tensor.detach())
    # One pass over the memory, where nothing is wrong.
    if bool(plain.sum().isfinite()):
        return 0
    return (_NAN if bool(plain.isnan().any()) else 0) | (_INF if bool(plain.isinf().any()) else 0)


def _any_suspect(tensors: Sequence[torch.Tensor]) -> bool:
    """True unless all are certainly finite; the device is waited for once."""
    sums = [
        comparable(tensor.detach()).sum().isfinite()
        for tensor in tensors
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex
    ]
    return bool(sums) and not bool(torch.stack(sums).all())


# ---- the search -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Step:
    """The replay of one call: its operands before it, and its results."""

    call: Call
    before: dict[int, int]
    inputs: tuple[Operand, ...] = ()
    results: tuple[Figures, ...] = ()


@dataclass(slots=True)
class _Sources:
    """The sources that the search has reached: places of calls, and roots of inputs."""

    calls: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)


class _Search:
    """One replay, and the way back from its results."""

    def __init__(self, program: Program, arguments: Arguments) -> None:
        self.program = program
        self._arguments = arguments
        self._roots = memory_roots(program)
        self._steps: list[_Step] = [_Step(call, {}) for call in program.calls]
        # For each memory who wrote to it, in order, and what was in what was written.
        self._writers: dict[int, list[tuple[int, int]]] = {}
        self._given: dict[int, int] = {}
        self._figures: dict[int, Figures] = {}
        for instruction, tensor in zip(program.inputs, arguments.inputs, strict=True):
            root = self._roots[instruction.number]
            state = _state(tensor)
            if state and isinstance(tensor, torch.Tensor) and root not in self._figures:
                self._figures[root] = figures(tensor)
            self._given[root] = self._given.get(root, 0) | state
        self._outcome = Replay(program, self._observe).run(arguments)

    def _observe(self, place: int, call: Call, values: list[Any], run: Callable[[], None]) -> None:
        step = self._steps[place]
        ignored = _overwritten(call)
        step.before = {number: _state(values[number]) for number in call.operands if number not in ignored}
        mutated = call.mutated
        # What is written to in place is gone afterwards.
        shown = {number: figures(values[number]) for number in mutated if isinstance(values[number], torch.Tensor)}
        run()
        made = [number for number in call.numbers if number >= 0]
        after = {number: _state(values[number]) for number in (*made, *mutated)}
        for number, state in after.items():
            self._writers.setdefault(self._roots[number], []).append((place, state))
        whole = 0
        for state in step.before.values():
            whole |= state
        if any(state & ~whole for state in after.values()):
            bad = [number for number, state in after.items() if state]
            step.results = tuple(figures(values[number]) for number in bad[:MOST_SHOWN])
            step.inputs = operands(call, values, self._arguments, shown, bad[0])

    def findings(self) -> list[NonFinite]:
        """The causes of the results: the first call, and the first input."""
        calls: dict[int, NonFinite] = {}
        nan, inf = _Sources(), _Sources()
        results: list[Any] = self._outcome.results
        bad = {self._roots[n]: _state(result) for n, result in zip(self.program.outputs, results, strict=True)}
        for instruction, tensor in zip(self.program.inputs, self._arguments.inputs, strict=True):
            root = self._roots[instruction.number]
            if root in self._writers:
                bad[root] = bad.get(root, 0) | _state(tensor)
        end = len(self._steps)
        for root, state in bad.items():
            if state & _NAN:
                self._walk(root, end, _NAN, nan)
            elif state & _INF:
                self._walk(root, end, _INF, inf)
        for place in nan.calls:
            found, at = self._nan_finding(place)
            calls[at] = found
        for place in inf.calls:
            if not self._deliberate(place):
                calls.setdefault(place, self._finding(place))
        first = [calls[place] for place in sorted(calls)][:1]
        return first + [self._input_finding(root) for root in sorted(nan.inputs | inf.inputs, reverse=True)][:1]

    def _walk(self, root: int, before: int, kind: int, sources: _Sources) -> None:
        """Collect what brought this kind of number into a memory, as it was before the call at this place."""
        ahead, known = [(root, before)], set()
        while ahead:
            root, before = ahead.pop()
            writers = [place for place, state in self._writers.get(root, ()) if place < before and state & kind]
            if not writers:
                if self._given.get(root, 0) & kind:
                    sources.inputs.add(root)
                continue
            place = writers[-1]
            if (root, place) in known:
                continue
            known.add((root, place))
            carriers = [number for number, state in self._steps[place].before.items() if state & kind]
            if carriers:
                ahead += [(self._roots[number], place) for number in carriers]
            else:
                sources.calls.add(place)

    def _nan_finding(self, place: int) -> tuple[NonFinite, int]:
        """The finding on a call that made a NaN out of no NaN: if it was given infinities, the call that made those."""
        infinite = _Sources()
        for number, state in self._steps[place].before.items():
            if state & _INF:
                self._walk(self._roots[number], place, _INF, infinite)
        made = sorted(infinite.calls)
        accidents = [other for other in made if not self._deliberate(other)]
        call = self._steps[place].call
        if accidents:
            note = f"the infinities became NaN in {call.name} at {source_of(call, self._arguments).describe()}"
            return replace(self._finding(accidents[0]), note=note), accidents[0]
        found = self._finding(place)
        if made:
            maker = self._steps[made[0]].call
            note = f"the infinities are those of {maker.name} at {source_of(maker, self._arguments).describe()}"
            found = replace(found, note=note)
        elif infinite.inputs:
            found = replace(found, note="the infinities were in an input of the program")
        return found, place

    def _finding(self, place: int) -> NonFinite:
        step = self._steps[place]
        source = source_of(step.call, self._arguments)
        return NonFinite(self.program.identity, step.call.name, source, step.inputs, step.results)

    def _input_finding(self, root: int) -> NonFinite:
        # The line of the call that uses it: the input itself may have been recorded first by another line.
        user = next(call for call in self.program.calls if any(self._roots[n] == root for n in call.operands))
        position = next(p for p, i in enumerate(self.program.inputs) if self._roots[i.number] == root)
        source = source_of(user, self._arguments)
        return NonFinite(self.program.identity, "", source, (), (self._figures[root],), position=position)

    def _deliberate(self, place: int) -> bool:
        """True when the user wrote the infinity: a number that the call was given is one."""
        return any(isinstance(shown, (float, complex)) and not _is_finite(shown) for shown in self._steps[place].inputs)


def _is_finite(number: complex) -> bool:
    return math.isfinite(number.real) and math.isfinite(number.imag)


def _overwritten(call: Call) -> set[int]:
    """Operands that the call writes to without reading them."""
    if call.op._schema.name.removeprefix("aten::") in _OVERWRITES:
        return set(call.mutated)
    out = [name for name in call.kwargs if name == "out"]
    return {operand.number for name in out if isinstance(operand := call.kwargs[name], Value)}


# ---- around runs ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Recipient:
    """A recipient of findings, and those that it has."""

    findings: list[NonFinite] = field(default_factory=list)
    known: set[tuple[str, Source]] = field(default_factory=set)
    fruitless: dict[int, int] = field(default_factory=dict)


class Finder:
    """Looks at runs; keeps where the infinite memory of earlier runs came from."""

    def __init__(self) -> None:
        self._everyone = _Recipient()
        self.recipients: list[_Recipient] = []
        self._origins: dict[StorageWeakRef, NonFinite] = {}

    @contextmanager
    def watch(self, run: Run) -> Iterator[None]:
        """Around each run, if the setting says so."""
        if run.check not in ("nan", "all"):
            yield
            return
        saved = SavedInputs(run.entry.program, run.arguments, run.entry.written_positions)
        yield
        try:
            self._look(run, saved)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            deferred.add_warning(
                f"the search for NaN in program {run.entry.program.identity} failed: {what}", LtcWarning
            )

    def _look(self, run: Run, saved: SavedInputs) -> None:
        assert run.outcome is not None
        outcome, arguments, program = run.outcome, run.arguments, run.entry.program
        written = {position: arguments.held[position] for position in run.entry.written_positions} | outcome.replaced
        ends = [tensor for held in (*outcome.results, *written.values()) if (tensor := tensor_of(held)) is not None]
        recipient = self.recipients[-1] if self.recipients else self._everyone
        if recipient.fruitless.get(program.identity, 0) >= _MOST_FRUITLESS or not _any_suspect(ends):
            return
        after = arguments.generator.get_state() if program.random else None
        try:
            search = _Search(program, saved.arguments())
            findings = [self._with_origin(finding, run) for finding in search.findings()]
        finally:
            if after is not None:
                arguments.generator.set_state(after)
        new = self._report(recipient, findings)
        recipient.fruitless[program.identity] = 0 if new else recipient.fruitless.get(program.identity, 0) + 1
        if findings:
            self._remember(ends, findings[0].origin or findings[0])

    def _with_origin(self, finding: NonFinite, run: Run) -> NonFinite:
        """The finding, with what made the input so in an earlier program."""
        held = None if finding.op else run.arguments.held[finding.position]
        if not isinstance(held, torch.Tensor):
            return finding
        return replace(finding, origin=self._origins.get(StorageWeakRef(held.untyped_storage())))

    def _report(self, recipient: _Recipient, findings: list[NonFinite]) -> bool:
        """Report new findings. A recipient of the origin gets none of its consequences."""
        new = [finding for finding in findings if not recipient.known.intersection(finding.keys)]
        for finding in new:
            recipient.known.update(finding.keys)
            recipient.findings.append(finding)
            emit(NonFiniteEvent(finding.program, finding.op, finding.source, str(finding)))
            if recipient is self._everyone:
                deferred.add_warning(str(finding), NonFiniteWarning)
        return bool(new)

    def _remember(self, ends: list[torch.Tensor], finding: NonFinite) -> None:
        if len(self._origins) > _MOST_ORIGINS:
            self._origins = {weak: found for weak, found in self._origins.items() if not weak.expired()}
        for tensor in ends:
            if _state(tensor):
                self._origins[StorageWeakRef(tensor.untyped_storage())] = finding


finder = Finder()


@contextmanager
def find_nan(raises: bool = False) -> Iterator[list[NonFinite]]:
    """Inside the block, find what makes a NaN or an infinity: the list that is handed in has it when the block has
    ended, which syncs and waits. With `raises`, the first one is raised as a NonFiniteWarning.

    What was recorded before the block and has not been synced is looked at, too. The results of the programs are as
    they would be without the search.
    """
    recipient = _Recipient()
    check = "all" if settings.check in ("validate", "all") else "nan"
    with settings.scope(check=check):
        finder.recipients.append(recipient)
        try:
            yield recipient.findings
            sync(wait=True)
        finally:
            executor.drain()
            finder.recipients.remove(recipient)
    if raises and recipient.findings:
        raise NonFiniteWarning(str(recipient.findings[0]))
