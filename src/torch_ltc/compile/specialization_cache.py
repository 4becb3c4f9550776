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

from torch_ltc.compile.program_cache import Entry
from torch_ltc.config import settings
from torch_ltc.errors import BackendError, CompileError
from torch_ltc.lowering.interface import Backend, Form
from torch_ltc.lowering.lower import Executable, same_number
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.specialization import Specialization, Values, separate_symbols, shared_symbols
from torch_ltc.program.symbolic_key import (
    Key,
    addresses_storage,
    input_slots,
    length_slots,
    number_source,
    number_text,
    slot_source,
    slot_text,
    symbolic_key,
)
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
class CacheMiss:
    """Why something is compiled although something was: the short name of the cause, a sentence, and the user's line.
    Empty when nothing was compiled before."""

    cause: str = ""
    text: str = ""
    source: Source = UNKNOWN


@dataclass(frozen=True, slots=True, eq=False)
class CompileRequest:
    """What is to be lowered, and why. `sizes` is None when it is for this program alone."""

    ticket: int
    program: Program
    numbers: tuple[object, ...]
    varying: frozenset[int]
    sizes: Specialization | None
    why: CacheMiss

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
class Lookup:
    """What there is for a program: something that fits it, whether it is hot, what to lower for it if it is, and the
    error that says that nothing more will be compiled."""

    executable: Executable | None = None
    hot: bool = False
    request: CompileRequest | None = None
    refusal: BackendError | None = None


_COLD = Lookup()


@dataclass(slots=True)
class _BackendEntries:
    """What one backend made for a family."""

    compiled: list[Executable] = field(default_factory=list)
    # Runs since the last compilation that nothing here could serve.
    misses: int = 0
    pending: CompileRequest | None = None
    compiles: int = 0
    failures: int = 0
    # Why sizes are constants here, if they must be.
    static: str = ""
    refusal: BackendError | None = None
    # What came from files.
    files: dict[str, Executable] = field(default_factory=dict)


class SpecializationCache:
    """The programs of one skeleton, or with `alone` a single program.

    `looks` has, for kernels that are called as recorded (True) and for the functional form (False), a call of theirs
    that looks at the memory of a value that another call made. Kernels lay results out as their sizes tell, so that
    such programs share only kernels that are called as recorded, and each only once its own run in the interpreter has
    shown that results lie as recorded.
    """

    __slots__ = ("alone", "looks", "seen", "numbers", "varying", "entries_by_backend", "__weakref__")

    def __init__(self, alone: bool, looks: Mapping[bool, Call | None] | None = None) -> None:
        self.alone = alone
        self.looks: Mapping[bool, Call | None] = looks or {True: None, False: None}
        # Integers of programs that were seen, the latest last.
        self.seen: list[Values] = []
        # The run-time numbers of the latest run that was not served, and the slots of those that change.
        self.numbers: list[object] | None = None
        self.varying: set[int] = set()
        self.entries_by_backend: dict[Backend, _BackendEntries] = {}

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

    def entries(self, backend: Backend) -> _BackendEntries:
        """What this backend made."""
        return self.entries_by_backend.setdefault(backend, _BackendEntries())

    def fitting(self, entry: Entry, numbers: Sequence[object], backend: Backend) -> Executable | None:
        """What fits this program and these numbers."""
        entries = self.entries(backend)
        kept = [executable for executable in entries.compiled if not executable.dropped]
        # What made room for others may be compiled again.
        entries.compiles -= len(entries.compiled) - len(kept)
        entries.compiled = kept
        for executable in entries.compiled:
            if executable.fits(numbers) and (self.alone or executable.takes(entry.values)):
                return executable
        return None


def _own(entry: Entry) -> SpecializationCache:
    """The family that a program is alone in. What is known of its numbers, from runs with other backends too, is known
    there."""
    own: SpecializationCache | None = entry.own
    if own is None:
        own = entry.own = SpecializationCache(alone=True)
        shared: SpecializationCache | None = entry.family
        if shared is not None and shared.numbers is not None:
            own.numbers = list(shared.numbers)
            own.varying = set(shared.varying)
    return own


