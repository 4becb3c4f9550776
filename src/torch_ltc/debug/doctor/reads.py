"""Rules about values that leave the device inside of a loop: each stops recording until the device has caught up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch_ltc.debug.doctor.figures import FEWEST_STEPS, active_s, percent, record_s, share
from torch_ltc.debug.doctor.registry import Find, Severity, Symptom, register_rule
from torch_ltc.debug.recording import Recording, SyncRow
from torch_ltc.formatting import count_text, duration_text, size_text

# A read in half of all steps is part of the step; one in every tenth is a log line.
_MOST_STEPS = 0.5
# As many reads with no step between them are a loop, too: an evaluation that reads every batch.
_READS_WITHOUT_STEP = 20
# Below this part of the run the wait is no reason to change a program.
_WORTH_A_WARNING = 0.05

_MEANS = (
    "The program stands still until the device has computed the value, and the device has nothing to do until the "
    "program has recorded the next step: the two never work at the same time."
)


def reads_in_the_loop(recording: Recording, fits: Callable[[SyncRow], bool]) -> Iterator[tuple[SyncRow, str]]:
    """Reads at one line that belong to a loop, with the evidence for it."""
    for row in recording.syncs:
        if row.kind == "read" and fits(row):
            often = recording.steps >= FEWEST_STEPS and row.steps >= _MOST_STEPS * recording.steps
            dense = row.count >= _READS_WITHOUT_STEP * max(1, row.steps)
            if often or dense:
                where = (
                    f"in {min(row.steps, recording.steps):,} of {recording.steps:,} steps"
                    if often
                    else "with hardly a step between them"
                )
                yield row, f"{count_text(row.count, 'read')} {where}; {_waiting(recording, row)}"


def _waiting(recording: Recording, row: SyncRow) -> str:
    part, gain = percent(row.wait_s, active_s(recording)), duration_text(_gain_s(recording, row))
    return (
        f"the program waited {duration_text(row.wait_s)} for them, {part} of its time. At most {gain} of that can be "
        "saved, by recording while the device works"
    )


def _gain_s(recording: Recording, row: SyncRow) -> float:
    """The time that would overlap without the reads: the shorter of waiting and recording."""
    return min(row.wait_s, record_s(recording))


def _reads(reasons: Callable[[str], bool], title: str) -> Find:
    """The rule that finds reads for these reasons in the loop."""

    def find(recording: Recording) -> Iterator[Symptom]:
        for row, evidence in reads_in_the_loop(recording, lambda row: reasons(row.reason)):
            severity: Severity = "warning" if share(row.wait_s, active_s(recording)) >= _WORTH_A_WARNING else "hint"
            copied = "" if row.reason in ("item", "print") else f"; {size_text(row.size_bytes)} were copied"
            cost_s = _gain_s(recording, row)
            yield Symptom(title, evidence + copied, row.source, cost_s=cost_s, severity=severity)

    return find


register_rule(
    _reads(lambda reason: reason == "item", "a number is read in the loop"),
    "LTC201",
    "item in the loop",
    means="A number is read with item(), float() or an `if` in most steps of a loop. " + _MEANS,
    advice="Log it with torch_ltc.async_item(tensor) or from torch_ltc.add_step_closure(...), sum it up on the device "
    "and read the sum at the end, or read it every 10th step only.",
)
register_rule(
    _reads(lambda reason: reason == "print", "a tensor is printed in the loop"),
    "LTC202",
    "print in the loop",
    means="A tensor is printed or formatted in most steps of a loop. " + _MEANS,
    advice="Print from torch_ltc.add_step_closure(print, (tensor,), run_async=True), print every 10th step only, or "
    'set settings.tensor_repr = "pending", which shows shape and dtype without computing the values.',
)
register_rule(
    _reads(lambda reason: reason not in ("item", "print"), "a tensor is copied off the device in the loop"),
    "LTC203",
    "copy in the loop",
    means="A tensor is copied off the device with cpu(), tolist() or numpy() in most steps of a loop. " + _MEANS,
    advice="Compute what you need of it on the device and copy that at the end of the epoch, or copy from "
    "torch_ltc.add_step_closure(function, (tensor,), run_async=True).",
)
