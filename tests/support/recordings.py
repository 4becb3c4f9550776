"""Recordings made by hand: a healthy run of 100 steps, in which a test changes what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_ltc.debug.recording import (
    BufferRow,
    CompileRow,
    Explanation,
    FallbackRow,
    Memory,
    ProgramRow,
    Recording,
    SettingRow,
    Span,
    SyncRow,
)
from torch_ltc.source import Source


def line(number: int, function: str = "train") -> Source:
    """A line of the program that was recorded."""
    return Source("train.py", number, function)


def explanation(
    cause: str, number: int = 9, difference: str = "", advice: str = "", code: str = "LTC102"
) -> Explanation:
    return Explanation(2, code, cause, 1, difference, line(number), "", advice)


def program(identity: int = 1, **changes: Any) -> ProgramRow:
    """A program of 200 calls that was synced 100 times after the optimizer, and compiled at the second."""
    row = ProgramRow(
        identity=identity,
        calls=200,
        inputs=20,
        outputs=12,
        site=line(30),
        reason="optimizer",
        first=line(20),
        syncs=100,
        runs=100,
        interpreted=2,
        failed=0,
        backend="torchscript",
        compiles=1,
        loads=0,
        record_s=0.25,
        compile_s=0.05,
        run_s=0.5,
        refused="",
        lines=(),
        explanation=None,
        interpreted_s=0.02,
    )
    return replace(row, **changes)


def sync(reason: str = "optimizer", number: int = 30, count: int = 100, **changes: Any) -> SyncRow:
    row = SyncRow(line(number), "sync", reason, count, count, wait_s=0.002, size_bytes=0, programs=(1,))
    return replace(row, **changes)


def read(reason: str = "item", number: int = 31, count: int = 100, steps: int = 100, wait_s: float = 0.4) -> SyncRow:
    return SyncRow(line(number), "read", reason, count, steps, wait_s, size_bytes=4 * count)


def fallback(op: str = "aten::nonzero", count: int = 100, total_s: float = 0.3) -> FallbackRow:
    return FallbackRow(op, "the size of its result depends on data", line(25), count, total_s)


def compilation(number: int, cause: str = "size", duration_s: float = 0.5, **changes: Any) -> CompileRow:
    difference = changes.pop("difference", f"input 0 is float32[{number},3], was float32[{number - 1},3]")
    why = explanation(cause, difference=difference, advice=changes.pop("advice", ""))
    row = CompileRow(
        number, "torchscript", 0.1, duration_s, number, number, loaded=False, out_of_process=False, explanation=why
    )
    return replace(row, **changes)


def upload(step: int, size_bytes: int = 64, duration_s: float = 0.001) -> Span:
    return Span("upload", "user", step / 10, duration_s, step, size_bytes=size_bytes)


def held(
    count: int, size_bytes: int, number: int = 32, op: str = "aten::mse_loss", runs: int | None = None
) -> BufferRow:
    """Live buffers of one line, from as many runs unless told."""
    return BufferRow(line(number), op, count, size_bytes, count if runs is None else runs)


def growing(first: int, each: int, count: int = 40) -> tuple[tuple[float, int], ...]:
    """Memory samples that begin with `first` bytes and grow by `each`."""
    return tuple((index / 10, first + index * each) for index in range(count))


def recording(**changes: Any) -> Recording:
    """100 healthy steps in a second."""
    settings = {"backend": "'torchscript'", "tiers": "'background'", "cache_dir": "''", "pending_bound": "20000"}
    made = Recording(
        command=("train.py",),
        started="2026-01-01T00:00:00",
        duration_s=1.0,
        steps=100,
        versions={},
        settings=tuple(SettingRow(name, value, "default") for name, value in settings.items()),
        programs=(program(),),
        spans=(),
        syncs=(sync(),),
        fallbacks=(),
        compiles=(compilation(1, "first", 0.05, difference=""),),
        memory=Memory(1000, 2000, growing(1000, 0), (held(40, 900, 5, "upload"),)),
        metrics={},
    )
    chosen = changes.pop("setting", {})
    rows = tuple(replace(row, value=repr(chosen[row.name])) if row.name in chosen else row for row in made.settings)
    return replace(made, **{"settings": rows, **changes})
