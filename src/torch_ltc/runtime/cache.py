"""What is kept for each known program, and the bound on compiled ones.

An entry hangs on the tree node where its program was cut, under the program's live outputs: it is found by comparing
keys in full. The fingerprint exists for people and files; nothing is decided by it alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict

from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.lowering.interface import Backend, Computation
from torch_ltc.lowering.lower import Lowered
from torch_ltc.program.instruction import Program
from torch_ltc.program.render import program_text
from torch_ltc.program.safety import may_fail

_identities = itertools.count(1)


def next_identity() -> int:
    """A number for a new program."""
    return next(_identities)


class Entry:
    """A program, its reference computation, and its compiled one while it is kept."""

    __slots__ = (
        "program",
        "runs",
        "reference",
        "compiled",
        "backend",
        "others",
        "refused",
        "op_counts",
        "restored",
        "written",
        "written_positions",
        "outputs",
        "latest",
        "numbers",
        "varying",
        "specialised",
        "fingerprint",
    )

    def __init__(self, program: Program) -> None:
        self.program = program
        self.runs = 0
        self.reference: Computation | None = None
        self.compiled: Lowered | None = None
        # Name of the backend that made `compiled`, what backends made that were in use before, and names of backends
        # that could not.
        self.backend: Backend | None = None
        self.others: dict[Backend, Lowered] = {}
        self.refused: dict[Backend, LtcError] = {}
        self.op_counts = program.op_counts()
        self.restored = inputs_to_restore(program)
        self.written = tuple(sorted(written_inputs(program, len(program.instructions))))
        self.written_positions = _first_positions(program, set(self.written))
        specs = program.specs()
        self.outputs = [(number, specs[number]) for number in program.outputs]
        # The run-time numbers when it was last synced.
        self.latest: list[object] = []
        # Those of the last run before it was compiled, the slots of those that change from run to run,
        # and how often it was compiled again because of one.
        self.numbers: list[object] | None = None
        self.varying: set[int] = set()
        self.specialised = 0
        self.fingerprint = b""

    def forget(self) -> None:
        """Drop what was compiled."""
        self.compiled = None
        self.others = {}

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
        for item, number in zip(call.flat_returns, call.numbers, strict=True):
            operand = call.operands[item.operand] if item.operand >= 0 and number >= 0 else -1
            if operand in buffer_of_value:
                buffer_of_value[number] = buffer_of_value[operand]
        written.update(buffer_of_value[n] for n in call.mutated if n in buffer_of_value)
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
    """16 bytes that stand for the program's text. Not an identity: two programs may share them."""
    return hashlib.blake2b(program_text(program).encode(), digest_size=16).digest()


class ExecutableCache:
    """Least recently used bound on compiled programs, and the fingerprint table for callers that keep only bytes."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[int, Entry] = OrderedDict()
        self._by_fingerprint: dict[bytes, Entry] = {}

    def used(self, entry: Entry) -> None:
        """A compiled entry was made or used: keep it, and drop the oldest past the bound."""
        identity = entry.program.identity
        self._compiled[identity] = entry
        self._compiled.move_to_end(identity)
        while len(self._compiled) > settings.executables_bound:
            _, oldest = self._compiled.popitem(last=False)
            oldest.forget()

    def dropped(self, entry: Entry) -> None:
        """The entry left the tree."""
        self._compiled.pop(entry.program.identity, None)
        self._by_fingerprint.pop(entry.fingerprint, None)

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
        for entry in self._compiled.values():
            entry.forget()
        self._compiled.clear()
        self._by_fingerprint.clear()


executables = ExecutableCache()
