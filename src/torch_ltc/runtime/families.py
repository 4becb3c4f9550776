"""Families: programs with one skeleton share what was compiled for one of them.

Owns what is known about the integers and numbers in which the programs of a family differ, what was compiled for them,
and what to compile next. It compiles nothing itself: `place` says what is there and what is asked for, and whoever
lowers that says `installed` or `failed`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch_ltc.config import settings
from torch_ltc.errors import BackendError, CompileError
from torch_ltc.lowering.interface import Backend, Form
from torch_ltc.lowering.lower import Lowered, same_number
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.sizes import Sizes, Values, separate_sizes, shared_sizes
from torch_ltc.program.skeleton import (
    Key,
    addresses_storage,
    input_slots,
    length_slots,
    number_source,
    number_text,
    skeleton,
    slot_source,
    slot_text,
)
from torch_ltc.runtime.cache import Entry
from torch_ltc.source import UNKNOWN, Source

# How often a family is compiled for one backend, or a program that stands alone; how many programs' integers are kept
# to compare; and how many programs may fail to run what they share.
_MOST_COMPILES = 8
_MOST_COMPILES_ALONE = 4
_MOST_KEPT = 8
_MOST_FAILURES = 2
# How many promoted integers and numbers a message names.
_MOST_NAMED = 4

_tickets = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why something is compiled although something was: the short name of the cause, a sentence, and the user's line.
    Empty when nothing was compiled before."""

    cause: str = ""
    text: str = ""
    source: Source = UNKNOWN


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What is to be lowered, and why. `sizes` is None when it is for this program alone."""

    ticket: int
    program: Program
    numbers: tuple[object, ...]
    varying: frozenset[int]
    sizes: Sizes | None
    why: Misfit

    @property
    def promoted(self) -> str:
        """The integers and numbers that have become run-time inputs, in the user's terms."""
        places = () if self.sizes is None else self.sizes.places
        texts = [slot_text(self.program, slot) for slot in places]
        texts += [number_text(self.program, slot) for slot in sorted(self.varying)]
        # A list of numbers is one thing to the user.
        unique = list(dict.fromkeys(texts))
        left = len(unique) - _MOST_NAMED
        return "; ".join(unique[:_MOST_NAMED]) + (f"; and {left} more" if left > 0 else "")

    @property
    def symbolic(self) -> bool:
        """True when some integers of the program are symbols."""
        return self.sizes is not None and bool(self.sizes.symbols)


@dataclass(frozen=True, slots=True)
class Placement:
    """What there is for a program: something that fits it, whether it is hot, what to lower for it if it is, and the
    error that says that nothing more will be compiled."""

    lowered: Lowered | None = None
    hot: bool = False
    request: Request | None = None
    refusal: BackendError | None = None


_COLD = Placement()


@dataclass(slots=True)
class _Shelf:
    """What one backend made for a family."""

    compiled: list[Lowered] = field(default_factory=list)
    # Runs since the last compilation that nothing here could serve.
    misses: int = 0
    pending: Request | None = None
    compiles: int = 0
    failures: int = 0
    # Why sizes are constants here, if they must be.
    static: str = ""
    refusal: BackendError | None = None
    # What came from files.
    files: dict[str, Lowered] = field(default_factory=dict)


