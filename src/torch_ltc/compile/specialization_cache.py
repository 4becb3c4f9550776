"""The specialization cache: programs with one symbolic key share the executables that were compiled for one of them.

Owns what is known about the integers and numbers in which such programs differ, the executables for them, and what to
compile next. It compiles nothing itself: `lookup` returns an executable that fits or a request, and the job that lowers
the request calls `install` or `fail`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch_ltc.compile.program_cache import CachedProgram
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
    number_texts,
    slot_source,
    slot_texts,
    symbolic_key,
)
from torch_ltc.pytorch.switches import TorchState
from torch_ltc.source import UNKNOWN, Source

__all__ = ["CacheMiss", "CompileRequest", "Lookup", "SpecializationCache", "Specializations", "specializations"]

# Bounds on compilations per backend: for programs that share a symbolic key, and for one program alone.
_MOST_COMPILES = 8
_MOST_COMPILES_ALONE = 4
# How many programs' integers are remembered for comparison, and how many programs may fail to run what they share.
_MOST_SEEN = 8
_MOST_FAILURES = 2
# How many promoted integers and numbers a message names.
_MOST_NAMED = 4
_POLL_S = 0.1

_tickets = itertools.count(1)


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The reason why no cached executable fits: the short name of the cause, a sentence, and the user's line.
    Empty when there is no executable."""

    cause: str = ""
    text: str = ""
    source: Source = UNKNOWN


@dataclass(frozen=True, slots=True, eq=False)
class CompileRequest:
    """A program to lower, and the cache miss that led to it. `specialization` is None when it is for this program
    alone."""

    ticket: int
    program: Program
    numbers: tuple[object, ...]
    varying: frozenset[int]
    specialization: Specialization | None
    miss: CacheMiss

    @property
    def promoted(self) -> str:
        """The integers and numbers that have become run-time inputs, in the user's terms."""
        places = () if self.specialization is None else self.specialization.places
        texts = slot_texts(self.program, places)
        texts += number_texts(self.program, sorted(self.varying))
        # A list of numbers is one thing to the user.
        unique = list(dict.fromkeys(texts))
        left = len(unique) - _MOST_NAMED
        return "; ".join(unique[:_MOST_NAMED]) + (f"; and {left} more" if left > 0 else "")

    @property
    def symbolic(self) -> bool:
        """True when some integers of the program are symbols."""
        return self.specialization is not None and bool(self.specialization.symbols)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to a lookup: an executable that fits; or a request that the caller is to start a job for; or one that
    is `under_way` already; or the error after which nothing more is compiled, `announced` if the user has seen it. With
    none of these the program is not hot."""

    executable: Executable | None = None
    request: CompileRequest | None = None
    under_way: CompileRequest | None = None
    refusal: BackendError | None = None
    announced: bool = False


_NOT_HOT = Lookup()


@dataclass(slots=True)
class _BackendEntries:
    """The executables of one backend in a cache, and what is known about making more."""

    compiled: list[Executable] = field(default_factory=list)
    # Executions since the last compilation that no executable fitted.
    misses: int = 0
    pending: CompileRequest | None = None
    compiles: int = 0
    failures: int = 0
    # Why sizes are constants here, if they must be.
    static: str = ""
    refusal: BackendError | None = None
    # Executables that were loaded from artifacts on disk, by path.
    files: dict[str, Executable] = field(default_factory=dict)

    def add(self, executable: Executable, symbolic: bool) -> None:
        """Add an executable. Code for constant sizes is tried first: it is faster."""
        if symbolic:
            self.compiled.append(executable)
        else:
            self.compiled.insert(0, executable)


class SpecializationCache:
    """The executables of programs with one symbolic key, or with `alone` of a single program.

    `addressing` has, for kernels that are called as recorded (True) and for the functional form (False), a call that
    addresses the storage of a value that another call made. Kernels lay results out as their sizes tell, so that such
    programs share only kernels that are called as recorded, and each only once its own execution in the interpreter has
    shown that results are laid out as recorded.
    """

    __slots__ = ("alone", "addressing", "seen", "numbers", "varying", "choice", "_entries", "__weakref__")

    def __init__(self, alone: bool, addressing: Mapping[bool, Call | None] | None = None) -> None:
        self.alone = alone
        self.addressing: Mapping[bool, Call | None] = addressing or {True: None, False: None}
        # Integers of programs that were executed, the latest last.
        self.seen: list[Values] = []
        # The run-time numbers of the latest miss, and the slots of those that change.
        self.numbers: list[object] | None = None
        self.varying: set[int] = set()
        # What was measured for one of the programs; see `execute/choice.py`.
        self.choice: tuple[object, str] | None = None
        self._entries: dict[Backend, _BackendEntries] = {}

    def observe(self, values: Values, numbers: Sequence[object]) -> None:
        """Note in what programs and executions differ."""
        if values in self.seen:
            self.seen.remove(values)
        elif len(self.seen) >= _MOST_SEEN:
            # The first ones stay: they differ most from the latest.
            del self.seen[_MOST_SEEN // 2]
        self.seen.append(values)
        if self.numbers is not None:
            pairs = enumerate(zip(self.numbers, numbers, strict=True))
            self.varying.update(slot for slot, (old, new) in pairs if not same_number(old, new))
        self.numbers = list(numbers)

    def entries(self, backend: Backend) -> _BackendEntries:
        """The entries of one backend."""
        return self._entries.setdefault(backend, _BackendEntries())

    def find(self, entry: CachedProgram, numbers: Sequence[object], backend: Backend) -> Executable | None:
        """An executable whose guards hold for this program and these numbers."""
        entries = self.entries(backend)
        cached = [executable for executable in entries.compiled if not executable.dropped]
        # What was evicted may be compiled again.
        entries.compiles -= len(entries.compiled) - len(cached)
        entries.compiled = cached
        for executable in entries.compiled:
            if executable.fits(numbers) and (self.alone or executable.takes(entry.values)):
                return executable
        return None


def _own(entry: CachedProgram) -> SpecializationCache:
    """The cache of one program alone. It begins with what executions on other backends showed of its numbers."""
    own: SpecializationCache | None = entry.own
    if own is None:
        own = entry.own = SpecializationCache(alone=True)
        shared: SpecializationCache | None = entry.shared
        if shared is not None and shared.numbers is not None:
            own.numbers = list(shared.numbers)
            own.varying = set(shared.varying)
    return own


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request that a job is at work on."""

    cache: SpecializationCache
    entry: CachedProgram
    backend: Backend
    done: threading.Event


