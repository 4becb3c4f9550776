"""A recording made by hand, and what `run` changes put back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import recordings
from torch_ltc.config import SETTINGS, settings
from torch_ltc.debug.recording import (
    CompileRow,
    Explanation,
    Line,
    Memory,
    ProgramRow,
    Recording,
    SettingRow,
    Span,
    SyncRow,
)
from torch_ltc.source import Source

LOOP = Source("/home/user/train.py", 12, "train")
FORWARD = Source("/home/user/net.py", 7, "forward", module="Net.layers.0")
WHY = Explanation(2, "LTC104", "size", 1, "the size of an input", LOOP, advice="pad the batch")


def program(identity: int, size: int, calls: int = 2) -> ProgramRow:
    lines = (
        Line(f"%0: float32[{size}] = input(buffer=0)", FORWARD),
        Line(f"%1: float32[{size}] = aten::relu(%0)", FORWARD),
        Line("%2: float32[] ROOT=0 = aten::sum(%1)", LOOP),
    )
    return recordings.program(
        identity,
        calls=calls,
        inputs=1,
        outputs=1,
        site=LOOP,
        reason="explicit",
        first=FORWARD,
        syncs=3,
        runs=3,
        interpreted=1,
        record_s=0.01,
        compile_s=0.2,
        run_s=0.0125,
        lines=lines,
        explanation=WHY if identity == 2 else None,
        interpreted_s=0.0,
    )


def make_recording() -> Recording:
    return Recording(
        command=("train.py", "--epochs", "3"),
        started="2026-01-02T03:04:05",
        duration_s=2.5,
        steps=6,
        versions={"torch": "2.13.0"},
        settings=tuple(SettingRow(name, repr(item.default), "default") for name, item in SETTINGS.items()),
        programs=(program(1, 32), program(2, 17)),
        spans=(Span("run", "worker", 0.5, 0.01, 1, 1),),
        syncs=(
            SyncRow(LOOP, "sync", "explicit", 6, 6, 0.1, 0, (1, 2)),
            SyncRow(LOOP, "read", "item", 6, 6, 0.3, 24),
        ),
        fallbacks=(),
        compiles=(
            CompileRow(1, "torchscript", 0.4, 0.2, 1, 1, False, False, WHY),
            CompileRow(2, "torchscript", 0.9, 0.2, 4, 2, False, False, WHY),
            CompileRow(2, "torchscript", 1.9, 0.1, 4, 2, True, False, WHY),
        ),
        memory=Memory(),
        metrics={},
    )


@pytest.fixture
def recording() -> Recording:
    return make_recording()


@pytest.fixture
def saved(recording: Recording, tmp_path: Path) -> str:
    path = tmp_path / "run.json"
    path.write_text(recording.to_json())
    return str(path)


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    """`run` changes settings for the rest of the process."""
    yield
    settings.reload_environment()
