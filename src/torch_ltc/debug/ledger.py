"""The sync ledger: each line of the user's that synced or read, why, how often, and what it cost."""

from __future__ import annotations

from torch_ltc.debug.recording import Recording, SyncRow
from torch_ltc.formatting import count_text, duration_text, size_text

__all__ = ["ledger_text"]

_HEADINGS = ("count", "steps", "waited", "bytes", "why", "line")


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
