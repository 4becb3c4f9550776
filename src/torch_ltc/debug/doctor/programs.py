"""Rules about the cuts between programs, and about operations that are in none."""

from __future__ import annotations

from collections.abc import Iterator

from torch_ltc.debug.doctor.figures import (
    FEWEST_STEPS,
    active_s,
    grouped,
    listed,
    percent,
    program_rows,
    setting,
    share,
)
from torch_ltc.debug.doctor.registry import Symptom, rule
from torch_ltc.debug.recording import FallbackRow, ProgramRow, Recording, SyncRow
from torch_ltc.formatting import count_text, duration_text

# Below some ten calls the fixed cost of a sync (queue, key, buffers) is as large as the calls themselves.
_TINY_CALLS = 10
# Fewer tiny programs than this are start-up and shut-down.
_FEWEST_TINY = 20
# A fallback that costs less of the run, and is not in the loop, is worth a hint only.
_WORTH_A_WARNING = 0.05
_MOST_STEPS = 0.5
# Of fewer runs most are warm-up, before a program is captured.
_FEWEST_RUNS = 20

# Syncs that end a step, and those that cut one. A fallback cuts, too: it has a rule of its own.
_ENDS_OF_STEPS = ("explicit", "optimizer")
_CUTS = ("read", "seed", "state")


@rule(
    "LTC206",
    "fallback",
    means="An operation cannot be recorded and runs eagerly. The program is cut before it, and the line waits until "
    "everything before it has run.",
    advice="Use an operation whose result has a fixed shape (torch.where or a product with the mask instead of a mask "
    "as index, topk instead of nonzero), or move the line out of the loop.",
)
def fallback(recording: Recording) -> Iterator[Symptom]:
    """Operations that ran eagerly."""
    for row in recording.fallbacks:
        loop = recording.steps >= FEWEST_STEPS and row.count >= _MOST_STEPS * recording.steps
        costly = share(row.total_s, active_s(recording)) >= _WORTH_A_WARNING
        yield Symptom(
            f"{row.op} runs eagerly" + (" in the loop" if loop else ""),
            _fallback_evidence(recording, row),
            row.source,
            cost_s=row.total_s,
            severity="warning" if loop or costly else "hint",
        )


def _fallback_evidence(recording: Recording, row: FallbackRow) -> str:
    part = percent(row.total_s, active_s(recording))
    return (
        f"{count_text(row.count, 'time')}, {duration_text(row.total_s)} in all, {part} of the run, because {row.reason}"
    )


@rule(
    "LTC207",
    "tiny programs",
    means="The run is cut into programs of a few operations. Each pays the fixed price of a sync, and there is little "
    "in it to compile.",
    advice="Remove what cuts them: read values at the end of the step or every 10th step, print without values "
    "(settings.tensor_repr = 'pending'), and call sync() once per step.",
)
def tiny_programs(recording: Recording) -> Iterator[Symptom]:
    """Lines that cut the run into small pieces."""
    known = program_rows(recording)
    syncs = [row for row in recording.syncs if row.kind == "sync"]
    tiny = [row for row in syncs if _calls_per_program(row, known) < _TINY_CALLS]
    # A small model has small programs: where one line ends the steps, it is no cut.
    ends = sum(row.reason in _ENDS_OF_STEPS for row in syncs)
    chosen = (*_CUTS, *_ENDS_OF_STEPS) if ends > 1 else _CUTS
    cutting = [row for row in tiny if row.reason in chosen]
    count, total = sum(row.count for row in cutting), sum(row.count for row in syncs)
    if count < max(_FEWEST_TINY, recording.steps) or not cutting:
        return
    cutting.sort(key=lambda row: -row.count)
    named = [f"{row.reason} at {row.source} ({count_text(row.count, 'time')})" for row in cutting]
    calls = sum(_calls_per_program(row, known) * row.count for row in cutting) / count
    yield Symptom(
        "the run is cut into tiny programs",
        f"{count:,} of {count_text(total, 'sync')} had programs of {calls:.1f} operations on average, "
        f"cut by {listed(named)}",
        cutting[0].source,
    )


