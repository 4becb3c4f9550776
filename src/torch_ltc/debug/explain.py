"""`explain`: why programs were compiled, as text, from a recording or from the running process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch

from torch_ltc.debug.history import history
from torch_ltc.debug.messages import MESSAGES
from torch_ltc.debug.recording import CompileRow, EagerRow, Explanation, ProgramRow, Recording
from torch_ltc.errors import LtcError, RecordingError
from torch_ltc.events import SyncReason
from torch_ltc.execute.pending import uncomputed
from torch_ltc.execute.sync import producer_of
from torch_ltc.formatting import count_text, duration_text

__all__ = ["Text", "explain", "explain_recording"]

Last = Literal["compile", "sync"]
Newness = Callable[[int], Explanation | None]

# How many compilations the overview shows.
_MOST_SHOWN = 20


class Text(str):
    """Text that shows as it is when a notebook or the interpreter displays it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(about: torch.Tensor | int | None = None, *, last: Last | None = None) -> Text:
    """Explain why programs were compiled: what was new in each, compared with the nearest known one, the user's line,
    and what to change.

    Without arguments, an overview of all compilations. With a tensor, the program that computes it; with a number, the
    program of that identity; with `last`, only the last "compile" or "sync". Neither syncs nor waits.
    """
    recording = history.recording(texts=False, causes=False)
    if isinstance(about, torch.Tensor):
        return Text(_tensor_text(about, recording))
    return Text(explain_recording(recording, about, last, history.newness))


def explain_recording(
    recording: Recording, program: int | None = None, last: Last | None = None, newness: Newness | None = None
) -> str:
    """As `explain`, of a recording: all compilations, one `program`, or the `last` "compile" or "sync". `newness` is
    asked for the cause of a program where the recording has none."""
    if last not in (None, "compile", "sync"):
        raise LtcError(f"explain knows no last={last!r}", hint='last="compile", or last="sync"')
    if program is not None:
        return _program_text(_find(recording, program), recording, newness)
    if last == "sync":
        return _last_sync(recording, newness)
    compiles = [row for row in recording.compiles if not row.loaded]
    if last == "compile":
        if not compiles:
            return f"nothing was compiled {_so_far(recording)}"
        return _compile_text(compiles[-1], recording)
    return _overview(recording, compiles)


def _find(recording: Recording, identity: int) -> ProgramRow:
    for row in recording.programs:
        if row.identity == identity:
            return row
    known = ", ".join(str(row.identity) for row in recording.programs[:10]) or "none"
    raise LtcError(f"there is no program {identity} in the recording", hint=f"one of {known}")


def _so_far(recording: Recording) -> str:
    syncs = sum(row.syncs for row in recording.programs)
    return f"in {count_text(syncs, 'sync')} of {count_text(len(recording.programs), 'program')}"


def _overview(recording: Recording, compiles: list[CompileRow]) -> str:
    if not compiles:
        pages = [f"nothing was compiled {_so_far(recording)}"]
    else:
        total = sum(row.duration_s for row in compiles)
        first = f"{count_text(len(compiles), 'compilation')}, {duration_text(total)} in all, {_so_far(recording)}"
        pages = [first, *(_compile_text(row, recording) for row in compiles[-_MOST_SHOWN:])]
        if len(compiles) > _MOST_SHOWN:
            pages.insert(1, f"the first {len(compiles) - _MOST_SHOWN:,} are left out")
    states = Counter(row.states[-1] for row in recording.programs if row.states)
    if states:
        pages.append("programs by compile state: " + ", ".join(f"{n} {state}" for state, n in sorted(states.items())))
    chosen = [row for row in recording.programs if row.choice]
    if chosen:
        pages.append("\n".join(f"program {row.identity} runs on {row.choice}" for row in chosen[-_MOST_SHOWN:]))
    captured = [row for row in recording.programs if row.capture]
    if captured:
        pages.append("\n".join(f"program {row.identity}: {row.capture}; {row.replays} replays" for row in captured))
    if recording.eager.calls:
        pages.append(_eager_text(recording.eager))
    loaded = sum(row.loaded for row in recording.compiles)
    if loaded:
        pages.append(f"{count_text(loaded, 'program')} loaded from disk, compiled by earlier processes")
    return "\n\n".join(pages)


def _eager_text(eager: EagerRow) -> str:
    ran = f"{count_text(eager.calls, 'call')} and {count_text(eager.reads, 'read')} ran at once"
    where = "loops that read about as often as they compute, and code that never repeats"
    lines = [f"{ran}, in {count_text(eager.begun, 'eager region')}: {where}"]
    lines += [f"  at {place.describe()}, begun {count_text(times, 'time')}" for place, times in eager.places]
    return "\n".join(lines)


