"""Rules about the balance of device, recording and copies, and about memory that is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch_ltc.debug.doctor.figures import (
    FEWEST_STEPS,
    active_s,
    first_record_s,
    middle,
    percent,
    record_s,
    run_s,
    setting,
    share,
)
from torch_ltc.debug.doctor.registry import Symptom, rule
from torch_ltc.debug.recording import Recording
from torch_ltc.formatting import count_text, duration_text, size_text

# Runs shorter than this are dominated by imports, the first batch and compiling.
_SHORTEST_RUN_S = 1.0
_DEVICE_BUSY = 0.8
_DEVICE_IDLE = 0.5
_MOSTLY_RECORDING = 0.6
# Waiting for room in the queue is normal while the device is the limit; from here on it is worth saying so.
_WAITING_FOR_ROOM = 0.2
# How many times as long as another a program runs that is called long.
_LONG = 10.0
# Copies to the device in a step, in the middle, and their size: more and smaller ones cost more than what is in them.
_MANY_UPLOADS = 8
_SMALL_UPLOAD_BYTES = 4096
# A smaller part of the run, or of all memory, is no reason to change a program.
_WORTH_A_WARNING = 0.05
# A buffer per step over fewer steps than this may be anything.
_FEWEST_GROWING_STEPS = 10
# Of what a line holds, half comes between the second and the last quarter of the run if it grows by the same amount in
# each step. Half of that again is enough to tell growth from what was there from the start, as parameters are.
_GROWTH_PART = 0.25
# The part of all steps from which a line must hold something.
_MOST_STEPS = 0.9
# Fewer samples do not show how memory develops.
_FEWEST_SAMPLES = 8


@rule(
    "LTC213",
    "small uploads",
    means="Each step copies many small tensors to the device. The fixed price of a copy is larger than that of its "
    "bytes.",
    advice="Copy them together (one stacked tensor per batch), make constants once before the loop, and pass changing "
    "numbers as Python numbers, which are inputs of the program.",
)
def small_uploads(recording: Recording) -> Iterator[Symptom]:
    """Many small copies to the device in every step."""
    # The model goes to the device before the first step.
    uploads = [span for span in recording.spans if span.kind == "upload" and span.step > 0]
    small = [span for span in uploads if span.size_bytes <= _SMALL_UPLOAD_BYTES]
    counts = Counter(span.step for span in small)
    if len(counts) < FEWEST_STEPS or len(counts) < recording.steps / 2 or middle(counts.values()) < _MANY_UPLOADS:
        return
    took_s = sum(span.duration_s for span in small)
    mean = size_text(round(sum(span.size_bytes for span in small) / len(small)))
    line, at_line = Counter(span.label for span in small).most_common(1)[0]
    where = f"; {at_line:,} of them at {line}" if line else ""
    yield Symptom(
        "many small copies to the device in each step",
        f"{middle(counts.values()):.0f} in a step in the middle of the run, {mean} each on average; "
        f"{len(small):,} copies took {duration_text(took_s)}{where}",
        cost_s=took_s,
        severity="warning" if share(took_s, active_s(recording)) >= _WORTH_A_WARNING else "hint",
    )


@rule(
    "LTC216",
    "full queue",
    severity="hint",
    means="Syncs waited because as many programs as queue_bound allows were queued already, although the device did "
    "not run programs all of the time: compilations that programs wait for held it up, or a few long programs among "
    "short ones.",
    advice="Raise settings.queue_bound, so that short programs are queued while a long one runs.",
)
def full_queue(recording: Recording) -> Iterator[Symptom]:
    """Syncs that waited for room in the queue."""
    rows = [row for row in recording.syncs if row.kind == "sync"]
    waited_s, busy_s, whole_s = sum(row.wait_s for row in rows), run_s(recording), active_s(recording)
    held_up = share(waited_s, whole_s) >= _WAITING_FOR_ROOM and share(busy_s, whole_s) < _DEVICE_BUSY
    if whole_s < _SHORTEST_RUN_S or not held_up:
        return
    compile_s = sum(row.duration_s for row in recording.compiles if not row.loaded)
    by_compiles = setting(recording, "tiers") in ("blocking", "off") and compile_s >= _WAITING_FOR_ROOM * waited_s
    # Else recording is as quick as the device, and waits for it as it should.
    if not by_compiles and not _take_turns(recording):
        return
    worst = max(rows, key=lambda row: row.wait_s)
    yield Symptom(
        "the program waits for room in the queue",
        f"syncs took {duration_text(waited_s)}, {percent(waited_s, whole_s)} of the run, "
        f"{duration_text(worst.wait_s)} of that here; the device ran programs for {percent(busy_s, whole_s)} of it",
        worst.source,
        fix="Let programs be compiled in the background: settings.tiers = 'background'." if by_compiles else "",
    )


def _take_turns(recording: Recording) -> bool:
    """True when long programs run among short ones."""
    means = [row.run_s / row.runs for row in recording.programs if row.runs >= FEWEST_STEPS]
    return len(means) > 1 and max(means) >= _LONG * min(means)


@rule(
    "LTC217",
    "device bound",
    severity="hint",
    means="The device was busy for most of the run: it is the limit, and recording hides behind it.",
    advice="Nothing is wrong. To go faster, make the device's work smaller or faster: another backend, a smaller "
    "dtype, a larger machine.",
)
def device_bound(recording: Recording) -> Iterator[Symptom]:
    """The device works nearly all of the time."""
    busy_s = run_s(recording)
    whole_s = active_s(recording)
    if whole_s >= _SHORTEST_RUN_S and share(busy_s, whole_s) >= _DEVICE_BUSY:
        yield Symptom(
            "the device is the limit",
            f"programs ran for {duration_text(busy_s)}, {percent(busy_s, whole_s)} of {duration_text(whole_s)}",
        )


@rule(
    "LTC218",
    "host bound",
    severity="hint",
    means="Recording takes most of the run and the device is idle for half of it or more: Python is the limit. The "
    "time counts from the first operation of a program to its sync, with whatever else the program does in between.",
    advice="Give each step more work (a larger batch), load data in other processes (num_workers), and look with a "
    "Python profiler for what the step does beside recording.",
)
def host_bound(recording: Recording) -> Iterator[Symptom]:
    """The device waits for the program."""
    # The first step imports what PyTorch needs, which counts as recording.
    first_s = first_record_s(recording)
    recorded_s, busy_s, whole_s = record_s(recording) - first_s, run_s(recording), active_s(recording) - first_s
    idle = share(busy_s, whole_s) <= _DEVICE_IDLE
    long_enough = whole_s >= _SHORTEST_RUN_S and recording.steps > FEWEST_STEPS
    if long_enough and share(recorded_s, whole_s) >= _MOSTLY_RECORDING and idle:
        after = " after the first step" if first_s else ""
        yield Symptom(
            "recording is the limit",
            f"recording took {duration_text(recorded_s)}, {percent(recorded_s, whole_s)} of the run{after}, "
            f"and the device ran for {duration_text(busy_s)}, {percent(busy_s, whole_s)}",
        )


@rule(
    "LTC210",
    "memory that grows",
    means="Buffers made at one line are held from every step of the run: a list, a dictionary or a running sum keeps "
    "them, and a tensor that requires grad keeps its whole graph.",
    advice="Keep numbers instead of tensors (torch_ltc.async_item(loss), or loss.item() every 10th step), or sum up on "
    "the device under torch.no_grad(): total += loss.detach().",
)
def memory_that_grows(recording: Recording) -> Iterator[Symptom]:
    """Lines whose buffers pile up, step by step."""
    memory = recording.memory
    grown_bytes = growth(memory.samples)
    if recording.steps < _FEWEST_GROWING_STEPS:
        return
    for row in memory.largest:
        # Some steps may keep nothing, and the first one does more than others.
        from_each = row.runs >= _MOST_STEPS * recording.steps
        if from_each and grown_bytes > 0 and grown_bytes >= _GROWTH_PART * row.size_bytes:
            made = f"{count_text(row.count, 'buffer')} made here by {row.op or 'a copy'}"
            yield Symptom(
                "memory grows with every step",
                f"{made} are alive after {recording.steps:,} steps, {size_text(row.size_bytes)}; all buffers together "
                f"grew by {size_text(round(grown_bytes))} from the second to the last quarter of the run",
                row.source,
                severity="warning" if row.size_bytes >= _WORTH_A_WARNING * memory.current_bytes else "hint",
            )


def growth(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes by which the last quarter of the samples holds more than the second."""
    if len(samples) < _FEWEST_SAMPLES:
        return 0.0
    # Samples are taken at runs of programs: quarters of them are quarters of the steps, however long the first took.
    quarter = len(samples) // 4
    second = [held for _, held in samples[quarter : 2 * quarter]]
    last = [held for _, held in samples[-quarter:]]
    return middle(last) - middle(second)
