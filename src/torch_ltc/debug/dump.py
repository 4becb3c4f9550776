"""Looking at the pending program: as text, as a dot graph, as the backend's own code, or in a file at each sync."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence

import torch

from torch_ltc.config import settings
from torch_ltc.lowering.lower import functional_form, lower
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program
from torch_ltc.program.render import program_dot, program_text
from torch_ltc.program.source import is_user_file
from torch_ltc.runtime.cache import Entry, fingerprint
from torch_ltc.runtime.pending import pending_numbers, pending_program
from torch_ltc.runtime.sync import synced_programs
from torch_ltc.runtime.tiers import compiling_now, summary

_file_lock = threading.Lock()


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


def compilations() -> str:
    """How many programs were compiled in this process and how many were loaded from files of earlier ones, and what is
    being compiled now."""
    return "\n".join([summary(), *(f"being compiled or loaded: {title}" for title in compiling_now())])


def _save(entry: Entry) -> None:
    """Append a synced program to the file that the setting `save_tensors_file` names."""
    path = settings.save_tensors_file
    if not path:
        return
    frames = [frame for frame in reversed(traceback.extract_stack()) if is_user_file(frame.filename)]
    stack = "\n".join(f"  {frame.name} ({frame.filename}:{frame.lineno})" for frame in frames)
    digest = fingerprint(entry.program).hex()
    graph = program_form(entry.program, settings.save_tensors_format, entry.latest)
    text = f"[ScheduleSyncTensorsGraph]\nPython Stacktrace:\n{stack}\n\nHashes: ({digest})\n\n"
    with _file_lock, open(path, "a", encoding="utf-8") as file:
        file.write(f"{text}## BEGIN_GRAPH\n{graph}## END_GRAPH\n\n")


synced_programs.append(_save)
