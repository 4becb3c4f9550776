"""The enums and records of a conformance run, shared by the process that reports and the processes that run.

Counts, and nothing else: cases are run by `operators` and `semantics`, printed by `report`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64")
FAILURES_KEPT = 60
"""More failures of one unit than this are counted, not described."""


class Variant(Enum):
    """The form of a call."""

    FUNCTION = "function"
    """With its arguments, forward and backward."""
    INPLACE = "inplace"
    """Writing to its first input."""
    OUT = "out"
    """Into tensors given as `out=`: of the right size for even samples, empty ones to be resized for odd samples."""
    REFUSED = "refused"
    """With arguments that eager refuses."""


class What(Enum):
    """Kinds of failure of a case."""

    VALUE = "value"
    """A number differs: by one bit where the conformance spec says exact values, else by more than the tolerance."""
    DTYPE = "dtype"
    """Another element type."""
    SHAPE = "shape"
    """Another size, another nesting of results, or another number of them."""
    STRIDE = "stride"
    """The same elements in another order in memory, or another layout, or another conjugate or negative bit."""
    OFFSET = "offset"
    """A view that starts at another place in its storage."""
    ALIAS = "alias"
    """Shares memory where eager does not, or does not where eager does."""
    DEVICE = "device"
    """A result on another device than the arguments."""
    REQUIRES_GRAD = "requires_grad"
    """Autograd follows it on one side only, or a gradient is missing on one side."""
    RAISES = "raises"
    """The device raised an error, eager did not."""
    SILENT = "silent"
    """Eager raised an error, the device did not."""
    LATE = "late"
    """Eager raised an error at the call, the device when its program ran."""
    FALLBACK = "fallback"
    """An operator whose result has a static shape ran eagerly."""
    REFUSED = "refused"
    """The backend did not take the program: it raised when it was to compile it, or the interpreter ran it instead."""
    TOGETHER = "together"
    """Samples that are right each in a program of its own are wrong when one program holds them all."""
    CLAIM = "claim"
    """A semantics case found a statement untrue that is no comparison with eager."""
    CRASH = "crash"
    """The process died."""
    TIMEOUT = "timeout"
    """It did not end within its time limit."""
    HARNESS = "harness"
    """The conformance run itself failed."""


class State(Enum):
    """The states of an operator or a case in the coverage table."""

    TAKEN = "taken"
    """Every program ran in the backend's own code, and everything equals eager."""
    PARTLY = "partly taken"
    """The backend refused some programs; what it took equals eager."""
    REFUSED = "not taken"
    """The backend refused every program: they run in the interpreter."""
    NOTHING = "nothing to compile"
    """No program came of it: the call ran eagerly by design, or eager raises an error too."""
    WRONG = "wrong"
    """Something differs from eager."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs, and a sentence about it whose first line is the same for the same cause."""

    what: What
    message: str


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of PyTorch's database."""

    name: str
    group: str
    """Its group in the coverage table."""
    dtypes: tuple[str, ...]
    """Those of our dtypes that it takes on the CPU."""


@dataclass(frozen=True, slots=True)
class Unit:
    """All samples of one operator with one dtype on one backend, or the part of them that is asked for."""

    operator: str
    dtype: str
    backend: str
    device: str = "ltc"
    max_samples: int | None = None
    sample: int | None = None
    variant: str | None = None
    forward_only: bool = False
    """No backward pass, and only the plain form of the operator: for compilers that take seconds for a program."""
    group: str = ""
    together: bool = False
    """One program of all samples at first; sample by sample only if that one is refused or wrong."""


@dataclass(frozen=True, slots=True)
class CaseUnit:
    """One case of the semantics table on one backend."""

    case: str
    backend: str
    device: str = "ltc"


AnyUnit = Unit | CaseUnit


@dataclass(frozen=True, slots=True)
class Failure:
    """One difference in one case."""

    sample: int | None
    variant: str | None
    what: str
    message: str

    @property
    def line(self) -> str:
        """The message in one line."""
        return ": ".join(part.strip() for part in self.message.splitlines() if part.strip())


@dataclass(slots=True)
class Result:
    """The result of a unit."""

    unit: AnyUnit
    cases: int = 0
    failed_cases: int = 0
    taken_cases: int = 0
    """Cases whose programs ran in the backend's own code."""
    left_out: int = 0
    """Cases that were not run, because the unit was wrong already and its time nearly over."""
    duration_s: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    def add(self, sample: int | None, variant: Variant | None, found: list[Difference]) -> None:
        """Counts a case and keeps what was found wrong with it."""
        self.cases += 1
        self.failed_cases += bool(found)
        for each in found[: max(0, FAILURES_KEPT - len(self.failures))]:
            name = None if variant is None else variant.value
            self.failures.append(Failure(sample, name, each.what.value, each.message))

    @property
    def covered(self) -> bool:
        """True when the backend takes the plain form of every sample; in-place forms and `out=` do not count."""
        if self.state is not State.PARTLY:
            return self.state is State.TAKEN
        return all(failure.variant not in (None, Variant.FUNCTION.value) for failure in self.failures)

    @property
    def state(self) -> State:
        """Its state in the coverage table."""
        kinds = {failure.what for failure in self.failures}
        if kinds - {What.REFUSED.value}:
            return State.WRONG
        if kinds:
            return State.PARTLY if self.taken_cases else State.REFUSED
        return State.TAKEN if self.taken_cases else State.NOTHING
