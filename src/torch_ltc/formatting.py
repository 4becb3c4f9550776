"""Counts, sizes and durations as people read them: one way for every message."""

from __future__ import annotations

__all__ = ["count_text", "duration_text", "size_text"]


def count_text(number: int, noun: str) -> str:
    """As "1 read" and "3 reads"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size_text(size_bytes: float) -> str:
    """Bytes, as "512 B", "1.5 KiB", "37.3 GiB"."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # What would be rounded to 1024 is one of the next unit.
        if size < 1023.95 or unit == "TiB":
            break
    return f"{size:.1f} {unit}"


def duration_text(duration_s: float) -> str:
    """With two or three digits that count: "1.25 s", "12.5 ms", "850 us"."""
    if duration_s >= 0.9995:
        return f"{duration_s:,.2f} s"
    if duration_s >= 0.0009995:
        return f"{duration_s * 1e3:.3g} ms"
    return f"{duration_s * 1e6:.3g} us"
