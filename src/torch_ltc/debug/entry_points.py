"""What a user asks of the running process: the doctor, the report, the ledger; and what is written when it ends."""

from __future__ import annotations

import multiprocessing
import os
import warnings

from torch_ltc.config import settings
from torch_ltc.debug.doctor import examine, findings_text
from torch_ltc.debug.explain import Text
from torch_ltc.debug.history import history
from torch_ltc.debug.ledger import ledger_text
from torch_ltc.debug.report import Report
from torch_ltc.errors import LtcWarning

__all__ = ["doctor", "report", "sync_ledger", "write_at_exit"]


def doctor() -> Text:
    """What the doctor finds in what happened so far: what costs, where, how much, and what to change."""
    return Text(findings_text(examine(history.recording(texts=False))))


def report(path: str | os.PathLike[str] | None = None) -> Report:
    """What happened so far as one self-contained page, written to `path` if that is given; a name that ends in ".json"
    gets the recording that pages can be made from. A notebook shows the result."""
    recording = history.recording()
    made = Report(recording, tuple(examine(recording)))
    if path is not None:
        made.save(path)
    return made


def sync_ledger() -> Text:
    """Each line that synced or read in this process, why, how often, and how long it waited there."""
    return Text(ledger_text(history.recording(texts=False)))


def write_at_exit() -> None:
    """Write what the setting `report` asks for. A failure is a warning: the process is ending.

    A process that `multiprocessing` started writes beside its parent's file, under its own number, and only if it has
    used the device.
    """
    path = settings.report
    if not path:
        return
    if multiprocessing.parent_process() is not None:
        if not history.recording(texts=False).programs:
            return
        name, suffix = os.path.splitext(path)
        path = f"{name}.{os.getpid()}{suffix}"
    try:
        report(path)
    except Exception as error:
        warnings.warn(f"at exit: no report was written: {error}", LtcWarning, stacklevel=1)
