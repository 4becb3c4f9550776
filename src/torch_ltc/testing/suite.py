"""A conformance run: its units, the processes that they run in, and its report.

Owns the choice of units and of processes. The command line and the tests are thin layers above this.
"""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from torch_ltc.config import settings
from torch_ltc.errors import LtcError
from torch_ltc.lowering.interface import Backend
from torch_ltc.testing import backends, workers
from torch_ltc.testing.gaps import SEMANTICS, Gaps
from torch_ltc.testing.records import DTYPES, AnyUnit, CaseUnit, Failure, Operator, Result, Unit, Variant
from torch_ltc.testing.report import Report, name_of
from torch_ltc.testing.semantics.table import table

CHUNK_SIZE = 100
"""Units of one worker process: large enough that starting it does not matter, small enough to bound its memory."""
TIME_LIMIT_S = 300.0
QUICK_DTYPES = ("float32", "int64")
QUICK_SAMPLES = 2
_QUICK_NAMES = """
abs exp neg reciprocal sigmoid tanh to clone
add mul sub div.no_rounding_mode pow maximum where lerp clamp
eq lt logical_and bitwise_and floor_divide remainder
sum mean amax argmax var any cumsum norm
matmul mm bmm addmm linalg.inv
cat stack split permute reshape expand transpose select slice flip
index_select gather scatter_add index_put masked_fill sort topk __getitem__
zeros_like full_like arange
nn.functional.conv2d nn.functional.linear nn.functional.relu nn.functional.gelu softmax
nn.functional.layer_norm nn.functional.batch_norm nn.functional.embedding nn.functional.cross_entropy
nn.functional.dropout nn.functional.max_pool2d nn.functional.pad.constant
"""
QUICK_OPERATORS = frozenset(_QUICK_NAMES.split())
"""The operators of a quick run: a few of each kind, the ones that models are made of."""

Progress = Callable[[Result, int, int], None]
"""Called with each result, its number and how many there will be."""


@dataclass(frozen=True, slots=True)
class Options:
    """The part of the conformance suite to run, and the way to run it."""

    only: Sequence[str] = ()
    """Operators by full name or pattern, semantics cases as `semantics/NAME`; all when empty."""
    dtypes: Sequence[str] = ()
    """Of `records.DTYPES`; all when empty."""
    max_samples: int | None = None
    """Only the first samples of each operator."""
    sample: int | None = None
    """Only the sample of this number."""
    variant: str | None = None
    """Only one form of the operators: a value of `records.Variant`."""
    quick: bool = False
    """A fixed part that takes less than a minute on the interpreter and TorchScript."""
    semantics_only: bool = False
    """No operators."""
    operators_only: bool = False
    """No semantics."""
    forward_only: bool = False
    """Operators without backward pass, in-place form and `out=`: for compilers that take seconds for a program."""
    together: bool = True
    """The samples of an operator in one program, and one by one only if that one is refused or wrong."""
    strict: bool = False
    """A program that the backend does not take fails the run, unless it is a known gap."""
    every: int = 1
    """Only each n-th operator."""
    jobs: int = 2
    """Worker processes at once; 0 runs everything in this process."""
    chunk_size: int = CHUNK_SIZE
    """Units of one worker process."""
    time_limit_s: float = TIME_LIMIT_S
    """For one operator with one dtype, or one case."""
    device: str = "ltc"
    """"cpu" compares eager with itself, which tests the conformance run."""

    def __post_init__(self) -> None:
        unknown = [each for each in self.dtypes if each not in DTYPES]
        if unknown:
            raise LtcError(f"there are no samples of dtype {unknown[0]!r}", hint=f"one of {', '.join(DTYPES)}")
        variants = [each.value for each in Variant]
        if self.variant not in (None, *variants):
            raise LtcError(f"operators have no form {self.variant!r}", hint=f"one of {', '.join(variants)}")

    @property
    def complete(self) -> bool:
        """True when every sample of each chosen operator runs in every form."""
        restricted = (self.max_samples, self.sample, self.variant)
        return all(each is None for each in restricted) and not self.quick and not self.forward_only


