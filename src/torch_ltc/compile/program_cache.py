"""The program cache: what is cached for each known program, and the bound on executables.

A cached program hangs on the tree node where it was cut, under its live outputs: it is found by comparing keys in full.
The fingerprint exists for people and files; nothing is decided by it alone.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakSet

from torch_ltc.compile.state import CompileStatus, State
from torch_ltc.config import settings
from torch_ltc.lowering.interface import Backend, Computation
from torch_ltc.lowering.lower import Executable
from torch_ltc.program.collectives import collectives_of
from torch_ltc.program.effects import may_fail
from torch_ltc.program.instruction import Call, Program, Return, written_positions
from torch_ltc.program.spec import Spec
from torch_ltc.program.text import program_text
from torch_ltc.pytorch.switches import TorchState

_identities = itertools.count(1)


def next_identity() -> int:
    """A number for a new program."""
    return next(_identities)


class CachedProgram:
    """A program, its reference computation, its executables, and its compile status on each backend."""

    __slots__ = (
        "program",
        "torch_state",
        "single",
        "collective",
        "runs",
        "took_s",
        "ran_s",
        "reference",
        "compiled",
        "backend",
        "inactive",
        "tracked",
        "_statuses",
        "op_counts",
        "_restored",
        "written",
        "written_positions",
        "in_place",
        "input_buffers",
        "input_specs",
        "origins",
        "_outputs",
        "_makers",
        "latest",
        "shared",
        "own",
        "capture",
        "choice",
        "last_outputs",
        "values",
        "fingerprint",
        "__weakref__",
    )

    def __init__(self, program: Program, torch_state: TorchState | None = None) -> None:
        self.program = program
        # The state of PyTorch's global switches that it was recorded in.
        self.torch_state = torch_state or TorchState.current()
        # One call at most: a backend's code for it does what PyTorch's kernel does.
        self.single = len(program.calls) <= 1
        # It talks to other ranks: no run of it may be repeated.
        self.collective = bool(collectives_of(program))
        self.runs = 0
        # The time of its last run, or an estimate of it.
        self.took_s: float | None = None
        # The duration of its last run.
        self.ran_s: float | None = None
        self.reference: Computation | None = None
        # The executable of the active backend, and those of backends that were active before.
        self.compiled: Executable | None = None
        self.backend: Backend | None = None
        self.inactive: dict[Backend, Executable] = {}
        # The executable that `executables` counts this program as a user of.
        self.tracked: Executable | None = None
        self._statuses: dict[Backend, CompileStatus] = {}
        self.op_counts = program.op_counts()
        self.written = tuple(sorted(written_inputs(program, len(program.instructions))))
        # Computed on demand, which is when the program is compiled: most programs never are.
        self._restored: tuple[int, ...] | None = None
        self._outputs: list[tuple[int, Spec]] | None = None
        self._makers: tuple[Call | None, ...] | None = None
        self.written_positions = _first_positions(program, set(self.written))
        # For each input the position of its buffer and its spec; for each output what its buffer is told of its maker.
        self.input_buffers = [instruction.buffer for instruction in program.inputs]
        self.input_specs = [instruction.spec for instruction in program.inputs]
        self.origins = [(program, number) for number in program.outputs]
        # The run-time numbers when it was last synced.
        self.latest: list[object] = []
        # The specializations that it shares with programs of the same symbolic key, with its own integers in that key,
        # and those of this program alone; see `specialization_cache`.
        self.shared: Any = None
        self.own: Any = None
        # How it is captured (see `execute/capture.py`), and weak references to the buffers of its last execution.
        self.capture: Any = None
        self.last_outputs: list[Any] = []
        # What is known of the time that it takes; see `execute/in_place.py`.
        self.in_place: Any = None
        # The form that it runs in, with the backend "auto"; see `execute/choice.py`.
        self.choice: Any = None
        self.values: tuple[int, ...] = ()
        self.fingerprint = b""

    def status(self, backend: Backend) -> CompileStatus:
        """The compile status of the program on this backend."""
        status = self._statuses.get(backend)
        if status is None:
            status = self._statuses[backend] = CompileStatus(self.program.identity, backend.name)
        return status

    @property
    def restored(self) -> tuple[int, ...]:
        """Positions of the inputs that the program writes to before its last call that may fail."""
        if self._restored is None:
            self._restored = inputs_to_restore(self.program) if self.written else ()
        return self._restored

    @property
    def outputs(self) -> list[tuple[int, Spec]]:
        """Value number and spec of each output."""
        if self._outputs is None:
            specs = self.program.specs()
            self._outputs = [(number, specs[number]) for number in self.program.outputs]
        return self._outputs

    @property
    def makers(self) -> tuple[Call | None, ...]:
        """The call that makes each output."""
        if self._makers is None:
            self._makers = tuple([self.program.maker_of(number) for number in self.program.outputs])
        return self._makers

    def evict(self, executable: Executable) -> None:
        """Drop an executable, or what was bound from it."""
        held = dict(self.inactive)
        if self.compiled is not None and self.backend is not None:
            held[self.backend] = self.compiled
        for backend, other in held.items():
            if other.origin is executable:
                self.inactive.pop(backend, None)
                if backend is self.backend:
                    self.compiled = None
                self.status(backend).move(State.INTERPRETED, "its executable was evicted (setting executables_bound)")
        self.tracked = None

    def activate(self, backend: Backend) -> None:
        """Let `compiled` be this backend's executable, or None."""
        if self.backend is not backend:
            if self.compiled is not None and self.backend is not None:
                self.inactive[self.backend] = self.compiled
            self.compiled = self.inactive.pop(backend, None)
            self.backend = backend