def _title(row: CompileRow) -> str:
    where = " in another process" if row.out_of_process else ""
    again = f", number {row.number} for this site" if row.number > 1 else ""
    done = f"loaded for {row.backend}" if row.loaded else f"compiled by {row.backend}{where}"
    return f"program {row.program}: {done} in {duration_text(row.duration_s)} after step {row.step}{again}"


def _compile_text(row: CompileRow, recording: Recording) -> str:
    lines = [_title(row), *_explanation_lines(row.explanation)]
    program = next((one for one in recording.programs if one.identity == row.program), None)
    if program is not None:
        lines.append(_site_line(program))
    return "\n".join(lines)


def _explanation_lines(explanation: Explanation) -> list[str]:
    message = MESSAGES.get(explanation.code)
    if message is None:
        raise RecordingError(f"the recording has a message {explanation.code!r}, which this version does not know")
    lines = [f"  {explanation.code} {explanation.cause}: {message.means}"]
    if explanation.nearest:
        lines.append(f"  nearest known: program {explanation.nearest}")
    lines.append(f"  difference: {explanation.difference}")
    if explanation.source.file:
        lines.append(f"  at {explanation.source.describe()}")
    if explanation.promoted:
        lines.append(f"  run-time inputs from now on: {explanation.promoted}")
    lines.append(f"  try: {explanation.advice}")
    return lines


def _site_line(row: ProgramRow) -> str:
    known = SyncReason.__members__.get(row.reason.upper())
    reason = known.value if known is not None else row.reason or "unknown"
    return f"  synced at {row.site}: {reason}"


def _program_text(row: ProgramRow, recording: Recording, newness: Newness | None) -> str:
    explanation = row.explanation or (newness(row.identity) if newness is not None else None)
    counts = f"{count_text(row.calls, 'call')}, {count_text(row.inputs, 'input')}, {count_text(row.outputs, 'output')}"
    lines = [f"program {row.identity}: {counts}; {count_text(row.syncs, 'sync')}, {count_text(row.runs, 'run')}"]
    lines.append(f"  {_state(row)}")
    lines.append(f"  compile states: {' > '.join(row.states)}" + (f" ({row.state_reason})" if row.state_reason else ""))
    if row.remark:
        lines.append(f"  {row.remark}")
    if row.capture:
        lines.append(f"  {row.capture}; {count_text(row.replays, 'replay')}")
    if explanation is not None:
        lines += ["  it was new because:", *(f"  {line}" for line in _explanation_lines(explanation))]
    lines.append(_site_line(row))
    pages = ["\n".join(lines)]
    for one in recording.compiles:
        if one.program == row.identity:
            # What made the program new is often why it was compiled, and has been said.
            said = explanation is not None and one.explanation.difference == explanation.difference
            pages.append(_title(one) if said else _compile_text(one, recording))
    return "\n\n".join(pages)


def _state(row: ProgramRow) -> str:
    if row.refused:
        return f"it runs in the interpreter: {row.refused.splitlines()[0]}"
    if not row.runs:
        return "it has not run yet"
    if row.choice:
        return f"it runs on {row.choice}"
    if row.interpreted == row.runs and row.states[-1:] == ("compiled",):
        return "it ran in the interpreter so far, and is measured against what was compiled"
    if row.interpreted == row.runs:
        return "it ran in the interpreter: a program is compiled when it is seen again"
    if row.compiles:
        return f"it runs on {row.backend}, which compiled it in {duration_text(row.compile_s)}"
    if row.loads:
        return f"it runs on {row.backend}, with what an earlier process compiled"
    return f"it runs on {row.backend}, with what was compiled for another program: they differ in run-time inputs alone"


def _last_sync(recording: Recording, newness: Newness | None) -> str:
    synced = next((span for span in reversed(recording.spans) if span.kind == "sync"), None)
    if synced is None:
        return "nothing was synced"
    row = _find(recording, synced.program)
    if row.syncs > 1:
        return f"program {row.identity} was known: {_state(row)}\n{_site_line(row)}"
    return _program_text(row, recording, newness)


def _tensor_text(tensor: torch.Tensor, recording: Recording) -> str:
    if tensor.device.type != "ltc":
        raise LtcError(f"explain takes a tensor on ltc, got one on {tensor.device}", hint="move it with .to('ltc')")
    state = uncomputed(tensor)
    if state.startswith("pending"):
        return f"the tensor is {state}\n  nothing has been synced or compiled for it yet"
    identity, call = producer_of(tensor)
    if not identity:
        return "the tensor is computed, and no program made it: it was copied to the device"
    made = "" if call is None else f" by {call.name} at {call.source.describe()}"
    first = f"the tensor is {state or 'computed'}; program {identity} made it{made}"
    return f"{first}\n{_program_text(_find(recording, identity), recording, history.newness)}"
