"""Counters of the history: for each program, for each line of the user's, for each compilation."""

from __future__ import annotations

from collections.abc import Iterable

from torch_ltc.debug.causes import Compared
from torch_ltc.debug.recording import Explanation
from torch_ltc.events import CompileEvent, LoadEvent, SyncReason
from torch_ltc.program.instruction import Program
from torch_ltc.source import UNKNOWN, Source


class ProgramFigures:
    """The counters of one program."""

    __slots__ = (
        "identity", "program", "calls", "inputs", "outputs", "site", "reason", "syncs", "runs", "interpreted", "failed",
        "backend", "compiles", "loads", "record_s", "compile_s", "run_s", "interpreted_s", "refused", "explanation",
        "states", "state_reason", "capture", "replays", "choice", "remark", "_compared",
    )  # fmt: skip

    def __init__(self, identity: int) -> None:
        self.identity = identity
        self.program: Program | None = None
        self.calls = self.inputs = self.outputs = 0
        self.site: Source = UNKNOWN
        self.reason: SyncReason | None = None
        self.syncs = self.runs = self.interpreted = self.failed = self.compiles = self.loads = 0
        self.backend = ""
        self.record_s = self.compile_s = self.run_s = self.interpreted_s = 0.0
        self.refused = ""
        self.states = ["interpreted"]
        self.state_reason = ""
        self.capture = ""
        self.replays = 0
        self.choice = ""
        self.remark = ""
        self.explanation: Explanation | None = None
        self._compared: Compared | None = None

    @property
    def first(self) -> Source:
        """The line of its first call."""
        calls = self.program.calls if self.program is not None else ()
        return calls[0].source if calls else UNKNOWN

    def compared(self) -> Compared | None:
        """The program as `explain` wants it; None when it is no longer kept."""
        if self.program is None:
            self._compared = None
        elif self._compared is None:
            self._compared = Compared(self.program, self.site, self.reason, self.identity)
        return self._compared


class LineFigures:
    """Syncs, reads or fallbacks of one kind at one line."""

    __slots__ = ("source", "kind", "reason", "count", "steps", "last_step", "wait_s", "size_bytes", "programs")

    def __init__(self, source: Source, kind: str, reason: str) -> None:
        self.source, self.kind, self.reason = source, kind, reason
        self.count = self.steps = self.size_bytes = 0
        self.last_step = -1
        self.wait_s = 0.0
        self.programs: dict[int, None] = {}

    def add(self, step: int, wait_s: float, size_bytes: int = 0) -> None:
        """It happened once more, in this step."""
        self.count += 1
        self.wait_s += wait_s
        self.size_bytes += size_bytes
        if step != self.last_step:
            self.steps += 1
            self.last_step = step


LineTable = dict[tuple[int, str, str], LineFigures]


class Compilation:
    """One compilation or load."""

    __slots__ = ("event", "loaded", "end_s", "step", "number", "explanation")

    def __init__(self, event: CompileEvent | LoadEvent, end_s: float, step: int, number: int) -> None:
        self.event = event
        self.loaded = isinstance(event, LoadEvent)
        self.end_s, self.step, self.number = end_s, step, number
        self.explanation: Explanation | None = None


def merged(rows: Iterable[LineFigures]) -> list[LineFigures]:
    """Figures by line, kind and reason: the same line may have been found more than once."""
    found: dict[tuple[Source, str, str], LineFigures] = {}
    for row in rows:
        whole = found.setdefault((row.source, row.kind, row.reason), LineFigures(row.source, row.kind, row.reason))
        whole.count += row.count
        whole.steps += row.steps
        whole.wait_s += row.wait_s
        whole.size_bytes += row.size_bytes
        whole.programs.update(row.programs)
    return list(found.values())