def conformance(
    backend: Backend | type[Backend] | str, *, progress: Progress | None = None, **options: object
) -> Report:
    """Test a backend against CPU eager and report what works; see `Options` for the part of the suite that runs.

    `backend` is a name, `package.module:ClassName`, `path/to/file.py:ClassName`, a class or an object. An object that
    another process could not make anew is tested in this process, which a crash of it ends.
    """
    workers.refuse_in_worker()
    chosen = Options(**options)  # type: ignore[arg-type]
    found = backends.find(backend) if isinstance(backend, str) else backends.adopt(backend)
    reference = backends.portable(backend)
    units = select_units(chosen, reference or found.name)
    report = Report(
        backend=found.name,
        gaps=Gaps(found.known_gaps),
        command=lambda unit, failure: repeat_command(unit, failure, portable=reference is not None),
        complete=chosen.complete,
        strict=chosen.strict,
        title=f"backend {found.name} on {settings.device_type}, torch {torch.__version__}",
    )
    limit_s = chosen.time_limit_s
    if reference is None or chosen.jobs == 0:
        results = workers.run_here(units, None if chosen.device == "cpu" else found, limit_s)
    else:
        results = workers.run_units(units, jobs=chosen.jobs, chunk_size=chosen.chunk_size, time_limit_s=limit_s)
    for number, result in enumerate(results, 1):
        report.results.append(result)
        if progress is not None:
            progress(result, number, len(units))
    return report


def select_units(options: Options, reference: str) -> list[AnyUnit]:
    """The units that the options ask for: semantics first, they are the quicker ones."""
    cases = [] if options.operators_only else [each for each in table if not (options.quick and each.slow)]
    units: list[AnyUnit] = [
        CaseUnit(case.name, reference, options.device)
        for case in cases
        if _matches(f"{SEMANTICS}/{case.name}", options.only)
    ]
    # PyTorch's database takes seconds to load and packages of its own: it is left alone when no operator is wanted.
    only_semantics = options.only and all(pattern.startswith(f"{SEMANTICS}/") for pattern in options.only)
    if not options.semantics_only and not only_semantics:
        units += _operator_units(options, reference)
    if not units:
        raise LtcError("nothing matches what was asked for", hint="see the options --only and --dtype")
    return units


def _operator_units(options: Options, reference: str) -> Iterator[Unit]:
    max_samples = options.max_samples
    dtypes: Sequence[str] = options.dtypes or DTYPES
    if options.quick:
        max_samples = max_samples or QUICK_SAMPLES
        dtypes = options.dtypes or QUICK_DTYPES
    template = Unit("", "", reference, options.device, max_samples, options.sample, options.variant)
    template = replace(template, forward_only=options.forward_only, together=options.together)
    for number, operator in enumerate(workers.supported()):
        if number % options.every == 0 and _wanted(operator, options):
            for dtype in dtypes:
                if dtype in operator.dtypes:
                    yield replace(template, operator=operator.name, group=operator.group, dtype=dtype)


def _wanted(operator: Operator, options: Options) -> bool:
    if options.quick and not options.only:
        return operator.name in QUICK_OPERATORS
    return _matches(operator.name, options.only)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def repeat_command(unit: AnyUnit, failure: Failure, *, portable: bool = True) -> str:
    """The command line that repeats one failure, or the call where only this process has the backend."""
    choices: dict[str, str | int | None] = {"only": name_of(unit)}
    if isinstance(unit, Unit):
        choices |= {"dtype": unit.dtype, "sample": failure.sample}
        choices |= {"variant": failure.variant if failure.sample is not None else unit.variant}
        choices |= {"max_samples": unit.max_samples if failure.sample is None else None}
    given = {name: value for name, value in choices.items() if value is not None}
    flags = [] if isinstance(unit, CaseUnit) or not unit.forward_only else ["forward_only"]
    if not portable:
        words = [f"{'dtypes' if name == 'dtype' else name}={_listed(name, value)!r}" for name, value in given.items()]
        return f"torch_ltc.testing.conformance(backend, {', '.join([*words, *(f'{flag}=True' for flag in flags)])})"
    words = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items()]
    words += [f"--{flag.replace('_', '-')}" for flag in flags]
    return " ".join(["python -m torch_ltc conformance", shlex.quote(unit.backend), *words])


def _listed(name: str, value: str | int) -> object:
    return [value] if name in ("only", "dtype") else value
