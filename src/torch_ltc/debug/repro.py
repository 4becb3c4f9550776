"""Scripts that repeat one program: on demand, and by policy for every program that fails."""

from __future__ import annotations

import io
import platform
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_ltc.compile.hooks import Failure, Run, current_run
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import Origin, settings
from torch_ltc.debug.dump import known_entry
from torch_ltc.debug.replay import SavedInputs, tensor_of
from torch_ltc.debug.repro_script import buffers_of, is_whole, script_text
from torch_ltc.deferred import deferred
from torch_ltc.errors import LtcError, LtcWarning
from torch_ltc.execute.executor import executor
from torch_ltc.execute.pending import pending_entry_for, pending_inputs
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.sync import program_synced, touched
from torch_ltc.lowering.interface import Held
from torch_ltc.lowering.registry import registry
from torch_ltc.private_files import write_private_file
from torch_ltc.program.instruction import Input, Program, Scalar
from torch_ltc.program.spec import spec_of
from torch_ltc.record.buffer import buffer_of
from torch_ltc.record.recorder import recorder

# Scripts that the policy writes in one process.
_MOST_WRITTEN = 20
_MOST_BYTES = 256 * 2**20
# Settings that a script sets for itself.
_OWN_SETTINGS = frozenset(
    {"backend", "tiers", "cache_dir", "check", "recompiles", "repro_dir", "report", "save_tensors_file"}
)


@dataclass(frozen=True, slots=True)
class _Facts:
    """A program with what is known of a run: data per input, None where it is not known; numbers; random state."""

    program: Program
    held: Sequence[Held | None]
    numbers: Sequence[object]
    state: torch.Tensor | None
    origin: str


# ---- which program --------------------------------------------------------------------------------------------------


class _Latest:
    """The program that was synced last."""

    entry: weakref.ref[CachedProgram] | None = None


def _remember(entry: CachedProgram) -> None:
    _Latest.entry = weakref.ref(entry)


program_synced.add(_remember)


def _facts_of(program: int | Program | torch.Tensor | None) -> _Facts:
    if isinstance(program, torch.Tensor):
        return _pending_facts(program)
    if program is None:
        entry = _Latest.entry() if _Latest.entry is not None else None
        if entry is None:
            raise LtcError("no program was synced yet", hint="call torch_ltc.sync() first, or give a tensor")
        return _facts_without_data(entry.program, entry.latest)
    if isinstance(program, Program):
        return _facts_without_data(program, ())
    entry = known_entry(program)
    return _facts_without_data(entry.program, entry.latest)


def _facts_without_data(program: Program, numbers: Sequence[object]) -> _Facts:
    if len(numbers) != program.scalars:
        numbers = _made_numbers(program)
    held: list[Held | None] = [None] * len(program.inputs)
    return _Facts(program, held, numbers, None, "made up from their sizes: those of the run are not kept")


def _made_numbers(program: Program) -> list[object]:
    made: list[object] = [1] * program.scalars
    for call in program.calls:
        for operand in (*call.args, *call.kwargs.values()):
            for item in operand if isinstance(operand, tuple) else (operand,):
                if isinstance(item, Scalar):
                    made[item.slot] = item.type(1)
    return made


def _pending_facts(tensor: torch.Tensor) -> _Facts:
    if tensor.device.type != "ltc":
        raise LtcError(f"dump_repro takes tensors on ltc, got one on {tensor.device}", hint="give one of the device's")
    with recorder.lock:
        if not touched(buffer_of(tensor)):
            what = f"this tensor, {spec_of(tensor)}, is not pending: no program that computes it is left"
            raise LtcError(what, hint="call dump_repro before it is synced or read, or with the program's number")
        program = pending_entry_for([tensor]).program
        _, values = pending_inputs()
    count = len(program.inputs)
    state = executor.call(device_random.generator.get_state) if program.random else None
    return _Facts(program, values[:count], values[count:], state, "those of the pending program")  # type: ignore[arg-type]


# ---- writing --------------------------------------------------------------------------------------------------------


