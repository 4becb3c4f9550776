"""The choice by measurement: with the backend "auto" a hot program runs in each of its forms in turn, and the fastest
one is kept for it.

A form is a backend, captured as graphs of the device or not. A measured run is an execution like any other: it happens
once, in its place, and the user gets its results. Whether a form can be had is what the compile state of the program
on that backend says (`compile/state.py`); nothing here compiles. A form that comes late, because its compiler takes
long, is measured against the kept one when it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.compile.state import State
from torch_ltc.compile.tier_policy import TierPolicy, select_executable
from torch_ltc.events import ChoiceEvent, ExecuteEvent, emit
from torch_ltc.execute.capture import graphs_of
from torch_ltc.lowering.interface import Arguments, Backend, Form
from torch_ltc.lowering.registry import registry

__all__ = ["Choice", "ProgramForm", "choice_of", "wait_for_device"]

# Runs of a form before it is timed, in which code is warmed up or captured, and timed ones, of which the least counts;
# more of those that are short, because other work of the machine may cover all of a few.
_UNTIMED = 2
_TIMED = 3
_TIMED_SHORT = 9
_SHORT_S = 5e-3
# Runs after which a form that cannot be had is left out.
_MOST_TRIES = 16
_MOST_MEASUREMENTS = 3
# Times this near to the least count as equal to it.
_EQUAL = 1.05


@dataclass(slots=True, eq=False)
class ProgramForm:
    """A backend, captured or not, and the time that a program took in it."""

    backend: Backend
    captured: bool
    runs: int = 0
    tries: int = 0
    least_s: float = float("inf")
    # The same with the worker's own part of it counted twice: on a device that computes beside the host, that part is
    # taken from the thread that records.
    least_cost_s: float = float("inf")

    @property
    def name(self) -> str:
        """As the user reads it."""
        return f"captured {self.backend.name}" if self.captured else self.backend.name

    @property
    def finished(self) -> bool:
        """True when it has run often enough, or cannot be had."""
        return self.timed or self.tries >= _MOST_TRIES

    @property
    def timed(self) -> bool:
        """True when it has run often enough."""
        return self.runs >= _UNTIMED + (_TIMED_SHORT if self.least_s < _SHORT_S else _TIMED)

    def begin(self) -> None:
        """Measure anew."""
        self.runs = self.tries = 0
        self.least_s = self.least_cost_s = float("inf")

    def note(self, event: ExecuteEvent) -> None:
        """Count a run that was to be in this form."""
        if event.backend != self.backend.name or event.captured != self.captured or event.failed:
            self.tries += 1
            return
        self.runs += 1
        if self.runs > _UNTIMED:
            self.least_s = min(self.least_s, event.duration_s)
            self.least_cost_s = min(self.least_cost_s, event.duration_s + event.host_s)


class Choice:
    """The forms of one program, least preferred first where they are equally fast, and the one that is kept."""

    __slots__ = ("key", "kept", "measurements", "_forms", "_measured", "_late", "_tries", "_last")

    def __init__(self, entry: CachedProgram, policy: TierPolicy) -> None:
        self.key = (policy.measures, policy.captures)
        self._forms = _forms_of(entry, policy)
        self.kept: ProgramForm | None = None
        self.measurements = 0
        self._measured: list[ProgramForm] = []
        self._late: list[ProgramForm] = []
        self._tries = 0
        self._last = self._forms[0]

    @property
    def settled(self) -> bool:
        """True when a form is kept, and no other one is awaited."""
        return self.kept is not None and not self._measured and not self._late

    def next(self, entry: CachedProgram, arguments: Arguments, policy: TierPolicy) -> tuple[ProgramForm, bool]:
        """The form of the next execution, and True if it is measured."""
        form, measured = self._next(entry, arguments, policy)
        if self._last.captured and form is not self._last:
            # Another form's results are between two replays from now on: its graphs do not know which ones are held.
            entry.capture = None
        self._last = form
        return form, measured

    def _next(self, entry: CachedProgram, arguments: Arguments, policy: TierPolicy) -> tuple[ProgramForm, bool]:
        if self._measured:
            turn = self._turn()
            if turn is not None:
                return turn, True
            self._decide(entry)
        if self.kept is not None:
            if self._late:
                self._look_for_late(entry, arguments, policy)
                turn = self._turn()
                if turn is not None:
                    return turn, True
            return self.kept, False
        return self._first(entry, arguments, policy)

    def _first(self, entry: CachedProgram, arguments: Arguments, policy: TierPolicy) -> tuple[ProgramForm, bool]:
        """Before the first measurement: compile what there is to compile, and begin when it is there."""
        inherited = self._inherited(entry)
        if inherited is not None:
            self.kept = inherited
            return inherited, False
        ready: list[ProgramForm] = []
        pending: list[ProgramForm] = []
        waits = False
        runs_now = self._forms[0]
        for form in self._forms:
            state = _state(form.backend, entry, arguments, policy)
            if state is State.COMPILED:
                ready.append(form)
                if form.backend is not registry.reference and not form.captured:
                    runs_now = form
            elif state is not State.REFUSED:
                pending.append(form)
                waits = waits or not (form.backend.compiles_out_of_process or state is State.INTERPRETED)
        if entry.runs < policy.hot_after:
            return runs_now, False
        self._tries += 1
        if waits or (self._tries < _MOST_TRIES and any(not form.backend.compiles_out_of_process for form in pending)):
            return runs_now, False
        self._late = pending
        if len(ready) == 1:
            self.kept = ready[0]
            return self.kept, False
        self._begin(ready)
        return self._turn() or runs_now, True

    def _inherited(self, entry: CachedProgram) -> ProgramForm | None:
        """The form that was kept for another program of the same symbolic key, which shares its executables."""
        known = None if entry.shared is None else entry.shared.choice
        if known is None or known[0] != self.key:
            return None
        name: str = known[1]
        return next((form for form in self._forms if form.name == name), None)

    def _look_for_late(self, entry: CachedProgram, arguments: Arguments, policy: TierPolicy) -> None:
        """Measure forms that have come against the kept one."""
        states = [(form, _state(form.backend, entry, arguments, policy)) for form in self._late]
        come = [form for form, state in states if state is State.COMPILED]
        self._late = [form for form, state in states if state not in (State.COMPILED, State.REFUSED)]
        if come and self.measurements < _MOST_MEASUREMENTS:
            assert self.kept is not None
            self._begin([self.kept, *come])

    def _begin(self, forms: Sequence[ProgramForm]) -> None:
        for form in forms:
            form.begin()
        self._measured = [form for form in self._forms if form in forms]

    def _turn(self) -> ProgramForm | None:
        """Plain forms take turns; captured ones follow one by one: a graph is replayed without other runs between."""
        left = [form for form in self._measured if not form.finished]
        plain = [form for form in left if not form.captured]
        return min(plain, key=lambda form: form.runs + form.tries) if plain else left[0] if left else None

    def _decide(self, entry: CachedProgram) -> None:
        timed = [form for form in self._measured if form.timed]
        self._measured = []
        if not timed:
            self.kept = self.kept or self._forms[0]
            return
        least = min(form.least_cost_s for form in timed)
        self.kept = next(form for form in reversed(timed) if form.least_cost_s <= least * _EQUAL)
        self.measurements += 1
        if entry.shared is not None:
            entry.shared.choice = (self.key, self.kept.name)
        timings = tuple((form.name, form.least_s) for form in timed)
        emit(ChoiceEvent(entry.program.identity, self.kept.name, timings))


def choice_of(entry: CachedProgram, policy: TierPolicy) -> Choice:
    """The choice of a program under these settings."""
    choice: Choice | None = entry.choice
    if choice is None or choice.key != (policy.measures, policy.captures):
        choice = entry.choice = Choice(entry, policy)
    return choice


def _forms_of(entry: CachedProgram, policy: TierPolicy) -> list[ProgramForm]:
    """All forms of a program. Those that leave the GIL to the user's thread come later: they are preferred."""
    reference = registry.reference
    backends = [] if entry.single and not policy.waits else registry.measured(policy.measures)
    forms = [ProgramForm(reference, captured=False), *(ProgramForm(backend, captured=False) for backend in backends)]
    if policy.captures != "off" and graphs_of(entry.program.device) is not None:
        # A backend that calls kernels as recorded gives the graphs of the interpreter.
        capturable = [reference, *(backend for backend in backends if backend.form is not Form.RECORDED)]
        forms += [ProgramForm(backend, captured=True) for backend in capturable]
    return forms


def _state(backend: Backend, entry: CachedProgram, arguments: Arguments, policy: TierPolicy) -> State:
    """The compile state of a program on a backend, after a compile job was started where none is under way."""
    if backend is registry.reference:
        return State.COMPILED
    status = entry.status(backend)
    if status.state is State.INTERPRETED:
        select_executable(entry, arguments, policy.on(backend, captured=False))
    return status.state


def wait_for_device(device: torch.device) -> None:
    """Return when the device has done what was launched: measured runs begin and end so."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
