"""IPython and notebooks: `%load_ext torch_ltc`.

Tensors of the device are shown without a sync: as they are when they are computed, else by what will make them. A cell
that begins with `%%ltc` is followed by what it did: programs, syncs and reads by line, and the doctor's findings.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_ltc.api import sync
from torch_ltc.debug.doctor import examine, findings_text
from torch_ltc.debug.entry_points import ledger_text
from torch_ltc.debug.explain import Text
from torch_ltc.debug.history import History
from torch_ltc.debug.recording import Recording
from torch_ltc.debug.report import Report
from torch_ltc.execute.pending import uncomputed
from torch_ltc.formatting import count_text

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

_MAGIC = "ltc"
_HELP = "%%ltc shows what a cell did on the device; %%ltc --report shows the whole report of it"


def load_ipython_extension(shell: Any) -> None:
    """IPython calls this for `%load_ext torch_ltc`."""
    run = functools.partial(_run_cell, shell)
    run.__doc__ = _HELP
    shell.register_magic_function(run, "cell", _MAGIC)
    shell.display_formatter.formatters["text/plain"].for_type(torch.Tensor, _print_tensor)


def unload_ipython_extension(shell: Any) -> None:
    """IPython calls this for `%unload_ext torch_ltc`."""
    shell.magics_manager.magics["cell"].pop(_MAGIC, None)
    shell.display_formatter.formatters["text/plain"].pop(torch.Tensor, None)


def _print_tensor(tensor: torch.Tensor, printer: Any, cycle: bool) -> None:
    """The text of a tensor; of one that is not computed yet, what is known without a sync."""
    del cycle
    state = uncomputed(tensor) if tensor.device.type == "ltc" and tensor.layout is torch.strided else ""
    printer.text(f"tensor(<{state}>, device='{tensor.device}')" if state else repr(tensor))


def _run_cell(shell: Any, line: str, cell: str) -> Text | Report | None:
    """Run the cell to the end of its last program, and show what happened."""
    if line.strip() not in ("", "--report"):
        print(_HELP)  # noqa: T201  a message to the person at the notebook
        return None
    sync(wait=True)
    seen = History()
    seen.listen()
    try:
        shell.run_cell(cell)
        sync(wait=True)
    finally:
        seen.stop()
    recording = seen.recording()
    if line.strip() == "--report":
        return Report(recording, tuple(examine(recording)))
    return Text(cell_text(recording))


def cell_text(recording: Recording) -> str:
    """What a cell did, in a few lines."""
    compiles = sum(not row.loaded for row in recording.compiles)
    fallbacks = sum(row.count for row in recording.fallbacks)
    counts = [
        count_text(recording.steps, "step"),
        count_text(len(recording.programs), "program"),
        count_text(compiles, "compile"),
        count_text(fallbacks, "fallback"),
    ]
    programs = [
        f"program {row.identity}: {count_text(row.calls, 'call')}, {count_text(row.runs, 'run')} from {row.first}"
        for row in recording.programs
    ]
    return "\n".join([", ".join(counts), *programs, "", ledger_text(recording), "", findings_text(examine(recording))])
