"""The words and records of the sweep, shared by the process that reports and the processes that run.

Owns no behaviour beyond counting, and imports no PyTorch: the reporting process does without it.
"""

from dataclasses import dataclass, field
from enum import Enum

DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64")
BACKENDS = ("interpreter", "torchscript")
FAILURES_KEPT = 60
"""More failures of one unit than this are counted, not described."""


class Variant(Enum):
    """In which form an operator is called."""

    FUNCTION = "function"
    """As a function of its inputs, with the backward pass where there is one."""
    INPLACE = "inplace"
    """As the method that changes its first input."""
    OUT = "out"
    """Into tensors given as `out=`: of the right size for even samples, empty ones to be resized for odd samples."""


class What(Enum):
    """What is wrong with a case."""

    VALUE = "value"
    """A number differs: by one bit for the interpreter, by more than the default tolerance for a compiler."""
    DTYPE = "dtype"
    """Another element type."""
    SHAPE = "shape"
    """Another size, another nesting of results, or another number of them."""
    STRIDE = "stride"
    """The same elements in another order in memory, or another layout, or another conjugate or negative bit."""
    OFFSET = "offset"
    """A view that starts elsewhere in its storage."""
    ALIAS = "alias"
    """Shares memory with an argument where eager does not, or does not where eager does."""
    DEVICE = "device"
    """A result on another device than the arguments."""
    REQUIRES_GRAD = "requires_grad"
    """Autograd follows it on one side only, or a gradient is missing on one side."""
    RAISES = "raises"
    """The device raised an error, eager did not."""
    SILENT = "silent"
    """Eager raised an error, the device did not."""
    FALLBACK = "fallback"
    """An operator whose result has a static shape ran eagerly."""
    BACKEND = "backend"
    """The second run of a program was not compiled by the backend."""
    CRASH = "crash"
    """The process died."""
    TIMEOUT = "timeout"
    """The operator did not end within its time limit."""
    HARNESS = "harness"
    """The sweep itself failed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs, and a sentence about it whose first line is the same for the same cause."""

    what: What
    message: str


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


@dataclass(frozen=True, slots=True)
class Failure:
    """One difference in one case."""

    sample: int | None
    variant: str | None
    what: str
    message: str


@dataclass(slots=True)
class Report:
    """What came of a unit."""

    unit: Unit
    cases: int = 0
    failed_cases: int = 0
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
