"""Events: small values for observers, the only channel out of the pipeline.

The pipeline emits, and knows nobody who listens; metrics, reports and tests subscribe. An event of a kind that nobody
listens to costs one dictionary lookup. Whoever only keeps figures of what comes at every step takes it later, many
events at a time (`keep_figures`).
"""

import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch_ltc.errors import ListenerWarning, LtcWarning
from torch_ltc.signals import signals_deferred
from torch_ltc.source import Source

__all__ = [
    "KINDS",
    "CaptureEvent",
    "ChoiceEvent",
    "CompileEvent",
    "Event",
    "ExecuteEvent",
    "FallbackEvent",
    "LoadEvent",
    "MismatchEvent",
    "NonFiniteEvent",
    "PruneEvent",
    "ReadEvent",
    "RefusalEvent",
    "StateEvent",
    "SyncEvent",
    "SyncReason",
    "UploadEvent",
    "catch_up",
    "emit",
    "has_listeners",
    "keep_figures",
    "subscribe",
    "tell",
]


class SyncReason(Enum):
    """The reason of a sync; the value is the sentence for reports."""

    EXPLICIT = "the program called sync() or mark_step()"
    READ = "a value was read"
    OPTIMIZER = "an optimizer finished its step"
    BOUND = "the pending program reached its bound"
    FALLBACK = "an operation had to run eagerly"
    SEED = "the state of the random number generator was read or set"
    STATE = "a global switch of PyTorch was changed"
    BARRIER = "the ranks waited for each other"
    JIT = "a call of a jit function began or ended"
    EAGER = "an eager region began"
    # The former name of STATE.
    DTYPE = STATE


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """A pending program was cut and queued.

    `program` identifies the program among all that were cut, `known` says that it was in the cache, `record_s` is
    the wall time since its first operation was recorded, `source` the user's line that caused the sync, and
    `duration_s` the time that the sync took of the user's thread, waiting for room in the queue included.
    """

    reason: SyncReason
    instructions: int
    inputs: int
    outputs: int
    program: int
    known: bool
    record_s: float
    source: Source | None
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CompileEvent:
    """A backend compiled a program; the event comes when that is done.

    `reason` is the cache miss that led to it, when something that was compiled before did not fit, with the user's line
    (`source`) and the short name of the `cause`; `out_of_process` is True when the compiler process did it; `promoted`
    names the integers and numbers of the program that have become run-time inputs; `remark` is what the backend says of
    its code.
    """

    program: int
    backend: str
    duration_s: float
    reason: str = ""
    out_of_process: bool = False
    promoted: str = ""
    cause: str = ""
    source: Source | None = None
    remark: str = ""

    @property
    def elsewhere(self) -> bool:
        """The old name of `out_of_process`."""
        warnings.warn("CompileEvent.elsewhere is now out_of_process", LtcWarning, stacklevel=2)
        return self.out_of_process


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """The executable that an earlier process compiled was loaded from `folder`; `remark` is what the backend says of
    its code."""

    program: int
    backend: str
    duration_s: float
    folder: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class StateEvent:
    """The compile state of a program on a backend changed: "interpreted", "queued", "compiling", "compiled" or
    "refused", and why."""

    program: int
    backend: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefusalEvent:
    """A backend could not compile a program ("compile") or run it ("run"), or computed it wrong ("validate"), and the
    interpreter runs it from now on."""

    program: int
    backend: str
    stage: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExecuteEvent:
    """A program ran, on its backend or in the interpreter, to its end or to the operation that failed."""

    program: int
    backend: str
    duration_s: float
    failed: bool
    # Its launches were replayed, or taken down for that.
    captured: bool = False
    # The part of the time in which the worker was busy with it, and did not wait for the device.
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CaptureEvent:
    """A program was captured as this many graphs of the device, in the way that `text` says; or it was not, and never
    will be, because of `refusal`."""

    program: int
    graphs: int
    text: str
    refusal: str


