"""Entry points for a running process: doctor, report, sync ledger, profiler; and the report written at its end."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from typing import Any

import torch

from torch_ltc.config import rank, settings
from torch_ltc.debug.doctor import examine, findings_text
from torch_ltc.debug.explain import Text
from torch_ltc.debug.history import history
from torch_ltc.debug.recording import Recording, SyncRow
from torch_ltc.debug.report import Report
from torch_ltc.errors import LtcWarning
from torch_ltc.formatting import count_text, duration_text, size_text
from torch_ltc.pytorch.private import ProfilerConfig

_HEADINGS = ("count", "steps", "waited", "bytes", "why", "line")


def doctor() -> Text:
    """The doctor's findings on this process so far: what costs, where, how much, and what to change."""
    return Text(findings_text(examine(history.recording(texts=False))))


def report(path: str | os.PathLike[str] | None = None) -> Report:
    """The report of this process so far, one self-contained page, written to `path` if that is given; a name that ends
    in ".json" gets the recording that pages can be made from. A notebook shows the result."""
    recording = history.recording()
    made = Report(recording, tuple(examine(recording)))
    if path is not None:
        made.save(path)
    return made


def sync_ledger() -> Text:
    """Each line that synced or read in this process, why, how often, and how long it waited there."""
    return Text(ledger_text(history.recording(texts=False)))


def ledger_text(recording: Recording) -> str:
    """The ledger as a table, what cost most first. `steps` counts the steps in which it happened; `waited` is the time
    that the user's thread stood still there."""
    if not recording.syncs:
        return "nothing was synced or read"
    rows = sorted(recording.syncs, key=lambda row: (-row.wait_s, -row.count, str(row.source)))
    table = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADINGS) - 1)]
    lines = []
    for row in table:
        numbers = [cell.rjust(width) for cell, width in zip(row[:4], widths)]
        lines.append("  ".join([*numbers, row[4].ljust(widths[4]), row[5]]))
    total_s = sum(row.wait_s for row in rows)
    return "\n".join([*lines, f"{duration_text(total_s)} in {count_text(recording.steps, 'step')}"])


def _cells(row: SyncRow) -> tuple[str, ...]:
    why = f"sync: {row.reason}" if row.kind == "sync" else f"read: {row.reason}"
    size = size_text(row.size_bytes) if row.kind == "read" else "-"
    return (f"{row.count:,}", f"{row.steps:,}", duration_text(row.wait_s), size, why, row.source.describe())


def profile(**options: Any) -> torch.profiler.profile:
    """`torch.profiler.profile(**options)` that also sees what runs beside the thread that starts it: programs on the
    worker's thread, compiling on the compiler's."""
    # Without it, PyTorch warns that it forgets the events of earlier cycles.
    options.setdefault("acc_events", True)
    config: Any = options.pop("experimental_config", None)
    if config is None:
        config = ProfilerConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=config, **options)


def write_at_exit() -> None:
    """Write the report that the setting `report` names. A failure is a warning: the process is ending.

    A process that `multiprocessing` started writes beside its parent's file, under its own number, and only if it has
    used the device. A rank that `torchrun` started writes under its rank: "report.rank1.html".
    """
    path = settings.report
    if not path:
        return
    name, suffix = os.path.splitext(path)
    if rank() is not None:
        path = f"{name}.rank{rank()}{suffix}"
    elif multiprocessing.parent_process() is not None:
        if not history.recording(texts=False).programs:
            return
        path = f"{name}.{os.getpid()}{suffix}"
    try:
        report(path)
    except Exception as error:
        warnings.warn(f"at exit: no report was written: {error}", LtcWarning, stacklevel=1)