class Specializations:
    """All specialization caches. Any thread may ask; a lock keeps them apart."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Found by comparing symbolic keys in full. A cache lives as long as a program of it.
        self._by_symbolic_key: WeakValueDictionary[tuple[Key, TorchState], SpecializationCache] = WeakValueDictionary()
        self._pending: dict[int, _Pending] = {}

    def __len__(self) -> int:
        return len(self._by_symbolic_key)

    def lookup(self, entry: CachedProgram, numbers: Sequence[object], backend: Backend, hot_after: int) -> Lookup:
        """An executable for one more execution of a program. A miss is counted."""
        entry.activate(backend)
        executable = entry.compiled
        if executable is not None and executable.fits(numbers):
            return Lookup(executable)
        with self._lock:
            entry.compiled = None
            shared = self._shared(entry, backend)
            if shared is not None:
                found = self._lookup(shared, entry, numbers, backend, hot_after)
                if found is not None:
                    return found
            elif entry.shared is not None:
                entry.shared.observe(entry.values, numbers)
            found = self._lookup(_own(entry), entry, numbers, backend, hot_after)
            assert found is not None
            return found

    def _shared(self, entry: CachedProgram, backend: Backend) -> SpecializationCache | None:
        """The cache that a program shares with others; None if it stands alone."""
        if not (settings.promotion and backend.symbolic_sizes):
            return None
        if entry.shared is None:
            key, entry.values = symbolic_key(entry.program)
            cache = self._by_symbolic_key.get((key, entry.torch_state))
            if cache is None:
                addressing = {recorded: addresses_storage(entry.program, recorded) for recorded in (True, False)}
                cache = SpecializationCache(alone=False, addressing=addressing)
                self._by_symbolic_key[key, entry.torch_state] = cache
            entry.shared = cache
        cache = entry.shared
        return None if cache.alone or (cache.addressing[False] and backend.form is not Form.RECORDED) else cache

    def _lookup(
        self,
        cache: SpecializationCache,
        entry: CachedProgram,
        numbers: Sequence[object],
        backend: Backend,
        hot_after: int,
    ) -> Lookup | None:
        """The same within one cache; None when the program must use its own."""
        if backend.form is Form.RECORDED and cache.addressing[True] is not None:
            copied = [call.layout.copied for call in entry.program.calls]
            if None in copied:
                # Where nothing is to run in the interpreter, it uses its own.
                return _NOT_HOT if hot_after > 1 else None
            if any(copied):
                return None
        cache.observe(entry.values, numbers)
        executable = cache.find(entry, numbers, backend)
        if executable is not None:
            try:
                entry.compiled = executable if cache.alone else executable.bind(entry.program, entry.values)
            except CompileError:
                # Its inputs alias in another way than those of the program that was compiled.
                entry.shared = SpecializationCache(alone=True)
                return None
            return Lookup(entry.compiled)
        return self._miss(cache, entry, numbers, backend, hot_after)

    def _miss(
        self,
        cache: SpecializationCache,
        entry: CachedProgram,
        numbers: Sequence[object],
        backend: Backend,
        hot_after: int,
    ) -> Lookup | None:
        """No executable fits: make a request once the program is hot."""
        entries = cache.entries(backend)
        entries.misses += 1
        if entries.refusal is not None:
            return Lookup(refusal=entries.refusal, announced=True)
        if max(entry.runs, 0 if cache.alone else entries.misses) < hot_after:
            return _NOT_HOT
        if entries.pending is not None:
            return Lookup(under_way=entries.pending)
        if entries.compiles >= (_MOST_COMPILES_ALONE if cache.alone else _MOST_COMPILES):
            entries.refusal = _exhausted(cache, entries, entry, numbers, backend)
            return Lookup(refusal=entries.refusal)
        request = _request(cache, entries, entry, numbers, backend)
        if request is None:
            entries.misses -= 1
            return None
        entries.pending = request
        self._pending[request.ticket] = _Pending(cache, entry, backend, threading.Event())
        return Lookup(request=request)

    # ---- for the job that compiles a request ------------------------------------------------------------------------

    def install(self, request: CompileRequest, executable: Executable) -> None:
        """Add the executable of a request: programs that it fits use it from now on."""
        with self._lock:
            _, entries = self._finish(request)
            entries.misses = 0
            entries.compiles += 1
            entries.add(executable, request.symbolic)

    def fail(self, request: CompileRequest, error: Exception) -> bool:
        """The request could not be compiled. True if the program should be looked up again: constant sizes may do."""
        with self._lock:
            pending, entries = self._finish(request)
            if pending.entry.shared is not None:
                entries = pending.entry.shared.entries(pending.backend)
            if request.symbolic:
                entries.static = f"sizes stay constants, because {(str(error).splitlines() or [''])[0]}"
                return True
            entries.failures += 1
            if entries.failures >= _MOST_FAILURES:
                # What fails for several programs of a kind is not tried for every other one.
                entries.refusal = error if isinstance(error, BackendError) else CompileError(str(error))
            return False

    def cancel(self, request: CompileRequest) -> None:
        """Nobody will compile the request now; it may be made again."""
        with self._lock:
            self._finish(request)

    def abandon(self, request: CompileRequest) -> None:
        """As `cancel`, if the job of the request has ended without a word."""
        with self._lock:
            if request.ticket in self._pending:
                self._finish(request)

    def _finish(self, request: CompileRequest) -> tuple[_Pending, _BackendEntries]:
        pending = self._pending.pop(request.ticket)
        entries = pending.cache.entries(pending.backend)
        entries.pending = None
        pending.done.set()
        return pending, entries

    def wait(self, request: CompileRequest, stopped: Callable[[], bool]) -> None:
        """Return when the job of another execution has finished this request, or `stopped` says that none will."""
        pending = self._pending.get(request.ticket)
        while pending is not None and not stopped() and not pending.done.wait(_POLL_S):
            pass

    def is_satisfied(self, request: CompileRequest) -> bool:
        """True when an executable that fits was loaded from disk since the request was made."""
        with self._lock:
            pending = self._pending[request.ticket]
            entry = pending.entry
            caches = [cache for cache in (pending.cache, entry.own) if cache is not None]
            return any(cache.find(entry, request.numbers, pending.backend) is not None for cache in caches)

    # ---- artifacts of earlier processes -----------------------------------------------------------------------------

    def _cache_for(self, entry: CachedProgram, backend: Backend, alone: bool) -> SpecializationCache:
        shared = None if alone else self._shared(entry, backend)
        return _own(entry) if shared is None else shared

    def has_file(self, entry: CachedProgram, backend: Backend, path: str, alone: bool) -> bool:
        """True when the artifact in this file is loaded already."""
        with self._lock:
            known = self._cache_for(entry, backend, alone).entries(backend).files.get(path)
            return known is not None and not known.dropped

    def install_loaded(self, entry: CachedProgram, backend: Backend, path: str, executable: Executable) -> None:
        """Add an executable that was loaded from an artifact, for this program and those that share it."""
        with self._lock:
            specialization = executable.specialization
            entries = self._cache_for(entry, backend, specialization is None).entries(backend)
            entries.files[path] = executable
            entries.add(executable, specialization is not None and bool(specialization.symbols))

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def fail_run(self, entry: CachedProgram, backend: Backend) -> None:
        """The executable of a program failed where the interpreter did not. One that fails for several programs is
        dropped."""
        with self._lock:
            cache, executable = entry.shared, entry.compiled
            if cache is None or executable is None or executable.origin not in cache.entries(backend).compiled:
                return
            entries = cache.entries(backend)
            entries.failures += 1
            if entries.failures >= _MOST_FAILURES:
                entries.compiled.remove(executable.origin)
                entries.static = "what was compiled for several programs failed to run"

    def clear(self) -> None:
        """Forget what programs share. Those that are still there go on with what they have."""
        with self._lock:
            self._by_symbolic_key.clear()


def _request(
    cache: SpecializationCache,
    entries: _BackendEntries,
    entry: CachedProgram,
    numbers: Sequence[object],
    backend: Backend,
) -> CompileRequest | None:
    """A request for a program and those that share its cache; None if it must be for the program alone, and the cache
    is not its own."""
    specialization = None if cache.alone else _specialization(cache, entries, entry, backend)
    if specialization is None and not cache.alone:
        return None
    varying = set(cache.varying)
    if specialization is not None and specialization.symbols:
        # A flag that did not change yet, in a program that others share, soon will.
        varying.update(slot for slot, number in enumerate(numbers) if isinstance(number, bool))
    miss = _cache_miss(entries, entry, numbers)
    if not miss.text and cache is entry.own and entry.shared is not None:
        miss = _miss_of_own(entry.shared, entry, backend)
    return CompileRequest(next(_tickets), entry.program, tuple(numbers), frozenset(varying), specialization, miss)


def _miss_of_own(shared: SpecializationCache, entry: CachedProgram, backend: Backend) -> CacheMiss:
    """The reason why a program is compiled by itself although others have its symbolic key."""
    static, call = shared.entries(backend).static, shared.addressing[backend.form is Form.RECORDED]
    if static:
        return CacheMiss("size", static, entry.program.calls[0].source)
    if call is None or len(shared.seen) < 2:
        return CacheMiss()
    text = f"sizes stay constants, because {call.name} at {call.source} looks at the memory of another call's result"
    return CacheMiss("size", text, call.source)


def _specialization(
    cache: SpecializationCache, entries: _BackendEntries, entry: CachedProgram, backend: Backend
) -> Specialization | None:
    """The integers that become symbols; None if all must be constants of this program alone."""
    if entries.static:
        return None
    if backend.form is Form.RECORDED:
        # Kernels take tensors of any size. Only where a result is laid out anew, its size is in the code.
        laid_out = any(call.layout.copied for call in entry.program.calls)
        inputs = input_slots(entry.program)
        return separate_symbols(cache.seen, [False] * len(inputs) if laid_out else inputs)
    lengths = length_slots(entry.program)
    seen = [*(values for values in cache.seen if not _has_empty_input(values, lengths)), entry.values]
    specialization = shared_symbols(seen, lengths)
    # PyTorch makes constants of sizes 0 and 1.
    return None if any(symbol.length and symbol.hint < 2 for symbol in specialization.symbols) else specialization


def _has_empty_input(values: Values, lengths: Sequence[bool]) -> bool:
    """True where the strides of an input say nothing, because it has no elements."""
    return any(length and value == 0 for length, value in zip(lengths, values, strict=True))


def _cache_miss(entries: _BackendEntries, entry: CachedProgram, numbers: Sequence[object]) -> CacheMiss:
    """The reason why the latest executable does not fit, in the user's terms."""
    if not entries.compiled:
        return CacheMiss()
    executable, program = entries.compiled[-1], entry.program
    wrong = executable.mismatches(numbers)
    if wrong:
        slot = min(wrong)
        was = dict(executable.fixed)[slot]
        text = f"{number_texts(program, (slot,))[0]} was {was!r} and is now {numbers[slot]!r}"
        return CacheMiss("number", text, number_source(program, slot))
    if executable.specialization is None:
        return CacheMiss()
    for slot in executable.specialization.mismatches(entry.values):
        was = executable.specialization.slots[slot]
        kind, source = slot_source(program, slot)
        return CacheMiss(kind, f"{slot_texts(program, (slot,))[0]} was {was} and is now {entry.values[slot]}", source)
    broken = executable.broken_guard(entry.values)
    return CacheMiss() if broken is None else CacheMiss("guard", f"guard {broken}", program.calls[0].source)


def _exhausted(
    cache: SpecializationCache,
    entries: _BackendEntries,
    entry: CachedProgram,
    numbers: Sequence[object],
    backend: Backend,
) -> BackendError:
    if cache.alone:
        what = f"program {entry.program.identity} again for each value of its numbers"
    else:
        what = f"programs like {entry.program.identity} again and again"
    reason = _cache_miss(entries, entry, numbers).text
    return CompileError(
        f"{backend.name} would have to compile {what}" + (f": {reason}" if reason else ""),
        source=str(entry.program.calls[0].source),
    )


specializations = Specializations()