@dataclass(frozen=True, slots=True)
class GraphsDroppedEvent:
    """The graphs of this many programs were dropped, because the device is out of memory or they held too much. The
    programs run without, and are captured again later."""

    programs: int
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """The forms of a program were measured, and `kept` is the one that it runs in from now on: the name of a backend,
    with "captured" before it where it is replayed. `timings` has the least time of each in seconds."""

    program: int
    kept: str
    timings: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class FallbackEvent:
    """An operation ran eagerly instead of being recorded; `op` carries its overload, as "aten::index.Tensor"."""

    op: str
    reason: str
    source: Source | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """A value left the device; `reason` is the kind of read ("item", "copy", "print"), the duration includes waiting
    for the program that computes it, which took `wait_s`."""

    reason: str
    size_bytes: int
    duration_s: float
    source: Source | None
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UploadEvent:
    """A tensor of another device was copied to this one, at this line."""

    size_bytes: int
    duration_s: float
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class NonFiniteEvent:
    """A NaN or an infinity was found in the results of a program, while the setting `check` asks for it: `op` made it
    at `source`, or, when `op` is empty, it was in an input already. `text` is what the user is told."""

    program: int
    op: str
    source: Source | None
    text: str


@dataclass(frozen=True, slots=True)
class MismatchEvent:
    """A meta kernel promised another layout (`inferred`) than the real kernel gave (`actual`)."""

    op: str
    inferred: str
    actual: str


@dataclass(frozen=True, slots=True)
class PruneEvent:
    """The prefix tree reached its bound and dropped what was not used lately."""

    nodes_before: int
    nodes_after: int


Event: TypeAlias = (
    SyncEvent
    | CompileEvent
    | LoadEvent
    | RefusalEvent
    | StateEvent
    | ExecuteEvent
    | CaptureEvent
    | GraphsDroppedEvent
    | ChoiceEvent
    | FallbackEvent
    | ReadEvent
    | UploadEvent
    | NonFiniteEvent
    | MismatchEvent
    | PruneEvent
)
Listener: TypeAlias = Callable[[Event], None]

KINDS: tuple[type, ...] = (
    SyncEvent,
    CompileEvent,
    LoadEvent,
    ExecuteEvent,
    CaptureEvent,
    GraphsDroppedEvent,
    ChoiceEvent,
    RefusalEvent,
    StateEvent,
    FallbackEvent,
    ReadEvent,
    UploadEvent,
    NonFiniteEvent,
    MismatchEvent,
    PruneEvent,
)


class _Subscription:
    """One call of `subscribe`; a separate object, so that a listener may be subscribed twice and removed once."""

    __slots__ = ("call", "failed")

    def __init__(self, call: Listener) -> None:
        self.call = call
        self.failed = False


_lock = threading.Lock()
# Tuples replaced as a whole under the lock: emit() reads without one, and a listener may unsubscribe while it is
# called.
_subscriptions: dict[type, tuple[_Subscription, ...]] = {}


