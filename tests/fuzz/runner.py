"""Runs the statements of a program on a device, notes all that can be seen of it, and compares two such notes.

Needs nothing of the tests: scripts that repeat a failure contain this file.
"""

from __future__ import annotations

# --- imports
import copy
import importlib
import math
import pickle
import re
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch.nn import functional


# --- one run
@dataclass
class Seen:
    """What could be seen of one run of a program."""

    # By statement: the names of the classes of the exception that it raised.
    errors: dict[int, tuple[str, ...]] = field(default_factory=dict)
    # Errors of the lazy device that came after the statement that failed, by the statement that raised them.
    late: dict[int, tuple[str, ...]] = field(default_factory=dict)
    messages: dict[int, str] = field(default_factory=dict)
    reads: list[tuple[int, Any]] = field(default_factory=list)
    finals: dict[str, Any] = field(default_factory=dict)
    # Names of tensors in one storage.
    aliases: list[tuple[str, ...]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    random_state: Any = None


@lru_cache(maxsize=4096)
def compiled(statement: str) -> CodeType:
    """The code of a statement."""
    return compile(statement, "<program>", "exec")


def is_lazy(device: str) -> bool:
    """True for the device that records."""
    return device == "ltc"


def bits(value: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU."""
    if value.device.type == "cpu":
        return value.detach().clone()
    return value.detach().cpu()


def described(tensor: torch.Tensor, depth: int = 0) -> dict[str, Any]:
    """All that a tensor shows."""
    made: dict[str, Any] = {
        "dtype": str(tensor.dtype),
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "offset": tensor.storage_offset(),
        "class": type(tensor).__name__,
        "conj": (tensor.is_conj(), tensor.is_neg()),
    }
    try:
        made["requires_grad"], made["is_leaf"] = tensor.requires_grad, tensor.is_leaf
    except RuntimeError as error:
        # A view of inference mode whose base was written outside of it.
        made["requires_grad"] = type(error).__name__
        return made
    try:
        made["value"] = bits(tensor)
    except RuntimeError as error:
        # Lost: a call that it depends on failed.
        made["value"] = f"{type(error).__name__}: {error}"[:300]
    if depth == 0 and tensor.is_leaf and tensor.grad is not None:
        made["grad"] = described(tensor.grad, 1)
    return made


def observed(value: Any) -> Any:
    """A value that a program has read, with tensors as they are now."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, (tuple, list)):
        return [observed(item) for item in value]
    if isinstance(value, dict):
        return {key: observed(item) for key, item in value.items()}
    return value if isinstance(value, (int, float, complex, bool, str, type(None))) else repr(value)


def recurrent(name: str, values: torch.Tensor, both: bool = False) -> torch.Tensor:
    """What a recurrent network makes of a sequence of pairs of these values, one way or both ways."""
    gates = {"lstm": 4, "gru": 3}.get(name, 1)
    sequence = values.reshape(-1, 1, 2)
    like = {"device": sequence.device, "dtype": sequence.dtype}
    shapes = [(3 * gates, 2), (3 * gates, 3), (3 * gates,), (3 * gates,)] * (1 + both)
    weights = [torch.linspace(-0.5, 0.5, math.prod(shape), **like).view(shape) for shape in shapes]
    state = torch.zeros(1 + both, 1, 3, **like)
    start = (state, state + 1) if name == "lstm" else state
    made = getattr(torch, name)(sequence, start, weights, True, 1, 0.0, False, both, False)
    return made[0]


class Doubled(torch.autograd.Function):
    """Twice its input, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        """Keeps its input."""
        ctx.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Uses what was kept."""
        return grad * 2 + ctx.saved_tensors[0] * 0.5


def namespace(device: str, variant: dict[str, Any], reads: list[Any]) -> dict[str, Any]:
    """The names that statements use beside their tensors."""
    lazy = importlib.import_module("torch_ltc") if is_lazy(device) else None
    return {
        "__name__": "program",
        "torch": torch,
        "F": functional,
        "nn": torch.nn,
        "copy": copy,
        "pickle": pickle,
        "Doubled": Doubled,
        "recurrent": recurrent,
        "D": device,
        "read": lambda value: reads.append(observed(value)),
        "sync": lazy.sync if lazy else (lambda wait=False: None),
        "jit": lazy.jit if lazy else (lambda function: function),
        "to_cpu": bits,
        **variant,
    }


class Versions:
    """How often each tensor was written to since its name was first bound to it: what autograd goes by. What a fresh
    result begins with differs: eager composes some of several calls."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[torch.Tensor, int]] = {}

    def look(self, env: dict[str, Any]) -> None:
        """After a statement."""
        for name, value in env.items():
            if name[0] == "t" and isinstance(value, torch.Tensor) and not value.is_inference():
                known = self._first.get(name)
                if known is None or known[0] is not value:
                    self._first[name] = (value, value._version)

    def writes(self, name: str, value: torch.Tensor) -> int | None:
        """How often it was written to."""
        known = self._first.get(name)
        return value._version - known[1] if known is not None and known[0] is value else None


def run_statements(
    statements: Sequence[str], env: dict[str, Any], reads: list[Any], seen: Seen, lazy: bool, versions: Versions
) -> None:
    """Run statement after statement; one that raises is noted, and the next one runs."""
    late_class: Any = importlib.import_module("torch_ltc.errors").ExecutionError if lazy else ()
    for place, statement in enumerate(statements):
        code = compiled(statement)
        for attempt in (0, 1):
            try:
                exec(code, env)
            except Exception as error:
                classes = tuple(kind.__name__ for kind in type(error).__mro__[:-2])
                seen.messages[place] = str(error)[:400]
                del reads[:]
                if lazy and isinstance(error, late_class) and attempt == 0:
                    # Of an earlier statement, or of this one: it is told once, and what is asked again works.
                    seen.late[place] = classes
                    continue
                seen.errors[place] = classes
            break
        seen.reads += [(place, value) for value in reads]
        del reads[:]
        versions.look(env)


def finals(env: dict[str, Any], seen: Seen, versions: Versions) -> None:
    """Note all tensors and modules that are left."""
    storages: dict[int, list[str]] = {}
    for name in sorted(env):
        value = env[name]
        if isinstance(value, torch.nn.Module):
            for key, tensor in (*value.named_parameters(), *value.named_buffers()):
                seen.finals[f"{name}.{key}"] = described(tensor)
        elif isinstance(value, torch.optim.Optimizer):
            for number, state in enumerate(value.state.values()):
                for key, item in state.items():
                    seen.finals[f"{name}.{number}.{key}"] = observed(item)
        elif isinstance(value, torch.Tensor) and name[0] == "t":
            seen.finals[name] = {**described(value), "writes": versions.writes(name, value)}
            storages.setdefault(value.untyped_storage()._cdata, []).append(name)
        elif isinstance(value, (tuple, list, dict)) and name[0] == "t":
            seen.finals[name] = observed(value)
    seen.aliases = sorted(tuple(names) for names in storages.values() if len(names) > 1)


def reset_switches() -> None:
    """Put back what statements may have switched."""
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.set_flags(True)


def random_state(device: str) -> torch.Tensor:
    """The state of the generator that the device draws from."""
    if device == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state().cpu()


def run_here(statements: Sequence[str], device: str, variant: dict[str, Any]) -> Seen:
    """One run on this thread."""
    seen, reads = Seen(), []
    env = namespace(device, variant, reads)
    versions = Versions()
    run_statements(statements, env, reads, seen, is_lazy(device), versions)
    if is_lazy(device):
        lazy = importlib.import_module("torch_ltc")
        try:
            lazy.sync(wait=True)
        except Exception as error:
            # An error of data may come here; any other is a fault.
            told = seen.late if isinstance(error, lazy.errors.ExecutionError) else seen.errors
            told[len(statements)] = tuple(kind.__name__ for kind in type(error).__mro__[:-2])
            seen.messages[len(statements)] = str(error)[:400]
    finals(env, seen, versions)
    return seen


def seed_all(device: str, seed: int) -> None:
    """Seed what programs draw from. `torch.manual_seed` also keeps a stack for each kind of device that is missing."""
    torch.default_generator.manual_seed(seed)
    if device != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def run_one(statements: Sequence[str], device: str, variant: dict[str, Any], seed: int) -> Seen:
    """What is seen of a run with these numbers."""
    seed_all(device, seed)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        try:
            seen = run_here(statements, device, variant)
            seen.random_state = random_state(device)
        finally:
            reset_switches()
    seen.warnings = sorted(f"{w.category.__name__}: {str(w.message)[:80]}" for w in shown if _is_eager_warning(w))
    return seen


def _is_eager_warning(warning: Any) -> bool:
    own = {kind.__name__ for kind in warning.category.__mro__} & {"LtcWarning", "DeprecationWarning", "FutureWarning"}
    return not own


def run(
    statements: Sequence[str], device: str, variants: Sequence[dict[str, Any]], seed: int, threads: int = 1
) -> list[Seen]:
    """What is seen of each execution; with several threads all executions on each at a time, one list for all."""
    if threads == 1:
        return [run_one(statements, device, variant, seed) for variant in variants]
    made: list[list[Seen]] = [[] for _ in range(threads)]

    def work(place: int) -> None:
        for variant in variants:
            made[place].append(run_here(statements, device, {**variant, "n0": place + 1.5}))

    seed_all(device, seed)
    workers = [threading.Thread(target=work, args=(place,)) for place in range(threads)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return [seen for of_thread in made for seen in of_thread]


# --- comparison
class Skip(Exception):
    """Nothing is promised for what this program does."""


_DRAWS = re.compile(
    r"rand|drop|seed|normal|uniform|bernoulli|exponential|poisson|gumbel|rrelu|init|multinomial|cauchy|geometric"
)
# How much of these depends on values that are near only.
_DRAWS_BY_DATA = re.compile("poisson|multinomial|gumbel|rrelu")
# A statement that makes a tensor and writes to none.
_FRESH = re.compile(r"t\d+ = (?!.*_\()(?!.*out=)")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_value(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    """Equal to the bit, any NaN equal to any other; or within the tolerance, where there is one."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.is_complex():
        if tolerance > 0:
            # Compilers and kernels have different ideas of complex infinities.
            both = ours.isfinite() & theirs.isfinite()
            ours, theirs = ours[both], theirs[both]
        pair = torch.view_as_real(ours.resolve_conj()), torch.view_as_real(theirs.resolve_conj())
        return same_value(*pair, tolerance)
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    width = _INTEGERS[ours.element_size()]
    left, right = ours.contiguous().view(width), theirs.contiguous().view(width)
    if torch.equal(left, right):
        return True
    if bool(((left == right) | (ours.isnan() & theirs.isnan())).all()):
        return True
    return tolerance > 0 and torch.allclose(
        ours.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def difference(ours: Any, theirs: Any, tolerance: float, where: str) -> str | None:
    """The first difference in words."""
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        if same_value(ours, theirs, tolerance):
            return None
        return f"{where}: {_short(ours)} instead of {_short(theirs)}"
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"{where}: {sorted(ours)} instead of {sorted(theirs)}"
        found = (difference(ours[key], theirs[key], tolerance, f"{where} {key}") for key in theirs if key != "writes")
        return next((text for text in found if text), None) or _unseen_writes(ours, theirs, where)
    if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        found = (difference(a, b, tolerance, where) for a, b in zip(ours, theirs))
        return next((text for text in found if text), None)
    if isinstance(theirs, float) and isinstance(ours, float):
        pair = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
        return None if same_value(*pair, tolerance) else f"{where}: {ours!r} instead of {theirs!r}"
    return None if repr(ours) == repr(theirs) else f"{where}: {ours!r} instead of {theirs!r}"


def _unseen_writes(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> str | None:
    """Writes that autograd is not told of. More than eager's are as good, where there are any."""
    mine, wanted = ours.get("writes"), theirs.get("writes")
    if mine == wanted or (mine and wanted and mine > wanted):
        return None
    return f"{where} writes: {mine!r} instead of {wanted!r}"


def _short(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.flatten()[:8].tolist()}"


def compare(ours: Seen, theirs: Seen, statements: Sequence[str], tolerance: float = 0.0) -> str | None:
    """How a run on the device differs from the oracle's, by what docs/compatibility.md promises; None when not."""
    found = _compare_errors(ours, theirs, statements)
    if found:
        return found
    if ours.late and ours.random_state is None:
        raise Skip("an error of one thread is told to another")
    if ours.late and any(not _FRESH.match(statements[place]) for place in theirs.errors):
        # A write that failed: eager has done part of it, and here what it would have written is lost.
        raise Skip("a write fails late")
    for kind in ("reads", "finals", "aliases", "warnings"):
        left, right = getattr(ours, kind), getattr(theirs, kind)
        if kind == "finals" and theirs.errors:
            left = {name: value for name, value in left.items() if name in right}
        if kind == "aliases" and theirs.errors:
            known = [tuple(name for name in names if name in theirs.finals) for names in left]
            left = sorted(names for names in known if len(names) > 1)
        if kind == "reads":
            left, right = [list(item) for item in left], [list(item) for item in right]
        if kind == "warnings":
            # What calls after a failure warned of depends on which of them have run; how often, on what is compiled.
            left, right = sorted(set(left)), sorted(set(right))
            if tolerance or ours.late:
                continue
            if theirs.errors:
                # A call that fails may have warned before; here it is refused before it does anything.
                right = [text for text in right if text in left or "was resized since" not in text]
        found = difference(left, right, tolerance, kind)
        if found and any("out=" in statements[place] for place in theirs.errors):
            raise Skip("eager resizes the target of a call that it refuses, and nobody writes to it")
        if found:
            return found
    if ours.random_state is None or _draws_late(ours, theirs, statements):
        return None
    if tolerance and any(map(_DRAWS_BY_DATA.search, statements)):
        return None
    return None if torch.equal(ours.random_state, theirs.random_state) else "random state"


def _draws_late(ours: Seen, theirs: Seen, statements: Sequence[str]) -> bool:
    """True when a statement that draws failed in eager and was recorded here: `rand_like` of a result that is lost."""
    recorded = theirs.errors.keys() - ours.errors.keys()
    return bool(ours.late) and any(_DRAWS.search(statements[place]) for place in recorded)


def _reads_what_it_writes(ours: Seen, theirs: Seen, statements: Sequence[str], place: int) -> bool:
    """True for an `out=` that eager resized although an operand lies in the same memory, and that is refused here."""
    refused = "written-to tensor refer to a single memory location" in ours.messages[place]
    # Warnings of threads are not known.
    resized = ours.random_state is None or any("was resized since it had shape" in text for text in theirs.warnings)
    return refused and resized and "out=" in statements[place]


def _compare_errors(ours: Seen, theirs: Seen, statements: Sequence[str]) -> str | None:
    statements = (*statements, "the last sync")
    missing = {place: kinds for place, kinds in theirs.errors.items() if place not in ours.errors}
    for place, kinds in ours.errors.items():
        expected = theirs.errors.get(place)
        if expected is None and _reads_what_it_writes(ours, theirs, statements, place):
            raise Skip("eager computes with what it has just written")
        if expected is None:
            return f"errors: {statements[place]!r} raises {kinds[0]}: {ours.messages[place]}"
        if expected[0] not in kinds:
            return f"errors: {statements[place]!r} raises {kinds[0]} instead of {expected[0]}: {ours.messages[place]}"
    for place, kinds in missing.items():
        if kinds[0] == "NameError" and ours.late:
            # Of what a statement that failed late would have made: here it is there, and lost.
            continue
        if not any(at >= place for at in ours.late):
            return f"errors: {statements[place]!r} does not raise {kinds[0]}: {theirs.messages[place]}"
    if ours.late and not theirs.errors:
        place = min(ours.late)
        return f"errors: {ours.late[place][0]} at statement {place}: {ours.messages[place]}"
    return None


# --- script
def main(
    statements: Sequence[str],
    variants: Sequence[dict[str, Any]],
    seed: int,
    threads: int,
    settings: dict[str, Any],
    captured: bool,
) -> int:
    """Run on the CPU and on the device, and print what differs."""
    torch.set_warn_always(True)
    torch.set_num_threads(1)
    theirs = run(statements, "cpu", variants, seed, threads)
    lazy = importlib.import_module("torch_ltc")
    stand_in = importlib.import_module("tests.support.graphs").graphs_on_the_cpu() if captured else nullcontext()
    with lazy.config.settings.scope(cache_dir="off", recompiles="allow", **settings), stand_in:
        ours = run(statements, "ltc", variants, seed, threads)
    status = 0
    for place, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        try:
            found = compare(left, right, statements)
        except Skip as reason:
            found = f"not compared: {reason}"
        print(f"execution {place}: {found or 'equal'}")
        status |= found is not None
    return status
