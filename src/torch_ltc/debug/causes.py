"""Causes of new programs and of compilations: the nearest known program, the first difference from it, and the warning
when programs of one site are compiled again and again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch_ltc.config import settings
from torch_ltc.debug.first_difference import Difference, first_difference
from torch_ltc.debug.messages import MESSAGES, Message, message
from torch_ltc.debug.recording import Explanation
from torch_ltc.deferred import deferred
from torch_ltc.errors import RecompileError, RecompileWarning
from torch_ltc.events import CompileEvent, LoadEvent, SyncReason
from torch_ltc.program.difference import Listing, distinct_changes
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.text import program_lines
from torch_ltc.source import UNKNOWN, Source

CAUSES: dict[str, Message] = {
    made.name: made
    for made in (
        message(
            "LTC101",
            "first",
            "No program like this one was known: its code ran for the first time.",
            "Nothing to change: each part of the code is compiled once, and kept on disk for later processes.",
        ),
        message(
            "LTC102",
            "size",
            "A size differs: of an input, or one that an operation was given.",
            "Nothing if it happens once: a size that changes becomes a run-time input. If it goes on, keep the size "
            "constant: pad, bucket, or DataLoader(drop_last=True) for a smaller last batch.",
        ),
        message(
            "LTC103",
            "dtype",
            "A dtype differs.",
            "Convert to one dtype where the data comes in, before the step.",
        ),
        message(
            "LTC104",
            "layout",
            "A tensor lies in memory in another way: other strides, or another offset.",
            "Call .contiguous() where the tensor comes in, or slice it before it goes to the device.",
        ),
        message(
            "LTC105",
            "argument",
            "An operation was given another constant: an index, an offset, a dimension, a flag.",
            "Nothing if it happens once: an offset or index that changes becomes a run-time input. Else use a tensor "
            "as the index (index_select), or a fixed set of values.",
        ),
        message(
            "LTC106",
            "number",
            "A Python number has another type, or another value where the backend had made a constant of it.",
            "Nothing if it happens once: a number that changes becomes a run-time input. Keep its type: 2.0, not 2.",
        ),
        message(
            "LTC107",
            "operation",
            "The code went another way: another branch, another module, or an operation more or less.",
            "Nothing if there are a few ways: each is compiled once. If they keep coming, compute both sides and "
            "choose with torch.where, or keep what changes in tensors.",
        ),
        message(
            "LTC108",
            "mode",
            "A module went from training to evaluation, or back.",
            "Nothing: training and evaluation are two programs, each compiled once.",
        ),
        message(
            "LTC109",
            "inputs",
            "An operation takes other tensors, or more of them: a new parameter, a longer list, a tensor shared in "
            "another way.",
            "Make all parameters before the first step; keep lists of tensors at one length, or stack them.",
        ),
        message(
            "LTC110",
            "live",
            "The same operations, but other results are still held when the program ends: it has other outputs.",
            "Drop what is not needed (del, or leave the scope) at the same place in each step; log with async_item or "
            "add_step_closure.",
        ),
        message(
            "LTC111",
            "ending",
            "The program was cut earlier or later than the one it resembles: a read or a sync is not in each step.",
            "Read at the same place in each step, or log with async_item or add_step_closure, which cut nothing.",
        ),
        message(
            "LTC112",
            "bound",
            "The pending program reached its bound and was cut there.",
            "Sync once a step (an optimizer's step does it), or raise settings.pending_bound.",
        ),
        message(
            "LTC113",
            "device",
            "The physical device is another one.",
            "Choose the device once, before the first step.",
        ),
        message(
            "LTC114",
            "backend",
            "Another backend compiled the program before.",
            "Nothing: each backend compiles a program once.",
        ),
        message(
            "LTC115",
            "guard",
            "Code compiled for changing sizes does not hold for these: it relied on something that is not so now.",
            "Keep sizes within one regime: never 0 or 1, and not past the limit that the guard names.",
        ),
        message(
            "LTC116",
            "again",
            "The program had been compiled before, and what was compiled was dropped.",
            "Raise settings.executables_bound if there are more programs than it keeps, or settings.tree_bound if more "
            "calls were recorded than that.",
        ),
    )
}

# How many programs are compared, and from what likeness on two programs are called near.
_MOST_COMPARED = 64
_LIKENESS = 0.25
# Of these, how many are aligned line by line: those with most calls in common, and as many of those with most lines in
# common. Programs with more calls than that are not.
_MOST_ALIGNED = 4
_MOST_CALLS = 1_000
_NUMBERS = re.compile(r"%\d+")
# Causes that have nothing to do with earlier compilations for the site.
_NO_RECOMPILES = frozenset({"first", "backend"})


class Compared:
    """A program, where and why it was synced first, and how often it has each operator at each line."""

    __slots__ = ("program", "site", "reason", "identity", "first", "_counts", "_lines", "_details")

    def __init__(self, program: Program, site: Source, reason: SyncReason | None, identity: int) -> None:
        self.program = program
        self.site = site
        self.reason = reason
        self.identity = identity
        # The line of the first call.
        self.first = next((one.source for one in program.instructions if isinstance(one, Call)), UNKNOWN)
        self._counts: Counter[tuple[str, str, int]] | None = None
        self._lines: Listing | None = None
        self._details: Counter[str] | None = None

    @property
    def counts(self) -> Counter[tuple[str, str, int]]:
        """The calls by operator and line; made once."""
        if self._counts is None:
            self._counts = Counter((call.name, call.source.file, call.source.line) for call in self.program.calls)
        return self._counts

    @property
    def lines(self) -> Listing:
        """The text of the program; made once."""
        if self._lines is None:
            self._lines = program_lines(self.program)
        return self._lines

    @property
    def details(self) -> Counter[str]:
        """The lines by all that is in them but the numbers of values; made once."""
        if self._details is None:
            self._details = Counter(_NUMBERS.sub("%", text) for text, _ in self.lines)
        return self._details


def explain_new(own: Compared, known: Sequence[Compared]) -> Explanation:
    """The cause of a new program, compared with those that were known before it."""
    earlier = [one for one in known if one.identity < own.identity]
    if own.reason is SyncReason.BOUND:
        text = f"it was cut after {len(own.program.calls):,} calls, at settings.pending_bound"
        return _explanation(own.identity, 0, Difference("bound", text, own.site))
    nearest = _nearest(own, earlier)
    if nearest is None:
        return _explanation(own.identity, 0, Difference("first", "no program like it was known", own.first))
    found = first_difference(nearest.program, own.program)
    return _explanation(own.identity, nearest.identity, found or _ending(nearest, own))


def explain_compile(
    own: Compared | None,
    event: CompileEvent | LoadEvent,
    earlier: Sequence[CompileEvent | LoadEvent],
    known: Sequence[Compared],
    identity: int,
) -> Explanation:
    """The cause of a compilation: the guard that failed, or what made the program new. `own` is None when it is no
    longer cached."""
    promoted = event.promoted if isinstance(event, CompileEvent) else ""
    if isinstance(event, CompileEvent) and event.reason:
        source = event.source or (own.first if own is not None else UNKNOWN)
        before = [one.program for one in earlier if one.backend == event.backend]
        found = Difference(event.cause or "again", event.reason, source)
        return _explanation(identity, before[-1] if before else 0, found, promoted)
    same = [one for one in earlier if one.program == identity and not isinstance(one, LoadEvent)]
    source = UNKNOWN if own is None else own.first
    if same and same[-1].backend != event.backend:
        text = f"{same[-1].backend} compiled it before, and the backend is now {event.backend}"
        return _explanation(identity, identity, Difference("backend", text, source), promoted)
    if same:
        return _explanation(identity, identity, Difference("again", "what was compiled was dropped", source), promoted)
    if own is None:
        return _explanation(identity, 0, Difference("first", "its program is no longer kept", source), promoted)
    return replace(explain_new(own, known), promoted=promoted)


def _explanation(identity: int, nearest: int, found: Difference, promoted: str = "") -> Explanation:
    cause = CAUSES[found.cause]
    return Explanation(identity, cause.code, cause.name, nearest, found.text, found.source, promoted, cause.advice)


def _nearest(own: Compared, earlier: Sequence[Compared]) -> Compared | None:
    """The program from which the fewest changes lead to this one; among equals one that was synced at the same place,
    and the latest."""
    chosen = [one for one in earlier if one.first == own.first][-_MOST_COMPARED:]
    chosen += [one for one in earlier[-_MOST_COMPARED:] if one.first != own.first]
    total = own.counts.total()
    near: list[tuple[float, bool, int, Compared]] = []
    for one in chosen:
        common = (own.counts & one.counts).total()
        # A program that has little of this one is not near; among those that have, a shorter one is nearer.
        if common >= _LIKENESS * total:
            near.append((common / max(total, one.counts.total(), 1), one.site == own.site, one.identity, one))
    near.sort(key=lambda scored: scored[:3], reverse=True)
    if not near or len(own.program.calls) > _MOST_CALLS:
        return near[0][3] if near else None
    likest = sorted(near, key=lambda scored: (own.details & scored[3].details).total(), reverse=True)
    candidates = {id(scored[3]): scored for scored in (*near[:_MOST_ALIGNED], *likest[:_MOST_ALIGNED])}
    return min(
        candidates.values(),
        key=lambda scored: (distinct_changes(scored[3].lines, own.lines), not scored[1], -scored[2]),
    )[3]


def _ending(nearest: Compared, own: Compared) -> Difference:
    """One program is the beginning of the other, or they are equal."""
    if len(nearest.program.instructions) == len(own.program.instructions):
        text = "it was known and was forgotten, at settings.tree_bound or with ir_cache.reset()"
        return Difference("again", text, own.first)
    why = own.reason.value if own.reason is not None else "it was cut"
    had, has = len(nearest.program.calls), len(own.program.calls)
    return Difference("ending", f"it ends after {has:,} calls, the other after {had:,}: {why}", own.site)


def recompiled(explanation: Explanation, number: int, site: Source) -> None:
    """A program was compiled for this site, the third one at least. Said on the user's thread, at its next sync or
    read: this may be another one."""
    if settings.recompiles == "allow" or explanation.cause in _NO_RECOMPILES:
        return
    message = MESSAGES[explanation.code]
    where = f" at {explanation.source}" if explanation.source.file else ""
    text = (
        f"{message.code} {message.name}: compiled for the {_ordinal(number)} time for the sync at {site}, because "
        f"{explanation.difference}{where} (torch_ltc.explain() says more; {message.link})"
    )
    if settings.recompiles == "error":
        deferred.add_error(RecompileError(text, hint=message.advice))
    elif _is_reported(number):
        deferred.add_warning(text, RecompileWarning)


def _is_reported(number: int) -> bool:
    """At the third, sixth, twelfth, ... compilation: who does not mind need not hear of each."""
    times, rest = divmod(number, 3)
    return rest == 0 and times & (times - 1) == 0


def _ordinal(number: int) -> str:
    suffix = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
