"""Rules about memory that is held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_ltc.debug.doctor.figures import middle
from torch_ltc.debug.doctor.registry import Symptom, rule
from torch_ltc.debug.recording import Recording
from torch_ltc.formatting import count_text, size_text

# A buffer per step over fewer steps than this may be anything.
_FEWEST_STEPS = 10
# Of what a line holds, half comes between the second and the last quarter of the run if it grows by the same amount in
# each step. Half of that again is enough to tell growth from what was there from the start, as parameters are.
_GROWTH_PART = 0.25
# The part of all steps from which a line must hold something.
_MOST_STEPS = 0.9
# A smaller part of all memory is no reason to change a program, yet.
_WORTH_A_WARNING = 0.05
# Fewer samples do not show how memory develops.
_FEWEST_SAMPLES = 8


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
    if recording.steps < _FEWEST_STEPS:
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