class Specializations:
    """All families. Any thread may ask; a lock keeps them apart."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Found by comparing skeletons in full. A family lives as long as a program of it.
        self._by_symbolic_key: WeakValueDictionary[Key, SpecializationCache] = WeakValueDictionary()
        self._asked: dict[int, tuple[SpecializationCache, Entry, Backend]] = {}

    def __len__(self) -> int:
        return len(self._by_symbolic_key)

    def place(self, entry: Entry, numbers: Sequence[object], backend: Backend, hot_after: int) -> Lookup:
        """What there is for one more run of a program. Counts the run if nothing fits it."""
        entry.choose(backend)
        executable = entry.compiled
        if executable is not None and executable.fits(numbers):
            return Lookup(executable, True)
        with self._lock:
            entry.compiled = None
            shared = self._shared(entry, backend)
            if shared is not None:
                result = self._place(shared, entry, numbers, backend, hot_after)
                if result is not None:
                    return result
            elif entry.family is not None:
                entry.family.note(entry.values, numbers)
            result = self._place(_own(entry), entry, numbers, backend, hot_after)
            assert result is not None
            return result

    def _shared(self, entry: Entry, backend: Backend) -> SpecializationCache | None:
        """The family of a program; None if it stands alone."""
        if not (settings.promotion and backend.symbolic_sizes):
            return None
        if entry.family is None:
            key, entry.values = symbolic_key(entry.program)
            family = self._by_symbolic_key.get(key)
            if family is None:
                looks = {recorded: addresses_storage(entry.program, recorded) for recorded in (True, False)}
                family = SpecializationCache(alone=False, looks=looks)
                self._by_symbolic_key[key] = family
            entry.family = family
        family = entry.family
        return None if family.alone or (family.looks[False] and backend.form is not Form.RECORDED) else family

    def _place(
        self, family: SpecializationCache, entry: Entry, numbers: Sequence[object], backend: Backend, hot_after: int
    ) -> Lookup | None:
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
                entry.family = SpecializationCache(alone=True)
                return None
            return Lookup(entry.compiled, True)
        entries = family.entries(backend)
        entries.misses += 1
        if entries.refusal is not None:
            entry.refused.setdefault(backend, entries.refusal)
            return _COLD
        if max(entry.runs, 0 if family.alone else entries.misses) < hot_after:
            return _COLD
        if entries.pending is None:
            if entries.compiles >= (_MOST_COMPILES_ALONE if family.alone else _MOST_COMPILES):
                entries.refusal = _exhausted(family, entries, entry, numbers, backend)
                return Lookup(hot=True, refusal=entries.refusal)
            request = _request(family, entries, entry, numbers, backend)
            if request is None:
                entries.misses -= 1
                return None
            entries.pending = request
            self._asked[request.ticket] = (family, entry, backend)
        return Lookup(hot=True, request=entries.pending)

    def installed(self, request: CompileRequest, executable: Executable) -> None:
        """What was asked for has been made: programs that it fits are given it from now on."""
        with self._lock:
            family, _, backend = self._asked.pop(request.ticket)
            entries = family.entries(backend)
            entries.pending = None
            entries.misses = 0
            entries.compiles += 1
            if request.symbolic:
                entries.compiled.append(executable)
            else:
                # Code for one size is tried first: it is faster.
                entries.compiled.insert(0, executable)

    def _holder(self, entry: Entry, backend: Backend, alone: bool) -> SpecializationCache:
        shared = None if alone else self._shared(entry, backend)
        return _own(entry) if shared is None else shared

    def has_file(self, entry: Entry, backend: Backend, path: str, alone: bool) -> bool:
        """True when what is in this file is there already."""
        with self._lock:
            known = self._holder(entry, backend, alone).entries(backend).files.get(path)
            return known is not None and not known.dropped

    def adopted(self, entry: Entry, backend: Backend, path: str, executable: Executable) -> None:
        """What an earlier process compiled and put into this file is there for this program, and for those that share
        it."""
        with self._lock:
            entries = self._holder(entry, backend, executable.specialization is None).entries(backend)
            entries.files[path] = executable
            if executable.specialization is not None and executable.specialization.symbols:
                entries.compiled.append(executable)
            else:
                entries.compiled.insert(0, executable)

    def failed(self, request: CompileRequest, error: Exception) -> bool:
        """It could not be made. True if the program should be placed again, because something else may do."""
        with self._lock:
            family, entry, backend = self._asked.pop(request.ticket)
            family.entries(backend).pending = None
            entries = (entry.family or family).entries(backend)
            if request.symbolic:
                entries.static = f"sizes stay constants, because {(str(error).splitlines() or [''])[0]}"
                return True
            entries.failures += 1
            if entries.failures >= _MOST_FAILURES:
                # What fails for several programs of a kind is not tried for every other one.
                entries.refusal = error if isinstance(error, BackendError) else CompileError(str(error))
            return False

    def blamed(self, entry: Entry, backend: Backend) -> None:
        """What an entry uses could not run its program, though the interpreter could. What fails for several programs
        is used for no other one."""
        with self._lock:
            family, executable = entry.family, entry.compiled
            if family is None or executable is None or executable.origin not in family.entries(backend).compiled:
                return
            entries = family.entries(backend)
            entries.failures += 1
            if entries.failures >= _MOST_FAILURES:
                entries.compiled.remove(executable.origin)
                entries.static = "what was compiled for several programs failed to run"

    def clear(self) -> None:
        """Forget what programs share. Those that are still there go on with what they have."""
        with self._lock:
            self._by_symbolic_key.clear()

    def served(self, request: CompileRequest) -> bool:
        """True when something that fits has come from elsewhere since it was asked for."""
        with self._lock:
            family, entry, backend = self._asked[request.ticket]
            holders = [holder for holder in (family, entry.own) if holder is not None]
            return any(holder.fitting(entry, request.numbers, backend) is not None for holder in holders)

    def withdrawn(self, request: CompileRequest) -> None:
        """Nobody will make it now; it may be asked for again."""
        with self._lock:
            family, _, backend = self._asked.pop(request.ticket)
            family.entries(backend).pending = None


def _request(
    family: SpecializationCache, entries: _BackendEntries, entry: Entry, numbers: Sequence[object], backend: Backend
) -> CompileRequest | None:
    """What to lower for a program and its family; None if it must be for the program alone, and the family is not."""
    sizes = None if family.alone else _sizes(family, entries, entry, backend)
    if sizes is None and not family.alone:
        return None
    varying = set(family.varying)
    if sizes is not None and sizes.symbols:
        # A flag that did not change yet, in a program that others share, soon will.
        varying.update(slot for slot, number in enumerate(numbers) if isinstance(number, bool))
    why = _cache_miss(entries, entry, numbers)
    if not why.text and family is entry.own and entry.family is not None:
        why = _why_alone(entry.family, entry, backend)
    return CompileRequest(next(_tickets), entry.program, tuple(numbers), frozenset(varying), sizes, why)


def _why_alone(shared: SpecializationCache, entry: Entry, backend: Backend) -> CacheMiss:
    """Why a program is compiled by itself although there is another one of its skeleton."""
    static, call = shared.entries(backend).static, shared.looks[backend.form is Form.RECORDED]
    if static:
        return CacheMiss("size", static, entry.program.calls[0].source)
    if call is None or len(shared.seen) < 2:
        return CacheMiss()
    text = f"sizes stay constants, because {call.name} at {call.source} looks at the memory of another call's result"
    return CacheMiss("size", text, call.source)


def _sizes(
    family: SpecializationCache, entries: _BackendEntries, entry: Entry, backend: Backend
) -> Specialization | None:
    """What becomes of the integers; None if they must be constants of this program alone."""
    if entries.static:
        return None
    if backend.form is Form.RECORDED:
        # Kernels take tensors of any size. Only where a result is laid out anew, its size is in the code.
        laid_out = any(call.layout.copied for call in entry.program.calls)
        inputs = input_slots(entry.program)
        return separate_symbols(family.seen, [False] * len(inputs) if laid_out else inputs)
    lengths = length_slots(entry.program)
    seen = [*(values for values in family.seen if not _empty_input(values, lengths)), entry.values]
    sizes = shared_symbols(seen, lengths)
    # PyTorch makes constants of sizes 0 and 1.
    return None if any(symbol.length and symbol.hint < 2 for symbol in sizes.symbols) else sizes


def _empty_input(values: Values, lengths: Sequence[bool]) -> bool:
    """True where the strides of an input say nothing, because it has no elements."""
    return any(length and value == 0 for length, value in zip(lengths, values, strict=True))


def _cache_miss(entries: _BackendEntries, entry: Entry, numbers: Sequence[object]) -> CacheMiss:
    """Why what there is does not fit, in the user's terms."""
    if not entries.compiled:
        return CacheMiss()
    executable, program = entries.compiled[-1], entry.program
    wrong = executable.mismatches(numbers)
    if wrong:
        slot = min(wrong)
        was = dict(executable.fixed)[slot]
        text = f"{number_text(program, slot)} was {was!r} and is now {numbers[slot]!r}"
        return CacheMiss("number", text, number_source(program, slot))
    if executable.specialization is None:
        return CacheMiss()
    for slot in executable.specialization.mismatches(entry.values):
        was = executable.specialization.slots[slot]
        kind, source = slot_source(program, slot)
        return CacheMiss(kind, f"{slot_text(program, slot)} was {was} and is now {entry.values[slot]}", source)
    broken = executable.broken_guard(entry.values)
    return CacheMiss() if broken is None else CacheMiss("guard", f"guard {broken}", program.calls[0].source)


def _exhausted(
    family: SpecializationCache, entries: _BackendEntries, entry: Entry, numbers: Sequence[object], backend: Backend
) -> BackendError:
    if family.alone:
        what = f"program {entry.program.identity} again for each value of its numbers"
    else:
        what = f"programs like {entry.program.identity} again and again"
    reason = _cache_miss(entries, entry, numbers).text
    return CompileError(
        f"{backend.name} would have to compile {what}" + (f": {reason}" if reason else ""),
        source=str(entry.program.calls[0].source),
    )


specializations = Specializations()
