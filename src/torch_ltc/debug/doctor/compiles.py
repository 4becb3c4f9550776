"""Rules about compilations: those that come again and again, those that do not pay, and programs without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch_ltc.debug.doctor.figures import (
    FEWEST_STEPS,
    active_s,
    grouped,
    line_of,
    listed,
    percent,
    setting,
    share,
)
from torch_ltc.debug.doctor.registry import Severity, Symptom, rule
from torch_ltc.debug.recording import CompileRow, ProgramRow, Recording
from torch_ltc.formatting import count_text, duration_text

# One recompilation is how a changing size becomes a run-time input; from the second on something does not settle.
_FEWEST_RECOMPILES = 2
# Below this part of the run recompilations are no reason to change a program.
_WORTH_A_WARNING = 0.01
# The part of the run from which a program is worth a word on what was measured of it.
_WORTH_MEASURING = 0.3
# A compilation shorter than this is not worth a word, whatever it brings.
_WORTH_COMPILING_S = 0.5
# Compilation time of a run from which keeping the results for the next one is felt.
_WORTH_KEEPING_S = 5.0
# Fewer compiled runs than this do not show what compiling brings.
_FEWEST_RUNS = 5
# Programs at one line that were synced once each, from which on they are no warm-up.
_FEWEST_PROGRAMS = 10
# Part of the programs at a line that are seen once: below it, what is new is the exception.
_MOSTLY_NEW = 0.8
# The same for programs that run compiled, and the parts of the run from which recording them is felt.
_OFTEN_NEW = 0.5
_WORTH_A_HINT = 0.02
_MOSTLY_RECORDING = 0.4
# Fewer runs than this say nothing about a backend; of more, it should have this part.
_FEWEST_BACKEND_RUNS = 20
_HARDLY_USED = 0.1

# Causes that `explain` names: those of a size, and those that come once and need no advice.
_SIZES = ("size", "guard")
_HARMLESS = ("first", "backend", "mode")


def _recompiles(recording: Recording, of_sizes: bool) -> Iterator[list[CompileRow]]:
    """Compilations after the first at a site, grouped by cause and by the line of the first difference."""
    again = [
        row
        for row in recording.compiles
        if not row.loaded
        and row.number > 1
        and row.explanation.cause not in _HARMLESS
        and (row.explanation.cause in _SIZES) == of_sizes
    ]
    for rows in grouped(again, lambda row: (row.explanation.cause, line_of(row.explanation.source))):
        if len(rows) >= _FEWEST_RECOMPILES:
            yield rows


def _recompiled(recording: Recording, rows: list[CompileRow], title: str, evidence: str) -> Symptom:
    took_s = sum(row.duration_s for row in rows)
    severity: Severity = "warning" if share(took_s, active_s(recording)) >= _WORTH_A_WARNING else "hint"
    return Symptom(title, evidence, rows[-1].explanation.source, cost_s=took_s, severity=severity)


def _evidence(rows: list[CompileRow]) -> str:
    differences = list(dict.fromkeys(row.explanation.difference for row in rows if row.explanation.difference))
    took = duration_text(sum(row.duration_s for row in rows))
    what = f": {listed(differences)}" if differences else ""
    return f"compiled again {count_text(len(rows), 'time')}, which took {took}{what}"


@rule(
    "LTC204",
    "recompiling size",
    means="Programs that differ in a size alone are compiled again and again. A size that changes becomes a run-time "
    "input when it can; this one does not settle, because the backend or an operation needs it fixed.",
    advice="Pad the batch or the sequence to a few fixed sizes (drop_last=True in the DataLoader, buckets of 64, 128, "
    "256 tokens), so that few sizes come again.",
)
def recompiling_size(recording: Recording) -> Iterator[Symptom]:
    """A size that keeps causing compilations."""
    for rows in _recompiles(recording, of_sizes=True):
        yield _recompiled(recording, rows, "a size that changes is compiled again and again", _evidence(rows))


@rule(
    "LTC205",
    "recompiling",
    means="Programs cut at one line are compiled again and again, for a cause other than a size.",
    advice="Make the steps record the same operations with the same arguments: see the message of the cause.",
)
def recompiling(recording: Recording) -> Iterator[Symptom]:
    """Anything else that keeps causing compilations."""
    for rows in _recompiles(recording, of_sizes=False):
        last = rows[-1].explanation
        title = f"programs are compiled again and again ({last.cause})"
        yield replace(_recompiled(recording, rows, title, f"{_evidence(rows)} ({last.code})"), fix=last.advice)


@rule(
    "LTC209",
    "compilation that does not pay",
    severity="hint",
    means="Compiling a program took longer than all of its runs have gained from it.",
    advice="Nothing, if the program will run longer than this one did. Else keep the result on disk (cache_dir), or "
    'choose a backend that compiles faster: torch_ltc.use_backend("torchscript") or "interpreter".',
)
def compilation_does_not_pay(recording: Recording) -> Iterator[Symptom]:
    """A compilation that took longer than it saved."""
    waited = setting(recording, "tiers") in ("blocking", "off")
    for row in recording.programs:
        compiled = row.runs - row.interpreted
        if row.compile_s < _WORTH_COMPILING_S or compiled < _FEWEST_RUNS or not row.interpreted or row.choice:
            continue
        before_s = row.interpreted_s / row.interpreted
        after_s = (row.run_s - row.interpreted_s) / compiled
        gain_s = (before_s - after_s) * compiled
        if gain_s < row.compile_s:
            runs = f"a run takes {duration_text(after_s)} compiled and {duration_text(before_s)} in the interpreter"
            pays = _break_even(row, before_s - after_s)
            yield Symptom(
                "compiling has not paid so far" if before_s > after_s else "the compiled program is not faster",
                f"compiling program {row.identity} took {duration_text(row.compile_s)}; {runs}; {pays}",
                row.site,
                cost_s=row.compile_s - max(0.0, gain_s) if waited else 0.0,
                severity="warning" if waited and before_s <= after_s else None,
            )


def _break_even(row: ProgramRow, gain_s: float) -> str:
    compiled = row.runs - row.interpreted
    if gain_s <= 0:
        return f"{count_text(compiled, 'run')} gained nothing"
    return f"it pays from run {int(row.compile_s / gain_s) + 1:,} on, and there were {compiled:,}"


@rule(
    "LTC224",
    "compiled code is no faster",
    severity="hint",
    means="The forms of a program that are equal to eager to the bit were measured, and the interpreter was the "
    "fastest: its time is that of PyTorch's kernels.",
    advice="If results may differ in the last digits, let Inductor take part, which fuses operations: "
    'settings.numerics = "close", or LTC_NUMERICS=close.',
)
def compiled_code_is_no_faster(recording: Recording) -> Iterator[Symptom]:
    """Programs that take much of the time, and that stay in the interpreter by measurement."""
    if setting(recording, "numerics") == "close":
        return
    for row in recording.programs:
        if row.choice.startswith("interpreter") and share(row.run_s, active_s(recording)) >= _WORTH_MEASURING:
            part = percent(row.run_s, active_s(recording))
            yield Symptom(
                "compiled code is no faster than the interpreter",
                f"program {row.identity}, {part} of the run, runs on {row.choice}",
                row.site,
            )


@rule(
    "LTC211",
    "backend refused",
    means="A backend could not compile or run a program, and the interpreter runs it instead, operation by operation.",
    advice="See what the backend says; try another one with torch_ltc.use_backend(...), or set "
    'settings.backend_failure = "error" to stop at the line.',
)
def backend_refused(recording: Recording) -> Iterator[Symptom]:
    """Programs that the backend left to the interpreter."""
    refused = [row for row in recording.programs if row.refused]
    for rows in grouped(refused, lambda row: row.refused.partition("\n")[0]):
        yield Symptom(
            "the backend refused a program" if len(rows) == 1 else f"the backend refused {len(rows)} programs",
            f"{count_text(sum(row.interpreted for row in rows), 'run')} in the interpreter, "
            f"{duration_text(sum(row.run_s for row in rows))} in all: {rows[0].refused.partition(chr(10))[0]}",
            rows[0].first,
        )


@rule(
    "LTC222",
    "compiling had not ended",
    severity="hint",
    means="The run ended while programs were still being compiled: the interpreter ran them.",
    advice="Run longer, or once more: the compiler process goes on for up to five minutes, and the next run loads "
    "the program that it was at from cache_dir. torch_ltc.wait_for_compiles() waits for it.",
)
def compiling_had_not_ended(recording: Recording) -> Iterator[Symptom]:
    """Programs that waited for their compilation to the end."""
    waiting = [row for row in recording.programs if row.states[-1] in ("queued", "compiling") and row.runs > 1]
    if waiting:
        runs = sum(row.runs for row in recording.programs)
        compiled = runs - sum(row.interpreted for row in recording.programs)
        yield Symptom(
            "the run ended before compiling did",
            f"{compiled:,} of {count_text(runs, 'run')} on {setting(recording, 'backend')}; "
            f"{count_text(len(waiting), 'program')} waited for the compiler",
            waiting[0].site,
        )


@rule(
    "LTC212",
    "programs never seen twice",
    means="The programs cut at a line are nearly all different. None is compiled, and each is recorded at the price of "
    "a new one.",
    advice="Make the steps record the same operations: keep Python numbers that change out of shapes and branches, and "
    "hold the same tensors at the end of every step (a list that grows changes the program).",
)
def never_seen_twice(recording: Recording) -> Iterator[Symptom]:
    """Lines at which nearly every program is new."""
    for rows, syncs in _by_line(recording):
        once = [
            row
            for row in rows
            if row.syncs == 1 and not row.compiles and not row.loads and row.backend in _NOT_COMPILED
        ]
        if len(once) < _FEWEST_PROGRAMS or len(once) < _MOSTLY_NEW * syncs:
            continue
        explained = [row.explanation for row in once if row.explanation is not None and row.explanation.difference]
        last = f"; the last differs from an earlier one in this: {explained[-1].difference}" if explained else ""
        yield Symptom(
            "nearly every program is new",
            f"{len(once):,} of {count_text(syncs, 'sync')} at this line had a program that came once{last}",
            explained[-1].source if explained else rows[-1].site,
            fix=explained[-1].advice if explained else "",
        )


_NOT_COMPILED = ("", "auto", "interpreter")


def _by_line(recording: Recording) -> Iterator[tuple[Sequence[ProgramRow], int]]:
    """Programs by the line that cuts them, with their syncs, once there were steps enough."""
    if recording.steps and recording.steps < FEWEST_STEPS:
        return
    for rows in grouped(recording.programs, lambda row: line_of(row.site)):
        yield rows, sum(row.syncs for row in rows)


@rule(
    "LTC220",
    "sizes that never come again",
    severity="hint",
    means="Programs cut at a line are nearly all new, and run with what was compiled for others, because they differ "
    "in run-time inputs alone. Nothing is compiled again, but a new program costs several times as much to record as "
    "a known one.",
    advice="Pad the batch or the sequence to a few fixed sizes (drop_last=True in the DataLoader, buckets of 64, 128, "
    "256 tokens), so that programs come again.",
)
def recorded_anew(recording: Recording) -> Iterator[Symptom]:
    """Lines at which nearly every program is new, and runs compiled."""
    for rows, syncs in _by_line(recording):
        once = [row for row in rows if row.syncs == 1 and not row.compiles]
        shared = [row for row in once if row.backend not in _NOT_COMPILED]
        took_s = sum(row.record_s for row in once)
        if len(shared) < _FEWEST_PROGRAMS or len(once) < _OFTEN_NEW * syncs:
            continue
        if share(took_s, active_s(recording)) < _WORTH_A_HINT:
            continue
        last = next((row.explanation for row in reversed(shared) if row.explanation is not None), None)
        why = f"; the last because {last.difference}" if last is not None and last.difference else ""
        yield Symptom(
            "nearly every step is recorded anew",
            f"{len(once):,} of {count_text(syncs, 'sync')} at this line had a program that came once; recording them "
            f"took {duration_text(took_s)}, {percent(took_s, active_s(recording))} of the run{why}",
            last.source if last is not None and last.source.file else rows[-1].site,
            fix="" if last is None or last.cause in _SIZES else last.advice,
            cost_s=took_s,
            severity="warning" if share(took_s, active_s(recording)) >= _MOSTLY_RECORDING else None,
        )


@rule(
    "LTC221",
    "backend hardly used",
    severity="hint",
    means="The backend that was chosen ran few of the programs; the interpreter ran the others, operation by "
    "operation. Figures of the run say little about the backend.",
    advice="Look at the compile states (torch_ltc.explain()). To measure or to test a backend, set "
    "settings.tiers = 'blocking', or call torch_ltc.wait_for_compiles() after the first steps.",
)
def backend_hardly_used(recording: Recording) -> Iterator[Symptom]:
    """A chosen backend that ran few of the programs."""
    chosen = setting(recording, "backend")
    runs = sum(row.runs for row in recording.programs)
    if chosen in _NOT_COMPILED or runs < _FEWEST_BACKEND_RUNS:
        return
    compiled = sum(row.runs - row.interpreted for row in recording.programs)
    if compiled >= _HARDLY_USED * runs:
        return
    states = Counter(row.states[-1] for row in recording.programs if row.states)
    listing = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
    by_user = any(row.name == "backend" and row.origin != "default" for row in recording.settings)
    yield Symptom(
        f"{chosen} ran few of the programs",
        f"{compiled:,} of {count_text(runs, 'run')} on {chosen}, the others in the interpreter; programs by compile "
        f"state: {listing}",
        severity="warning" if by_user else None,
    )


@rule(
    "LTC214",
    "disk cache not used",
    severity="hint",
    means="Compiling took long, and what was compiled is not there for the next process.",
    advice="Unset LTC_CACHE_DIR, or name a folder that stays: the next process then loads what this one compiled.",
)
def disk_cache_not_used(recording: Recording) -> Iterator[Symptom]:
    """Long compilations whose results are thrown away."""
    fresh = [row for row in recording.compiles if not row.loaded]
    took_s = sum(row.duration_s for row in fresh)
    if setting(recording, "cache_dir") == "off" and took_s >= _WORTH_KEEPING_S:
        yield Symptom(
            "compiled programs are not kept",
            f"{count_text(len(fresh), 'compilation')} took {duration_text(took_s)}, and cache_dir is 'off'",
            cost_s=took_s,
        )