def _calls_per_program(row: SyncRow, known: dict[int, ProgramRow]) -> float:
    """Operations of the programs that were cut there, weighted by how often; infinite when none is known."""
    programs = [known[identity] for identity in row.programs if identity in known]
    syncs = sum(program.syncs for program in programs)
    return sum(program.calls * program.syncs for program in programs) / syncs if syncs else float("inf")


@rule(
    "LTC208",
    "cut by the bound",
    means="The pending program reached pending_bound and was cut where it happened to be. The next cut is elsewhere, "
    "so that the pieces are seldom the same program twice.",
    advice="Call torch_ltc.sync() where a step of your loop ends, or raise settings.pending_bound if one step is "
    "really that long.",
)
def cut_by_the_bound(recording: Recording) -> Iterator[Symptom]:
    """Programs that grew until the bound."""
    rows = [row for row in recording.syncs if row.kind == "sync" and row.reason == "bound"]
    if not rows:
        return
    count = sum(row.count for row in rows)
    programs = sum(program.reason == "bound" for program in recording.programs)
    bound = setting(recording, "pending_bound")
    yield Symptom(
        "programs are cut by the bound",
        f"{count_text(count, 'cut')} at {bound or 'the bound of'} pending instructions, "
        f"{programs:,} different programs",
        max(rows, key=lambda row: row.count).source,
        severity="warning" if count > 1 else "hint",
    )


@rule(
    "LTC215",
    "failed program",
    severity="error",
    means="An operation of a program failed when it ran. What depends on it is lost; the error was raised at the next "
    "sync or read.",
    advice="Read the error. LTC_REPRO_DIR=folder writes a script that repeats it, and LTC_CHECK=nan finds where "
    "numbers first go wrong.",
)
def failed_program(recording: Recording) -> Iterator[Symptom]:
    """Programs that failed when they ran."""
    for row in recording.programs:
        if row.failed:
            yield Symptom(
                "a program failed",
                f"program {row.identity} failed in {row.failed:,} of {count_text(row.runs, 'run')} on {row.backend}",
                row.site,
            )


@rule(
    "LTC219",
    "not finite",
    severity="error",
    means="A NaN or an infinity was found in the results of a program.",
    advice="Look at the operation and the line that are named, and at the ranges of its inputs.",
)
def not_finite(recording: Recording) -> Iterator[Symptom]:
    """Findings of the NaN finder, the first of each operation and line."""
    for rows in grouped(recording.nonfinite, lambda row: (row.op, row.source)):
        row = rows[0]
        title = f"{row.op} made a NaN or an infinity" if row.op else "an input held a NaN or an infinity"
        found = "; ".join(line.strip() for line in row.text.splitlines()[:3])
        yield Symptom(title, f"after step {row.step}: {found}", row.source)


@rule(
    "LTC225",
    "not captured",
    means="A program that runs often on a GPU is not replayed as CUDA graphs: Python launches each of its kernels.",
    advice="Take the call that is named out of the step, or give it a tensor instead of a number that changes; with "
    "jit the step needs no recording either.",
)
def not_captured(recording: Recording) -> Iterator[Symptom]:
    """Programs that take much of the time on a device with graphs, and are seldom replayed."""
    off = setting(recording, "device_type") == "cuda" and setting(recording, "cuda_graphs") == "off"
    for row in recording.programs:
        part = share(row.run_s, active_s(recording))
        if row.runs < _FEWEST_RUNS or part < _WORTH_A_WARNING or row.replays >= row.runs / 2:
            continue
        if row.capture or off:
            yield Symptom(
                "a program is launched kernel by kernel",
                f"program {row.identity}, {percent(row.run_s, active_s(recording))} of the run: "
                f"{row.replays:,} of {count_text(row.runs, 'run')} were replays; "
                f"{row.capture or 'cuda_graphs is off'}",
                row.site,
                "" if row.capture else 'settings.cuda_graphs = "auto"',
            )