def written_inputs(program: Program, calls: int) -> set[int]:
    """Input buffers that the first `calls` calls of the program write to."""
    buffer_of_value: dict[int, int] = {i.number: i.buffer for i in program.inputs}
    written: set[int] = set()
    for call in program.calls[:calls]:
        first = call.returns[0] if call.returns else None
        # Most calls make something new and write nothing.
        if not (isinstance(first, Return) and first.operand < 0 and len(call.returns) == 1):
            for item, number in zip(call.flat_returns, call.numbers, strict=True):
                operand = call.operands[item.operand] if item.operand >= 0 and number >= 0 else -1
                if operand in buffer_of_value:
                    buffer_of_value[number] = buffer_of_value[operand]
        if written_positions(call.op):
            written.update([buffer_of_value[n] for n in call.mutated if n in buffer_of_value])
    return written


def inputs_to_restore(program: Program) -> tuple[int, ...]:
    """Positions of the inputs that the program writes to before its last call that may fail."""
    calls = program.calls
    last = max((i for i, call in enumerate(calls) if may_fail(call)), default=0)
    return _first_positions(program, written_inputs(program, last))


def _first_positions(program: Program, buffers: set[int]) -> tuple[int, ...]:
    """For each of these input buffers the position of one input that sees it."""
    first: dict[int, int] = {}
    for position, instruction in enumerate(program.inputs):
        first.setdefault(instruction.buffer, position)
    return tuple(first[buffer] for buffer in sorted(buffers))


def fingerprint(program: Program) -> bytes:
    """16 bytes that stand for the program's text without source lines. Not an identity: two programs may share them."""
    return hashlib.blake2b(program_text(program, "none").encode(), digest_size=16).digest()


class ExecutableCache:
    """Least recently used bound on executables, and the fingerprint table for callers that have only bytes.

    The worker uses programs while the user's threads drop them: a lock keeps them apart. Programs are told of evictions
    outside of it: their listeners may do anything.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Executables by identity, with the programs that use them: several programs may share one.
        self._users: OrderedDict[int, tuple[Executable, WeakSet[CachedProgram]]] = OrderedDict()
        self._by_fingerprint: dict[bytes, CachedProgram] = {}
        # The one that was used last, and how often settings had been assigned then: using it again changes nothing.
        self._latest = (0, 0)

    def touch(self, entry: CachedProgram) -> None:
        """Mark the executable of this program as just used, and evict the least recently used past the bound."""
        assert entry.compiled is not None
        origin = entry.compiled.origin
        if entry.tracked is origin and self._latest == (id(origin), settings.assignments):
            return
        evicted: list[tuple[Executable, WeakSet[CachedProgram]]] = []
        with self._lock:
            users = self._users.get(id(origin))
            if users is None:
                users = self._users[id(origin)] = (origin, WeakSet())
            self._users.move_to_end(id(origin))
            if entry.tracked is not origin:
                entry.tracked = origin
                users[1].add(entry)
            while len(self._users) > settings.executables_bound:
                evicted.append(self._users.popitem(last=False)[1])
            self._latest = (id(origin), settings.assignments)
        _evict(evicted)

    def remove(self, entry: CachedProgram) -> None:
        """Forget a program that left the tree."""
        self._by_fingerprint.pop(entry.fingerprint, None)
        entry.capture = None
        if entry.tracked is None:
            return
        with self._lock:
            self._latest = (0, 0)
            for identity, (_, users) in list(self._users.items()):
                users.discard(entry)
                if not users:
                    # Its specialization cache has it as long as there is one.
                    del self._users[identity]

    def __len__(self) -> int:
        return len(self._users)

    def publish(self, entry: CachedProgram) -> bytes:
        """Bytes by which `find` gives back exactly this program, whatever other fingerprints are."""
        if not entry.fingerprint:
            digest = base = fingerprint(entry.program)
            attempt = 0
            while digest in self._by_fingerprint:
                attempt += 1
                digest = hashlib.blake2b(base + attempt.to_bytes(8, "little"), digest_size=16).digest()
            entry.fingerprint = digest
            self._by_fingerprint[digest] = entry
        return entry.fingerprint

    def find(self, digest: bytes) -> CachedProgram | None:
        """The program published under these bytes."""
        return self._by_fingerprint.get(digest)

    def clear(self) -> None:
        """Evict every executable and forget the fingerprints."""
        with self._lock:
            self._latest = (0, 0)
            evicted = list(self._users.values())
            self._users.clear()
        _evict(evicted)
        self._by_fingerprint.clear()


def _evict(executables: list[tuple[Executable, WeakSet[CachedProgram]]]) -> None:
    for executable, users in executables:
        executable.dropped = True
        for entry in list(users):
            entry.evict(executable)


executables = ExecutableCache()
