"""Bounded history of the events of the pipeline, by program, line and time.

One object for the process, `history`. It listens from the import of the package on; `recording()` gives everything as
plain values. What it does per event is on the way of every sync, so that it is little: rows are made when asked for.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch_ltc import events, metrics
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import SETTINGS, settings
from torch_ltc.debug.causes import Compared, explain_compile, explain_new
from torch_ltc.debug.recording import (
    BufferRow,
    CompileRow,
    EagerRow,
    Explanation,
    FallbackRow,
    Line,
    Memory,
    NonFiniteRow,
    ProgramRow,
    Recording,
    SettingRow,
    Span,
    SyncRow,
    versions,
)
from torch_ltc.debug.stats import Compilation, LineFigures, LineTable, ProgramFigures, merged
from torch_ltc.events import (
    CaptureEvent,
    ChoiceEvent,
    CompileEvent,
    ExecuteEvent,
    FallbackEvent,
    LoadEvent,
    NonFiniteEvent,
    ReadEvent,
    RefusalEvent,
    StateEvent,
    SyncEvent,
    SyncReason,
    UploadEvent,
)
from torch_ltc.execute.eager_region import eager_regions
from torch_ltc.execute.memory import memory, physical_figures
from torch_ltc.execute.sync import program_synced
from torch_ltc.formatting import duration_text
from torch_ltc.hooks import Hook
from torch_ltc.lowering.registry import registry
from torch_ltc.program.text import program_lines
from torch_ltc.source import UNKNOWN, Source

__all__ = ["History", "functions_explained", "history"]

functions_explained = Hook[[], list[str]]("functions explained", "when a recording is made; what jit functions did")

# How much is kept. Programs are kept for their text and to compare others with; figures outlive them.
_MOST_SPANS = 20_000
_MOST_PROGRAMS = 4_096
_MOST_INSTRUCTIONS = 100_000
_MOST_SITES = 10_000
_MOST_HOLDINGS = 100
_MOST_STATES = 8
# The sentence and the name of each reason; asking an enum for them takes longer.
_REASONS = {reason: (reason.value, reason.name.lower()) for reason in SyncReason}

recompiled = Hook[[Explanation, int, Source], None](
    "recompiled", "when a site compiles for the third time or more, with the explanation"
)


class History:
    """The events of this process since the start, or since `clear`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listening: list[Callable[[], None]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything, and begin anew."""
        events.catch_up()
        with self._lock:
            self._began = time.perf_counter()
            self._started = datetime.datetime.now().isoformat(timespec="seconds")
            self._spans: deque[tuple[Any, ...]] = deque(maxlen=_MOST_SPANS)
            self._span_count = 0
            self._programs: OrderedDict[int, ProgramFigures] = OrderedDict()
            self._instructions = 0
            self._dropped_programs = 0
            # By the identity of the line, which is kept with the row.
            self._sites: LineTable = {}
            self._fallbacks: LineTable = {}
            self._compiles: deque[Compilation] = deque(maxlen=_MOST_PROGRAMS)
            self._nonfinite: deque[NonFiniteRow] = deque(maxlen=_MOST_SITES)
            self._compiled_at: dict[tuple[Source, Source], int] = {}
            memory.forget_samples()
            self._step = self._optimizer_steps = self._explicit_steps = 0
            self._first_run = memory.run
            eager_regions.reset()

    def listen(self) -> None:
        """Begin to listen. A second call does nothing."""
        if self._listening:
            return
        handlers: dict[type, Callable[[Any], None]] = {
            CompileEvent: self._on_compile,
            LoadEvent: self._on_compile,
            FallbackEvent: self._on_fallback,
            RefusalEvent: self._on_refusal,
            StateEvent: self._on_state,
            CaptureEvent: self._on_capture,
            ChoiceEvent: self._on_choice,
            NonFiniteEvent: self._on_nonfinite,
        }
        keepers: dict[type, Callable[..., None]] = {
            SyncEvent: self._on_sync,
            ExecuteEvent: self._on_execute,
            ReadEvent: self._on_read,
            UploadEvent: self._on_upload,
        }
        self._listening = [events.subscribe(handler, kind) for kind, handler in handlers.items()]
        self._listening.append(events.keep_figures(lambda batch: self._keep(batch, keepers), *keepers))
        self._stop_synced = program_synced.add(self._on_synced)

    def stop(self) -> None:
        """Listen no more; what was kept stays. `listen` begins again."""
        for end in self._listening:
            end()
        self._listening = []
        self._stop_synced()

    @property
    def step(self) -> int:
        """The number of steps that have ended: syncs after an optimizer, or, where there is none, explicit ones."""
        events.catch_up()
        return self._step

    # ---- events ---------------------------------------------------------------------------------------------------

    def _span(
        self,
        kind: str,
        lane: str,
        end_s: float,
        took_s: float,
        program: int,
        label: str,
        size_bytes: int = 0,
        source: Source | None = None,
    ) -> None:
        self._span_count += 1
        self._spans.append((kind, lane, end_s - took_s, took_s, self._step, program, label, size_bytes, source))

    def _program(self, identity: int) -> ProgramFigures:
        found = self._programs.get(identity)
        if found is None:
            found = self._programs[identity] = ProgramFigures(identity)
            if len(self._programs) > _MOST_PROGRAMS:
                _, oldest = self._programs.popitem(last=False)
                self._dropped_programs += 1
                self._forget(oldest)
        return found

    def _forget(self, row: ProgramFigures) -> None:
        if row.program is not None:
            self._instructions -= len(row.program.instructions)
            row.program = None

    def _site(self, table: LineTable, source: Source | None, kind: str, reason: str) -> LineFigures:
        source = UNKNOWN if source is None else source
        row = table.get((id(source), kind, reason))
        if row is None:
            if len(table) >= _MOST_SITES:
                source = UNKNOWN
            row = table.setdefault((id(source), kind, reason), LineFigures(source, kind, reason))
        return row

    def _keep(self, batch: Sequence[events.Noted], keepers: Mapping[type, Callable[..., None]]) -> None:
        """Keep what came at every step."""
        with self._lock:
            for kind, at_s, fields in batch:
                keepers[kind](at_s, *fields)

    def _on_sync(
        self,
        at_s: float,
        reason: SyncReason,
        instructions: int,
        inputs: int,
        outputs: int,
        program: int,
        known: bool,
        record_s: float,
        source: Source | None,
        duration_s: float,
    ) -> None:
        del known
        sentence, name = _REASONS[reason]
        row = self._program(program)
        if not row.syncs:
            row.site = source or UNKNOWN
            row.reason = reason
            row.inputs, row.outputs = inputs, outputs
            row.calls = instructions - inputs
        row.syncs += 1
        row.record_s += record_s
        began_s, step = at_s - duration_s, self._step
        self._span_count += 2
        self._spans.append(("record", "user", began_s - record_s, record_s, step, program, "", 0, None))
        self._spans.append(("sync", "user", began_s, duration_s, step, program, sentence, 0, None))
        site = self._site(self._sites, source, "sync", name)
        site.add(step, duration_s)
        if len(site.programs) < 8:
            site.programs[program] = None
        if reason is SyncReason.OPTIMIZER:
            self._optimizer_steps += 1
        elif reason is SyncReason.EXPLICIT:
            self._explicit_steps += 1
        self._step = self._optimizer_steps or self._explicit_steps

    def _on_synced(self, entry: CachedProgram) -> None:
        row = self._programs.get(entry.program.identity)
        if row is not None and row.program is not None:
            return
        events.catch_up()
        row = self._programs.get(entry.program.identity)
        if row is None or row.program is not None:
            return
        with self._lock:
            row.program = entry.program
            self._instructions += len(entry.program.instructions)
            if self._instructions > _MOST_INSTRUCTIONS:
                self._make_room(row)

    def _make_room(self, newest: ProgramFigures) -> None:
        for row in list(self._programs.values()):
            if self._instructions <= _MOST_INSTRUCTIONS:
                return
            if row is not newest:
                self._forget(row)

    def _on_execute(
        self, at_s: float, program: int, backend: str, duration_s: float, failed: bool, captured: bool, host_s: float
    ) -> None:
        del host_s
        row = self._program(program)
        row.runs += 1
        row.run_s += duration_s
        row.failed += failed
        row.replays += captured
        row.backend = backend
        if backend == registry.reference.name:
            row.interpreted += 1
            row.interpreted_s += duration_s
        self._span("run", "worker", at_s, duration_s, program, backend)

    def _on_read(
        self, at_s: float, reason: str, size_bytes: int, duration_s: float, source: Source | None, wait_s: float
    ) -> None:
        copied_s = duration_s - wait_s
        if wait_s:
            self._span("wait", "user", at_s - copied_s, wait_s, 0, reason)
        self._span("copy", "user", at_s, copied_s, 0, reason, size_bytes)
        self._site(self._sites, source, "read", reason).add(self._step, duration_s, size_bytes)

    def _on_upload(self, at_s: float, size_bytes: int, duration_s: float, source: Source | None) -> None:
        self._span("upload", "user", at_s, duration_s, 0, "", size_bytes, source)

    def _on_fallback(self, event: FallbackEvent) -> None:
        with self._lock:
            self._span("fallback", "user", time.perf_counter(), event.duration_s, 0, event.op)
            site = self._site(self._fallbacks, event.source, event.op, event.reason)
            site.add(self._step, event.duration_s)

    def _on_refusal(self, event: RefusalEvent) -> None:
        with self._lock:
            self._program(event.program).refused = event.reason

    def _on_state(self, event: StateEvent) -> None:
        with self._lock:
            row = self._program(event.program)
            del row.states[: -_MOST_STATES + 1]
            row.states.append(event.state)
            row.state_reason = f"{event.backend}: {event.reason}"

    def _on_capture(self, event: CaptureEvent) -> None:
        with self._lock:
            graphs = "1 graph" if event.graphs == 1 else f"{event.graphs} graphs"
            text = f"not captured: {event.refusal}" if event.refusal else f"captured as {graphs}: {event.text}"
            self._program(event.program).capture = text

    def _on_choice(self, event: ChoiceEvent) -> None:
        with self._lock:
            timings = ", ".join(f"{name} {duration_text(took_s)}" for name, took_s in event.timings)
            self._program(event.program).choice = f"{event.kept}, chosen by measurement: {timings}"

    def _on_nonfinite(self, event: NonFiniteEvent) -> None:
        with self._lock:
            row = NonFiniteRow(event.program, event.op, event.source or UNKNOWN, self._step, event.text)
            self._nonfinite.append(row)

    def _on_compile(self, event: CompileEvent | LoadEvent) -> None:
        now = time.perf_counter()
        with self._lock:
            row = self._program(event.program)
            row.remark = event.remark or row.remark
            loaded = isinstance(event, LoadEvent)
            number = 0
            if loaded:
                row.loads += 1
            else:
                row.compiles += 1
                row.compile_s += event.duration_s
                place = (row.first, row.site)
                number = self._compiled_at[place] = self._compiled_at.get(place, 0) + 1
            made = Compilation(event, now, self._step, number)
            self._compiles.append(made)
            kind = "load" if loaded else "compile"
            self._span(kind, "compiler", now, event.duration_s, event.program, event.backend)
        if number >= 3 and recompiled:
            recompiled(self._explained(made), number, row.site)

    # ---- what is made of it ---------------------------------------------------------------------------------------

    def _known(self) -> list[Compared]:
        """The programs to compare with, oldest first."""
        found = [row.compared() for row in self._programs.values()]
        return sorted([one for one in found if one is not None], key=lambda one: one.identity)

    def _explained(self, compiled: Compilation) -> Explanation:
        if compiled.explanation is None:
            with self._lock:
                row = self._program(compiled.event.program)
                own = row.compared()
                earlier = [one.event for one in self._compiles if one is not compiled and one.end_s <= compiled.end_s]
                compiled.explanation = explain_compile(own, compiled.event, earlier, self._known(), row.identity)
        return compiled.explanation

    def newness(self, program: int) -> Explanation | None:
        """The cause of the program of this identity; None where nothing is kept of it."""
        events.catch_up()
        with self._lock:
            row = self._programs.get(program)
            return None if row is None else self._newness(row, self._known())

    def _newness(self, row: ProgramFigures, known: list[Compared]) -> Explanation | None:
        if row.explanation is None:
            own = row.compared()
            row.explanation = None if own is None else explain_new(own, known)
        return row.explanation

    def recording(self, texts: bool = True, causes: bool = True) -> Recording:
        """Everything, as plain values. Without `texts` programs have no text, and without `causes` no explanation: that
        takes longest to make."""
        # Before the lock is taken, which whoever catches up needs.
        figures = metrics.snapshot()
        with self._lock:
            now = time.perf_counter()
            known = self._known()
            return Recording(
                command=tuple(sys.argv),
                started=self._started,
                duration_s=now - self._began,
                steps=self._step,
                versions=versions(),
                settings=_setting_rows(),
                programs=tuple(self._program_row(row, known, texts, causes) for row in self._programs.values()),
                spans=tuple(self._span_rows()),
                syncs=tuple(_sync_row(row) for row in merged(self._sites.values())),
                fallbacks=tuple(
                    FallbackRow(row.kind, row.reason, row.source, row.count, row.wait_s)
                    for row in merged(self._fallbacks.values())
                ),
                compiles=tuple(self._compile_row(compiled) for compiled in self._compiles),
                memory=self._memory(),
                metrics=figures,
                nonfinite=tuple(self._nonfinite),
                eager=_eager_row(),
                functions=tuple([text for explain in functions_explained for text in explain()]),
                dropped_spans=self._span_count - len(self._spans),
                dropped_programs=self._dropped_programs,
            )

    def _span_rows(self) -> Iterable[Span]:
        for kind, lane, begin, took, step, program, label, size, source in self._spans:
            # As text: a run has thousands of spans, and few lines.
            yield Span(kind, lane, begin - self._began, took, step, program, str(source or label), size)

    def _program_row(self, row: ProgramFigures, known: list[Compared], texts: bool, causes: bool) -> ProgramRow:
        lines: tuple[Line, ...] = ()
        if texts and row.program is not None:
            lines = tuple(Line(text, source) for text, source in program_lines(row.program))
        return ProgramRow(
            identity=row.identity,
            calls=row.calls,
            inputs=row.inputs,
            outputs=row.outputs,
            site=row.site,
            reason="" if row.reason is None else row.reason.name.lower(),
            first=row.first,
            syncs=row.syncs,
            runs=row.runs,
            interpreted=row.interpreted,
            failed=row.failed,
            backend=row.backend,
            compiles=row.compiles,
            loads=row.loads,
            record_s=row.record_s,
            compile_s=row.compile_s,
            run_s=row.run_s,
            refused=row.refused,
            lines=lines,
            explanation=self._newness(row, known) if causes else row.explanation,
            interpreted_s=row.interpreted_s,
            states=tuple(row.states),
            state_reason=row.state_reason,
            capture=row.capture,
            replays=row.replays,
            choice=row.choice,
            remark=row.remark,
        )

    def _compile_row(self, compiled: Compilation) -> CompileRow:
        event = compiled.event
        return CompileRow(
            program=event.program,
            backend=event.backend,
            begin_s=compiled.end_s - event.duration_s - self._began,
            duration_s=event.duration_s,
            step=compiled.step,
            number=compiled.number,
            loaded=compiled.loaded,
            out_of_process=isinstance(event, CompileEvent) and event.out_of_process,
            explanation=self._explained(compiled),
        )

    def _memory(self) -> Memory:
        held = memory.largest(_MOST_HOLDINGS, self._first_run)
        return Memory(
            current_bytes=memory.current_bytes,
            peak_bytes=memory.peak_bytes,
            samples=tuple((at - self._began, size) for at, size in memory.samples),
            largest=tuple(BufferRow(one.source, one.op, one.count, one.size_bytes, one.runs) for one in held),
            physical=physical_figures(),
        )


def _sync_row(row: LineFigures) -> SyncRow:
    programs = tuple(row.programs)
    return SyncRow(row.source, row.kind, row.reason, row.count, row.steps, row.wait_s, row.size_bytes, programs)


def _eager_row() -> EagerRow:
    figures = eager_regions.figures()
    return EagerRow(figures.begun, figures.calls, figures.reads, tuple(eager_regions.places.items()))


def _setting_rows() -> tuple[SettingRow, ...]:
    return tuple(SettingRow(name, repr(getattr(settings, name)), settings.origin(name).value) for name in SETTINGS)


history = History()