def _memory(views: Sequence[Input], tensor: torch.Tensor) -> torch.Tensor:
    """The saved form of a buffer: the tensor as it is, or all of its memory."""
    if is_whole(views):
        spec = views[0].spec
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype).copy_(tensor)
    storage = tensor.untyped_storage()
    dtype = views[0].spec.dtype
    needed = max(view.spec.extent() * view.spec.dtype.itemsize for view in views)
    size = min(-(-needed // dtype.itemsize), storage.nbytes() // dtype.itemsize)
    flat = torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (size,), (1,))
    return flat.to("cpu", copy=True)


def _saved_memory(facts: _Facts, max_bytes: int) -> dict[int, torch.Tensor]:
    """Data by buffer: the small ones first, as many as fit."""
    held: dict[int, torch.Tensor] = {}
    for instruction, item in zip(facts.program.inputs, facts.held, strict=True):
        tensor = None if item is None or instruction.buffer in held else tensor_of(item)
        if tensor is not None:
            held[instruction.buffer] = tensor
    views = buffers_of(facts.program)
    saved: dict[int, torch.Tensor] = {}
    left = max_bytes
    for buffer, tensor in sorted(held.items(), key=lambda pair: pair[1].untyped_storage().nbytes()):
        left -= max(view.spec.extent() * view.spec.dtype.itemsize for view in views[buffer])
        if left < 0:
            break
        saved[buffer] = _memory(views[buffer], tensor)
    return saved


def _header(facts: _Facts, backend: str, path: Path, error: str, made_up: int) -> list[str]:
    program = facts.program
    inputs = facts.origin
    if made_up and any(item is not None for item in facts.held):
        inputs += f", but {made_up} of {len(buffers_of(program))} made up from their sizes: too large, or lost"
    chosen = [name for name in settings.names() if settings.origin(name) is not Origin.DEFAULT]
    lines = [
        f"Program {program.identity}, {len(program.calls)} calls, as torch_ltc recorded it.",
        "",
        f"Run it with: python {path.name} [BACKEND]",
        f"It runs in eager PyTorch and on the backend, {backend} if none is named, and says whether they agree.",
        "",
        f"Inputs: {inputs}",
        f"Written by: torch_ltc, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"Settings: {', '.join(f'{name}={getattr(settings, name)!r}' for name in chosen) or 'all as by default'}",
    ]
    return [*lines, "", "The error was:", *(f"    {line}" for line in error.splitlines())] if error else lines


def _write(facts: _Facts, path: Path, backend: str, error: str, max_bytes: int, seed: int) -> Path:
    """Write the script and, beside it, its data."""
    program = facts.program
    saved = _saved_memory(facts, max_bytes)
    buffers = buffers_of(program)
    header = _header(facts, backend, path, error, len(buffers) - len(saved))
    chosen = [n for n in settings.names() if n not in _OWN_SETTINGS and settings.origin(n) is not Origin.DEFAULT]
    text = script_text(
        program,
        facts.numbers,
        saved,
        header=header,
        backend=backend,
        backend_class=_class_text(backend),
        settings={name: getattr(settings, name) for name in chosen},
        seed=seed,
    )
    state = facts.state
    if state is None and program.random:
        state = torch.Generator(program.device).manual_seed(seed).get_state()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    torch.save(([saved.get(buffer) for buffer in buffers], state), data)
    # The user's data and lines are nobody else's business.
    write_private_file(path.with_suffix(".pt"), data.getvalue())
    write_private_file(path, text.encode())
    return path


def _class_text(backend: str) -> str:
    """The import of a backend that only this process knows."""
    if registry.origin(backend) != "registered":
        return ""
    kind = type(registry.get(backend))
    return f"from {kind.__module__} import {kind.__qualname__}; torch_ltc.register_backend({kind.__qualname__})"


def dump_repro(
    program: int | Program | torch.Tensor | None = None,
    folder: str | Path = ".",
    *,
    backend: str | None = None,
    max_bytes: int = _MOST_BYTES,
    seed: int = 0,
    values: bool = True,
) -> str:
    """Write a script that runs a program again, in eager and on a backend, and says whether they agree; its path.

    `program` is the number of a program, a `Program`, a pending tensor (the program that computes it, with its inputs),
    or None for the program that was synced last. Data goes into a file beside the script; what is not known, or is more
    than `max_bytes`, is made up from `seed`, and the script says so. Without `values` all of it is made up, the numbers
    of the program too: for a script that others may see.
    """
    facts = _facts_of(program)
    if not values:
        facts = _facts_without_data(facts.program, ())
    path = Path(folder) / f"program{facts.program.identity}.py"
    return str(_write(facts, path, backend or registry.get(settings.backend).name, "", max_bytes, seed))


# ---- by policy ------------------------------------------------------------------------------------------------------


class ReproPolicy:
    """Writes a script for what fails, if the setting `repro_dir` names a folder."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, str], str] = {}
        self._inputs: dict[int, SavedInputs] = {}
        self._lock = threading.Lock()

    @contextmanager
    def watch(self, run: Run) -> Iterator[None]:
        """Keep what a run writes to, while it runs, and look at the calls of it that failed."""
        if not run.repro_dir:
            yield
            return
        self._inputs[id(run)] = SavedInputs(run.entry.program, run.arguments, run.entry.written_positions)
        try:
            yield
            for error in run.outcome.failures if run.outcome is not None else ():
                self.failed(Failure(run.entry, run.backend, "call", error))
        finally:
            del self._inputs[id(run)]

    def failed(self, failure: Failure) -> None:
        """Write a script, once for a program and stage, and name it in the error."""
        run = current_run()
        if run is not None and run.entry is not failure.entry:
            run = None
        folder = run.repro_dir if run is not None else settings.repro_dir
        key = (failure.entry.program.identity, failure.stage)
        with self._lock:
            if not folder or key in self._written or len(self._written) >= _MOST_WRITTEN:
                return
            self._written[key] = ""
        try:
            path = self._write(failure, run, Path(folder))
        except Exception as error:
            what = f"no script could be written to {folder} for program {key[0]}: {type(error).__name__}: {error}"
            deferred.add_warning(what, LtcWarning)
            return
        self._written[key] = str(path)
        failure.error.args = (f"{failure.error.args[0]}\n  repeat it with: python {path}",)

    def _write(self, failure: Failure, run: Run | None, folder: Path) -> Path:
        program = failure.entry.program
        path = folder / f"program{program.identity}_{failure.stage}.py"
        facts = _facts_without_data(program, failure.entry.latest)
        if run is not None:
            # Before it has run nothing is kept, and nothing was written to.
            saved = self._inputs.get(id(run)) or SavedInputs(program, run.arguments, ())
            origin = "those of the run that failed"
            facts = _Facts(program, saved.held, list(run.arguments.scalars), saved.state, origin)
        return _write(facts, path, failure.backend.name, str(failure.error), _MOST_BYTES, 0)


policy = ReproPolicy()
