"""Events: values, subscription, failing listeners, threads."""

import dataclasses
import sys
import threading
import warnings

import pytest

from torch_ltc import events
from torch_ltc.errors import ListenerWarning
from torch_ltc.events import CompileEvent, Event, ExecuteEvent, PruneEvent, ReadEvent, SyncEvent, SyncReason

PRUNE = PruneEvent(nodes_before=10, nodes_after=5)
COMPILE = CompileEvent(program=1, backend="torchscript", duration_s=0.5)


def test_listener_gets_only_the_kinds_it_asked_for() -> None:
    seen: list[Event] = []
    unsubscribe = events.subscribe(seen.append, PruneEvent)
    events.emit(PRUNE)
    events.emit(COMPILE)
    unsubscribe()
    events.emit(PRUNE)
    assert seen == [PRUNE]


def test_listener_without_kinds_gets_all() -> None:
    seen: list[Event] = []
    unsubscribe = events.subscribe(seen.append)
    events.emit(PRUNE)
    events.emit(COMPILE)
    unsubscribe()
    assert seen == [PRUNE, COMPILE]


def test_a_listener_may_be_subscribed_twice_and_removed_once() -> None:
    seen: list[Event] = []
    listener = seen.append
    first = events.subscribe(listener, PruneEvent)
    second = events.subscribe(listener, PruneEvent)
    first()
    first()
    events.emit(PRUNE)
    second()
    assert seen == [PRUNE]


def test_the_same_kind_twice_delivers_once() -> None:
    seen: list[Event] = []
    unsubscribe = events.subscribe(seen.append, PruneEvent, PruneEvent)
    events.emit(PRUNE)
    unsubscribe()
    assert seen == [PRUNE]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"not a kind of event\n  try: one of SyncEvent"):
        events.subscribe(print, int)


def test_has_listeners_follows_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_subscriptions", {})
    assert not events.has_listeners(PruneEvent)
    unsubscribe = events.subscribe(print, PruneEvent)
    assert events.has_listeners(PruneEvent)
    assert not events.has_listeners(CompileEvent)
    unsubscribe()
    assert not events.has_listeners(PruneEvent)


def test_failing_listener_is_reported_once_stays_and_holds_up_nobody() -> None:
    calls: list[Event] = []
    seen: list[Event] = []

    def fail(event: Event) -> None:
        calls.append(event)
        raise ValueError("no")

    ends = [events.subscribe(fail, PruneEvent), events.subscribe(seen.append, PruneEvent)]
    with pytest.warns(ListenerWarning, match=r"raised ValueError\('no'\) for PruneEvent") as caught:
        events.emit(PRUNE)
        events.emit(PRUNE)
    for end in ends:
        end()
    assert len(caught) == 1
    assert calls == seen == [PRUNE, PRUNE]


def test_failing_listener_does_not_raise_when_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_value))

    def fail(event: Event) -> None:
        raise ValueError("no")

    unsubscribe = events.subscribe(fail, PruneEvent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events.emit(PRUNE)
    unsubscribe()
    assert len(reported) == 1
    assert isinstance(reported[0], ListenerWarning)


def test_listener_may_unsubscribe_while_it_is_called() -> None:
    seen: list[Event] = []

    def once(event: Event) -> None:
        seen.append(event)
        unsubscribe()

    unsubscribe = events.subscribe(once, PruneEvent)
    other = events.subscribe(seen.append, PruneEvent)
    events.emit(PRUNE)
    events.emit(PRUNE)
    other()
    assert len(seen) == 3


def test_threads_subscribe_and_emit_at_once() -> None:
    counts = [0] * 8

    def work(index: int) -> None:
        def listen(event: Event) -> None:
            if isinstance(event, PruneEvent) and event.nodes_before == index:
                counts[index] += 1

        for _ in range(100):
            unsubscribe = events.subscribe(listen, PruneEvent)
            events.emit(PruneEvent(nodes_before=index, nodes_after=0))
            unsubscribe()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [100] * 8


@pytest.mark.parametrize("kind", events.KINDS, ids=lambda kind: kind.__name__)
def test_events_are_frozen_slotted_values_with_a_docstring(kind: type) -> None:
    event = kind(*[None] * len(dataclasses.fields(kind)))
    assert event == kind(*[None] * len(dataclasses.fields(kind)))
    assert not hasattr(event, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, dataclasses.fields(kind)[0].name, 1)
    assert not (kind.__doc__ or "").startswith(kind.__name__ + "(")


def test_kinds_is_every_event_class() -> None:
    declared = {thing for name, thing in vars(events).items() if name.endswith("Event") and isinstance(thing, type)}
    assert set(events.KINDS) == declared
    assert SyncEvent in declared


def test_sync_reasons_are_sentences() -> None:
    names = ["EXPLICIT", "READ", "OPTIMIZER", "BOUND", "FALLBACK", "SEED", "STATE", "BARRIER", "JIT", "EAGER"]
    assert [reason.name for reason in SyncReason] == names
    assert all(len(reason.value.split()) > 3 for reason in SyncReason)


def test_figures_are_kept_later_and_in_order() -> None:
    kept: list[tuple[object, ...]] = []
    stop = events.keep_figures(lambda batch: kept.extend(fields for _, _, fields in batch), ReadEvent, ExecuteEvent)
    try:
        events.tell(ReadEvent, "item", 4, 0.5, None, 0.0)
        events.emit(ExecuteEvent(1, "interpreter", 0.25, False))
        assert kept == []
        events.catch_up()
        assert kept == [("item", 4, 0.5, None, 0.0), (1, "interpreter", 0.25, False, False, 0.0)]
        events.tell(ReadEvent, "copy", 4, 0.5, None, 0.0)
        events.emit(PruneEvent(2, 1))
        assert kept[2:] == [("copy", 4, 0.5, None, 0.0)]
    finally:
        stop()
    events.tell(ReadEvent, "item", 4, 0.5, None, 0.0)
    events.catch_up()
    assert len(kept) == 3


def test_listeners_are_told_at_once_of_what_others_keep_figures_of() -> None:
    kept: list[object] = []
    heard: list[object] = []
    stops = [
        events.keep_figures(kept.extend, ReadEvent),
        events.subscribe(heard.append, ReadEvent),
    ]
    try:
        events.tell(ReadEvent, "item", 4, 0.5, None, 0.0)
        assert heard == [ReadEvent("item", 4, 0.5, None, 0.0)]
        events.catch_up()
        assert len(kept) == 1
    finally:
        for stop in stops:
            stop()


def test_many_events_are_not_kept_waiting() -> None:
    kept: list[object] = []
    stop = events.keep_figures(kept.extend, ReadEvent)
    try:
        for _ in range(2 * events._MOST_NOTED):
            events.tell(ReadEvent, "item", 4, 0.5, None, 0.0)
        assert len(kept) >= events._MOST_NOTED
    finally:
        stop()