class Family:
    """The programs of one skeleton, or with `alone` a single program.

    `looks` has, for kernels that are called as recorded (True) and for the functional form (False), a call of theirs
    that looks at the memory of a value that another call made. Kernels lay results out as their sizes tell, so that
    such programs share only kernels that are called as recorded, and each only once its own run in the interpreter has
    shown that results lie as recorded.
    """

    __slots__ = ("alone", "looks", "seen", "numbers", "varying", "shelves", "__weakref__")

    def __init__(self, alone: bool, looks: Mapping[bool, Call | None] | None = None) -> None:
        self.alone = alone
        self.looks: Mapping[bool, Call | None] = looks or {True: None, False: None}
        # Integers of programs that were seen, the latest last.
        self.seen: list[Values] = []
        # The run-time numbers of the latest run that was not served, and the slots of those that change.
        self.numbers: list[object] | None = None
        self.varying: set[int] = set()
        self.shelves: dict[Backend, _Shelf] = {}

    def note(self, values: Values, numbers: Sequence[object]) -> None:
        """Remember in what programs and runs differ."""
        if values in self.seen:
            self.seen.remove(values)
        elif len(self.seen) >= _MOST_KEPT:
            # The first ones stay: they differ most from the latest.
            del self.seen[_MOST_KEPT // 2]
        self.seen.append(values)
        if self.numbers is not None:
            pairs = enumerate(zip(self.numbers, numbers, strict=True))
            self.varying.update(slot for slot, (old, new) in pairs if not same_number(old, new))
        self.numbers = list(numbers)

    def shelf(self, backend: Backend) -> _Shelf:
        """What this backend made."""
        return self.shelves.setdefault(backend, _Shelf())

    def fitting(self, entry: Entry, numbers: Sequence[object], backend: Backend) -> Lowered | None:
        """What fits this program and these numbers."""
        shelf = self.shelf(backend)
        kept = [lowered for lowered in shelf.compiled if not lowered.dropped]
        # What made room for others may be compiled again.
        shelf.compiles -= len(shelf.compiled) - len(kept)
        shelf.compiled = kept
        for lowered in shelf.compiled:
            if lowered.fits(numbers) and (self.alone or lowered.takes(entry.values)):
                return lowered
        return None


def _own(entry: Entry) -> Family:
    """The family that a program is alone in. What is known of its numbers, from runs with other backends too, is known
    there."""
    own: Family | None = entry.own
    if own is None:
        own = entry.own = Family(alone=True)
        shared: Family | None = entry.family
        if shared is not None and shared.numbers is not None:
            own.numbers = list(shared.numbers)
            own.varying = set(shared.varying)
    return own


class Families:
    """All families. Any thread may ask; a lock keeps them apart."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Found by comparing skeletons in full. A family lives as long as a program of it.
        self._by_skeleton: WeakValueDictionary[Key, Family] = WeakValueDictionary()
        self._asked: dict[int, tuple[Family, Entry, Backend]] = {}

    def __len__(self) -> int:
        return len(self._by_skeleton)

    def place(self, entry: Entry, numbers: Sequence[object], backend: Backend, hot_after: int) -> Placement:
        """What there is for one more run of a program. Counts the run if nothing fits it."""
        entry.choose(backend)
        lowered = entry.compiled
        if lowered is not None and lowered.fits(numbers):
            return Placement(lowered, True)
        with self._lock:
            entry.compiled = None
            shared = self._shared(entry, backend)
            if shared is not None:
                placement = self._place(shared, entry, numbers, backend, hot_after)
                if placement is not None:
                    return placement
            elif entry.family is not None:
                entry.family.note(entry.values, numbers)
            placement = self._place(_own(entry), entry, numbers, backend, hot_after)
            assert placement is not None
            return placement

    def _shared(self, entry: Entry, backend: Backend) -> Family | None:
        """The family of a program; None if it stands alone."""
        if not (settings.promotion and backend.symbolic_sizes):
            return None
        if entry.family is None:
            key, entry.values = skeleton(entry.program)
            family = self._by_skeleton.get(key)
            if family is None:
                looks = {recorded: addresses_storage(entry.program, recorded) for recorded in (True, False)}
                family = Family(alone=False, looks=looks)
                self._by_skeleton[key] = family
            entry.family = family
        family = entry.family
        return None if family.alone or (family.looks[False] and backend.form is not Form.RECORDED) else family

    def _place(
        self, family: Family, entry: Entry, numbers: Sequence[object], backend: Backend, hot_after: int
    ) -> Placement | None:
        """The same within one family; None when the program must look after itself."""
        if backend.form is Form.RECORDED and family.looks[True] is not None:
            copied = [call.layout.copied for call in entry.program.calls]
            if None in copied:
                # Where nothing is to run in the interpreter, it looks after itself.
                return _COLD if hot_after > 1 else None
            if any(copied):
                return None
        family.note(entry.values, numbers)
        found = family.fitting(entry, numbers, backend)
        if found is not None:
            try:
                entry.compiled = found if family.alone else found.bind(entry.program, entry.values)
            except CompileError:
                # Its inputs share memory in another way than those of the program that was compiled.
                entry.family = Family(alone=True)
                return None
            return Placement(entry.compiled, True)
        shelf = family.shelf(backend)
        shelf.misses += 1
        if shelf.refusal is not None:
            entry.refused.setdefault(backend, shelf.refusal)
            return _COLD
        if max(entry.runs, 0 if family.alone else shelf.misses) < hot_after:
            return _COLD
        if shelf.pending is None:
            if shelf.compiles >= (_MOST_COMPILES_ALONE if family.alone else _MOST_COMPILES):
                shelf.refusal = _exhausted(family, shelf, entry, numbers, backend)
                return Placement(hot=True, refusal=shelf.refusal)
            request = _request(family, shelf, entry, numbers, backend)
            if request is None:
                shelf.misses -= 1
                return None
            shelf.pending = request
            self._asked[request.ticket] = (family, entry, backend)
        return Placement(hot=True, request=shelf.pending)

    def installed(self, request: Request, lowered: Lowered) -> None:
        """What was asked for has been made: programs that it fits are given it from now on."""
        with self._lock:
            family, _, backend = self._asked.pop(request.ticket)
            shelf = family.shelf(backend)
            shelf.pending = None
            shelf.misses = 0
            shelf.compiles += 1
            if request.symbolic:
                shelf.compiled.append(lowered)
            else:
                # Code for one size is tried first: it is faster.
                shelf.compiled.insert(0, lowered)

    def _holder(self, entry: Entry, backend: Backend, alone: bool) -> Family:
        shared = None if alone else self._shared(entry, backend)
        return _own(entry) if shared is None else shared

    def has_file(self, entry: Entry, backend: Backend, path: str, alone: bool) -> bool:
        """True when what is in this file is there already."""
        with self._lock:
            known = self._holder(entry, backend, alone).shelf(backend).files.get(path)
            return known is not None and not known.dropped

    def adopted(self, entry: Entry, backend: Backend, path: str, lowered: Lowered) -> None:
        """What an earlier process compiled and put into this file is there for this program, and for those that share
        it."""
        with self._lock:
            shelf = self._holder(entry, backend, lowered.sizes is None).shelf(backend)
            shelf.files[path] = lowered
            if lowered.sizes is not None and lowered.sizes.symbols:
                shelf.compiled.append(lowered)
            else:
                shelf.compiled.insert(0, lowered)

    def failed(self, request: Request, error: Exception) -> bool:
        """It could not be made. True if the program should be placed again, because something else may do."""
        with self._lock:
            family, entry, backend = self._asked.pop(request.ticket)
            family.shelf(backend).pending = None
            shelf = (entry.family or family).shelf(backend)
            if request.symbolic:
                shelf.static = f"sizes stay constants, because {(str(error).splitlines() or [''])[0]}"
                return True
            shelf.failures += 1
            if shelf.failures >= _MOST_FAILURES:
                # What fails for several programs of a kind is not tried for every other one.
                shelf.refusal = error if isinstance(error, BackendError) else CompileError(str(error))
            return False

    def blamed(self, entry: Entry, backend: Backend) -> None:
        """What an entry uses could not run its program, though the interpreter could. What fails for several programs
        is used for no other one."""
        with self._lock:
            family, lowered = entry.family, entry.compiled
            if family is None or lowered is None or lowered.origin not in family.shelf(backend).compiled:
                return
            shelf = family.shelf(backend)
            shelf.failures += 1
            if shelf.failures >= _MOST_FAILURES:
                shelf.compiled.remove(lowered.origin)
                shelf.static = "what was compiled for several programs failed to run"

    def clear(self) -> None:
        """Forget what programs share. Those that are still there go on with what they have."""
        with self._lock:
            self._by_skeleton.clear()

    def served(self, request: Request) -> bool:
        """True when something that fits has come from elsewhere since it was asked for."""
        with self._lock:
            family, entry, backend = self._asked[request.ticket]
            holders = [holder for holder in (family, entry.own) if holder is not None]
            return any(holder.fitting(entry, request.numbers, backend) is not None for holder in holders)

    def withdrawn(self, request: Request) -> None:
        """Nobody will make it now; it may be asked for again."""
        with self._lock:
            family, _, backend = self._asked.pop(request.ticket)
            family.shelf(backend).pending = None


def _request(
    family: Family, shelf: _Shelf, entry: Entry, numbers: Sequence[object], backend: Backend
) -> Request | None:
    """What to lower for a program and its family; None if it must be for the program alone, and the family is not."""
    sizes = None if family.alone else _sizes(family, shelf, entry, backend)
    if sizes is None and not family.alone:
        return None
    varying = set(family.varying)
    if sizes is not None and sizes.symbols:
        # A flag that did not change yet, in a program that others share, soon will.
        varying.update(slot for slot, number in enumerate(numbers) if isinstance(number, bool))
    why = _misfit(shelf, entry, numbers)
    if not why.text and family is entry.own and entry.family is not None:
        why = _why_alone(entry.family, entry, backend)
    return Request(next(_tickets), entry.program, tuple(numbers), frozenset(varying), sizes, why)


def _why_alone(shared: Family, entry: Entry, backend: Backend) -> Misfit:
    """Why a program is compiled by itself although there is another one of its skeleton."""
    static, call = shared.shelf(backend).static, shared.looks[backend.form is Form.RECORDED]
    if static:
        return Misfit("size", static, entry.program.calls[0].source)
    if call is None or len(shared.seen) < 2:
        return Misfit()
    text = f"sizes stay constants, because {call.name} at {call.source} looks at the memory of another call's result"
    return Misfit("size", text, call.source)


def _sizes(family: Family, shelf: _Shelf, entry: Entry, backend: Backend) -> Sizes | None:
    """What becomes of the integers; None if they must be constants of this program alone."""
    if shelf.static:
        return None
    if backend.form is Form.RECORDED:
        # Kernels take tensors of any size. Only where a result is laid out anew, its size is in the code.
        laid_out = any(call.layout.copied for call in entry.program.calls)
        inputs = input_slots(entry.program)
        return separate_sizes(family.seen, [False] * len(inputs) if laid_out else inputs)
    lengths = length_slots(entry.program)
    seen = [*(values for values in family.seen if not _empty_input(values, lengths)), entry.values]
    sizes = shared_sizes(seen, lengths)
    # PyTorch makes constants of sizes 0 and 1.
    return None if any(symbol.length and symbol.hint < 2 for symbol in sizes.symbols) else sizes


def _empty_input(values: Values, lengths: Sequence[bool]) -> bool:
    """True where the strides of an input say nothing, because it has no elements."""
    return any(length and value == 0 for length, value in zip(lengths, values, strict=True))


def _misfit(shelf: _Shelf, entry: Entry, numbers: Sequence[object]) -> Misfit:
    """Why what there is does not fit, in the user's terms."""
    if not shelf.compiled:
        return Misfit()
    lowered, program = shelf.compiled[-1], entry.program
    wrong = lowered.misfits(numbers)
    if wrong:
        slot = min(wrong)
        was = dict(lowered.fixed)[slot]
        text = f"{number_text(program, slot)} was {was!r} and is now {numbers[slot]!r}"
        return Misfit("number", text, number_source(program, slot))
    if lowered.sizes is None:
        return Misfit()
    for slot in lowered.sizes.misfits(entry.values):
        was = lowered.sizes.slots[slot]
        kind, source = slot_source(program, slot)
        return Misfit(kind, f"{slot_text(program, slot)} was {was} and is now {entry.values[slot]}", source)
    broken = lowered.broken_guard(entry.values)
    return Misfit() if broken is None else Misfit("guard", f"guard {broken}", program.calls[0].source)


def _exhausted(
    family: Family, shelf: _Shelf, entry: Entry, numbers: Sequence[object], backend: Backend
) -> BackendError:
    if family.alone:
        what = f"program {entry.program.identity} again for each value of its numbers"
    else:
        what = f"programs like {entry.program.identity} again and again"
    reason = _misfit(shelf, entry, numbers).text
    return CompileError(
        f"{backend.name} would have to compile {what}" + (f": {reason}" if reason else ""),
        source=str(entry.program.calls[0].source),
    )


families = Families()
