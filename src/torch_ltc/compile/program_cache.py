"""What is kept for each known program, and the bound on compiled ones.

An entry hangs on the tree node where its program was cut, under the program's live outputs: it is found by comparing
keys in full. The fingerprint exists for people and files; nothing is decided by it alone.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakSet

from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.lowering.interface import Backend, Computation
from torch_ltc.lowering.lower import Executable
from torch_ltc.program.effects import may_fail
from torch_ltc.program.instruction import Call, Program, Return
from torch_ltc.program.spec import Spec
from torch_ltc.program.text import program_text

_identities = itertools.count(1)


def next_identity() -> int:
    """A number for a new program."""
    return next(_identities)


class Entry:
    """A program, its reference computation, and its compiled one while it is kept."""

    __slots__ = (
        "program",
        "single",
        "runs",
        "reference",
        "compiled",
        "backend",
        "others",
        "kept",
        "refused",
        "op_counts",
        "_restored",
        "written",
        "written_positions",
        "_outputs",
        "_makers",
        "latest",
        "family",
        "own",
        "values",
        "fingerprint",
        "__weakref__",
    )

    def __init__(self, program: Program) -> None:
        self.program = program
        # One call at most: a backend's code for it does what PyTorch's kernel does.
        self.single = len(program.calls) <= 1
        self.runs = 0
        self.reference: Computation | None = None
        self.compiled: Executable | None = None
        # Name of the backend that made `compiled`, what backends made that were in use before, and names of backends
        # that could not.
        self.backend: Backend | None = None
        self.others: dict[Backend, Executable] = {}
        # What `executables` knows to be in use by this entry.
        self.kept: Executable | None = None
        self.refused: dict[Backend, LtcError] = {}
        self.op_counts = program.op_counts()
        self.written = tuple(sorted(written_inputs(program, len(program.instructions))))
        # Made when they are asked for, which is when the program is compiled: most programs never are.
        self._restored: tuple[int, ...] | None = None
        self._outputs: list[tuple[int, Spec]] | None = None
        self._makers: tuple[Call | None, ...] | None = None
        self.written_positions = _first_positions(program, set(self.written))
        # The run-time numbers when it was last synced.
        self.latest: list[object] = []
        # The programs of the same skeleton with the integers in which it differs from them, and what there is for this
        # program alone; see `specializations`.
        self.family: Any = None
        self.own: Any = None
        self.values: tuple[int, ...] = ()
        self.fingerprint = b""

    @property
    def restored(self) -> tuple[int, ...]:
        """Positions of the inputs that the program writes to before its last call that may fail."""
        if self._restored is None:
            self._restored = inputs_to_restore(self.program) if self.written else ()
        return self._restored

    @property
    def outputs(self) -> list[tuple[int, Spec]]:
        """Value number and geometry of each output."""
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

    def forget(self, executable: Executable) -> None:
        """Drop what was compiled, or bound from what was compiled."""
        if self.compiled is not None and self.compiled.origin is executable:
            self.compiled = None
        self.others = {backend: other for backend, other in self.others.items() if other.origin is not executable}
        self.kept = None

    def choose(self, backend: Backend) -> None:
        """Let `compiled` be what this backend has made of the program, or None."""
        if self.backend is not backend:
            if self.compiled is not None and self.backend is not None:
                self.others[self.backend] = self.compiled
            self.compiled = self.others.pop(backend, None)
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
    """Least recently used bound on compiled programs, and the fingerprint table for callers that keep only bytes.

    The worker uses programs while the user's threads drop them: a lock keeps them apart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # What was compiled, by identity, with the entries that use it: several programs may share it.
        self._compiled: OrderedDict[int, tuple[Executable, WeakSet[Entry]]] = OrderedDict()
        self._by_fingerprint: dict[bytes, Entry] = {}

    def used(self, entry: Entry) -> None:
        """A compiled entry was made or used: keep it, and drop the oldest past the bound."""
        assert entry.compiled is not None
        origin = entry.compiled.origin
        with self._lock:
            kept = self._compiled.get(id(origin))
            if kept is None:
                kept = self._compiled[id(origin)] = (origin, WeakSet())
            self._compiled.move_to_end(id(origin))
            if entry.kept is not origin:
                entry.kept = origin
                kept[1].add(entry)
            while len(self._compiled) > settings.executables_bound:
                self._drop(next(iter(self._compiled)))

    def _drop(self, identity: int) -> None:
        origin, users = self._compiled.pop(identity)
        origin.dropped = True
        for entry in list(users):
            entry.forget(origin)

    def dropped(self, entry: Entry) -> None:
        """The entry left the tree."""
        self._by_fingerprint.pop(entry.fingerprint, None)
        if entry.kept is None:
            return
        with self._lock:
            for identity, (_, users) in list(self._compiled.items()):
                users.discard(entry)
                if not users:
                    # Its family keeps it as long as there is one.
                    del self._compiled[identity]

    def __len__(self) -> int:
        return len(self._compiled)

    def publish(self, entry: Entry) -> bytes:
        """Bytes by which `find` gives back exactly this entry, whatever other fingerprints are."""
        if not entry.fingerprint:
            digest = base = fingerprint(entry.program)
            attempt = 0
            while digest in self._by_fingerprint:
                attempt += 1
                digest = hashlib.blake2b(base + attempt.to_bytes(8, "little"), digest_size=16).digest()
            entry.fingerprint = digest
            self._by_fingerprint[digest] = entry
        return entry.fingerprint

    def find(self, digest: bytes) -> Entry | None:
        """The entry published under these bytes."""
        return self._by_fingerprint.get(digest)

    def clear(self) -> None:
        """Forget compiled programs and fingerprints."""
        with self._lock:
            for identity in list(self._compiled):
                self._drop(identity)
        self._by_fingerprint.clear()


executables = ExecutableCache()