def subscribe(listener: Listener, *kinds: type) -> Callable[[], None]:
    """Call `listener` with every event of `kinds` (of all kinds when none is given); returns what ends it.

    The listener runs on the thread that emits, which may be a worker, before the pipeline goes on: it should be
    short. An exception in it is reported once as a ListenerWarning and reaches nobody else. Calling the result
    twice does nothing.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise TypeError(f"{unknown[0]!r} is not a kind of event\n  try: one of {names}")
    subscription = _Subscription(listener)
    chosen = kinds or KINDS
    with _lock:
        for kind in chosen:
            present = _subscriptions.get(kind, ())
            if subscription not in present:
                _subscriptions[kind] = (*present, subscription)

    def unsubscribe() -> None:
        with _lock:
            for kind in chosen:
                left = tuple(other for other in _subscriptions.get(kind, ()) if other is not subscription)
                if left:
                    _subscriptions[kind] = left
                else:
                    _subscriptions.pop(kind, None)

    return unsubscribe


def has_listeners(kind: type) -> bool:
    """True when anybody listens to `kind`: lets an emitter skip work that only makes the event."""
    return kind in _subscriptions or kind in _kept


def emit(event: Event) -> None:
    """Hand `event` to everybody who listens to its kind, in the order of subscription; never raises."""
    kind = type(event)
    if kind in _kept:
        _note(kind, tuple([getattr(event, name) for name in event.__slots__]))
    elif _noted:
        catch_up()
    for subscription in _subscriptions.get(kind, ()):
        try:
            subscription.call(event)
        except Exception as error:
            _report(subscription, event, error)


def tell(kind: type, *fields: Any) -> None:
    """As `emit(kind(*fields))`, with all of its fields. The event is made only if somebody listens to each one."""
    if kind in _subscriptions or kind not in _kept:
        emit(kind(*fields))
    else:
        _note(kind, fields)


# ---- figures -------------------------------------------------------------------------------------------------------

# The kind, the time and the fields of an event.
Noted: TypeAlias = tuple[type, float, tuple[Any, ...]]
Keeper: TypeAlias = Callable[[Sequence[Noted]], None]

# Who keeps figures, with the kinds; the kinds of all; and what nobody was told of yet.
_keepers: tuple[tuple[Keeper, frozenset[type]], ...] = ()
_kept: frozenset[type] = frozenset()
_noted: deque[Noted] = deque()
_MOST_NOTED = 512
_catching_up = threading.RLock()
_under_way: list[int] = []


def keep_figures(keeper: Keeper, *kinds: type) -> Callable[[], None]:
    """Call `keeper` with many events of these kinds at a time; returns what ends it.

    It is called some time later, with events in their order, and on any thread: before an event of a kind that nobody
    keeps figures of, or when somebody calls `catch_up`, as everybody must who reads figures, with no lock held that a
    keeper takes.
    """
    entry = (keeper, frozenset(kinds))
    catch_up()
    with _lock:
        _set_keepers((*_keepers, entry))

    def end() -> None:
        catch_up()
        with _lock:
            _set_keepers(tuple(other for other in _keepers if other is not entry))

    return end


def _set_keepers(keepers: tuple[tuple[Keeper, frozenset[type]], ...]) -> None:
    global _keepers, _kept
    _keepers = keepers
    _kept = frozenset().union(*[kinds for _, kinds in keepers])


def _note(kind: type, fields: tuple[Any, ...]) -> None:
    _noted.append((kind, time.perf_counter(), fields))
    if len(_noted) > _MOST_NOTED:
        catch_up()


def catch_up() -> None:
    """Tell all who keep figures what they were not told yet."""
    if not _noted:
        return
    with _catching_up:
        if _under_way:
            # A keeper was interrupted on this thread, as by the garbage collector; it goes on afterwards.
            return
        _under_way.append(1)
        try:
            # Handlers of signals wait: a batch is told to all, and once.
            with signals_deferred():
                while _noted:
                    batch = [_noted.popleft() for _ in range(len(_noted))]
                    for keeper, kinds in _keepers:
                        own = batch if kinds == _kept else [event for event in batch if event[0] in kinds]
                        if own:
                            keeper(own)
        finally:
            _under_way.clear()


def _report(subscription: _Subscription, event: Event, error: Exception) -> None:
    if subscription.failed:
        return
    subscription.failed = True
    try:
        warnings.warn(
            f"the listener {subscription.call!r} raised {error!r} for {event!r}\n"
            "  it stays subscribed, its later failures are not reported\n"
            "  try: correct the listener, or end its subscription",
            ListenerWarning,
            stacklevel=3,
        )
    except ListenerWarning as warning:
        # Warnings are errors in this process. Raising would break the sync that emitted, so the error goes where Python
        # reports what it cannot raise.
        sys.unraisablehook(
            SimpleNamespace(
                exc_type=type(warning),
                exc_value=warning,
                exc_traceback=warning.__traceback__,
                err_msg="exception in a listener of torch_ltc.events",
                object=subscription.call,
            )
        )
