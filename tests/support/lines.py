"""Lines of a test that are marked by a comment at their end, for tests that look for lines."""

from __future__ import annotations

from pathlib import Path


def marked(file: str, mark: str) -> int:
    """The number of the one line of a file that ends in this mark."""
    lines = enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1)
    found = [number for number, line in lines if line.endswith(f"# {mark}")]
    assert len(found) == 1, mark
    return found[0]
