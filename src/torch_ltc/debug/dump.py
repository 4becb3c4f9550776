"""Programs as text, as a dot graph, as the backend's own code, in a file at each sync, and side by side."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Sequence

import torch

from torch_ltc.compile.jobs import compiling_now, summary
from torch_ltc.compile.program_cache import CachedProgram, fingerprint
from torch_ltc.config import settings
from torch_ltc.errors import LtcError, LtcWarning
from torch_ltc.execute.pending import pending_numbers, pending_program
from torch_ltc.execute.sync import program_synced
from torch_ltc.lowering.lower import functional_form, lower
from torch_ltc.lowering.registry import registry
from torch_ltc.private_files import private_opener
from torch_ltc.program.difference import difference_text
from torch_ltc.program.instruction import Program
from torch_ltc.program.text import Sources, program_dot, program_text
from torch_ltc.record.call_site import current_source, is_user_file
from torch_ltc.record.recorder import recorder

_file_lock = threading.Lock()
# Files that could not be written, and that the user was warned of.
_refused: set[str] = set()


def dump_ir(tensors: Sequence[torch.Tensor], ir_format: str = "text") -> str:
    """The pending program up to here, with these tensors as its outputs: as "text" or in the "backend"'s own form."""
    return program_form(pending_program(tensors), ir_format, pending_numbers())


def render_ir_graph(tensors: Sequence[torch.Tensor]) -> str:
    """The pending program up to here as a dot graph, with these tensors as its outputs."""
    return program_form(pending_program(tensors), "dot", [])


def dump_passes(tensors: Sequence[torch.Tensor], backend: str | None = None) -> str:
    """The pending program as recorded, in functional form, and after each pass over it, as the backend asks for it."""
    program = pending_program(tensors)
    pages = [("recorded", program)]
    chosen = registry.get(backend or settings.backend)
    functional_form(chosen, program, pending_numbers(), set(), lambda name, made: pages.append((name, made)))
    shown: list[str] = []
    before = ""
    for name, made in pages:
        text = program_text(made)
        shown.append(f"---- {name}: {len(made.calls)} calls\n{text if text != before else 'as before'}")
        before = text
    return "\n".join(shown)


def program_form(program: Program, form: str, numbers: list[object]) -> str:
    """The program as "text", "dot" or "backend"; a backend may want to know its run-time numbers."""
    if form == "text":
        return program_text(program)
    if form == "dot":
        return program_dot(program)
    if form == "backend":
        backend = registry.get(settings.backend)
        computation = lower(backend, program, numbers, set(), strict=False).computation
        return backend.get_computation_backend_text(computation)
    raise ValueError(f"there is no program format {form!r}; use 'text', 'dot' or 'backend'")


def known_entry(identity: int) -> CachedProgram:
    """The cached entry of the program with this number, as events and reports name it; raises LtcError when there is
    none any more."""
    with recorder.lock:
        for node in recorder.tree.nodes():
            for entry in node.programs.values():
                if isinstance(entry, CachedProgram) and entry.program.identity == identity:
                    return entry
    raise LtcError(
        f"program {identity} is not known: it was never synced in this process, or it was dropped to make room",
        hint="torch_ltc.debug.dump_ir([tensor]) shows what is pending; the setting tree_bound says how much is kept",
    )


def diff(first: Program | int | torch.Tensor, second: Program | int | torch.Tensor, sources: Sources = "short") -> str:
    """The differences of the second program from the first, as text, whatever numbers their values have. A program is
    given as such, by its number, or by a tensor that is pending."""
    return difference_text(_program(first), _program(second), sources=sources)


def _program(which: Program | int | torch.Tensor) -> Program:
    if isinstance(which, torch.Tensor):
        return pending_program([which])
    return known_entry(which).program if isinstance(which, int) else which


def compilations() -> str:
    """The number of programs compiled in this process and loaded from files of earlier ones, and those being compiled
    now."""
    return "\n".join([summary(), *(f"being compiled or loaded: {title}" for title in compiling_now())])


def _save(entry: CachedProgram) -> None:
    """Append a synced program to the file that the setting `save_tensors_file` names."""
    path = settings.save_tensors_file
    if not path:
        return
    frames = [frame for frame in reversed(traceback.extract_stack()) if is_user_file(frame.filename)]
    stack = "".join(f"  {frame.name} ({frame.filename}:{frame.lineno})\n" for frame in frames)
    digest = fingerprint(entry.program).hex()
    try:
        graph = program_form(entry.program, settings.save_tensors_format, entry.latest)
    except Exception as error:
        # A backend that cannot compile the program says so when it runs.
        graph = f"there is no {settings.save_tensors_format} form: {error}\n"
    # To the letter what the original writes, so that its users' scripts find their way.
    text = f"[ScheduleSyncTensorsGraph]\nPython Stacktrace:\n{stack}\nHashes: ({digest})\n"
    text = f"{text}\n## BEGIN_GRAPH\n{graph}\n## END_GRAPH\n\n\n"
    try:
        with _file_lock, open(path, "a", encoding="utf-8", opener=private_opener) as file:
            file.write(text)
    except OSError as error:
        _warn_once(path, error)


def _warn_once(path: str, error: OSError) -> None:
    if path in _refused:
        return
    _refused.add(path)
    source = current_source()
    what = f"programs cannot be written to {path}: {error.strerror or error} (this is said once)"
    hint = "set LTC_SAVE_TENSORS_FILE or settings.save_tensors_file to a file in a folder that exists"
    warnings.warn_explicit(f"{what}\n  try: {hint}", LtcWarning, source.file or __file__, source.line or 1)


program_synced.add(_save)
