"""`jit(function)`: replays the program of a function without running its Python, once two recordings agree.

A call is recorded as any other code, as one program. What it read and what it left behind is found, not assumed: the
tensors that the program takes are arguments or tensors that can be reached from the function; those that it makes are
returned, or bound to places that can be reached; numbers follow rules that all recordings agree with; other changes of
Python state are counters. Anything else, and the call is recorded each time.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from torch_ltc.closures import run_step_closures
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import settings
from torch_ltc.debug.history import functions_explained
from torch_ltc.device.tensor_methods import leaf_hooks
from torch_ltc.errors import JitError
from torch_ltc.events import Event, FallbackEvent, SyncEvent, SyncReason, UploadEvent, subscribe
from torch_ltc.execute.eager_region import eager_regions
from torch_ltc.execute.executor import executor
from torch_ltc.execute.sync import cut, pending_entry
from torch_ltc.lowering.lower import same_number
from torch_ltc.native.library import extension
from torch_ltc.program.spec import spec_of
from torch_ltc.pytorch.private import profiler, pytree
from torch_ltc.record.buffer import buffer_of
from torch_ltc.record.recorder import recorder
from torch_ltc.replay.guard import shape_guard
from torch_ltc.replay.numbers import Context, NumberRules, Trials, WatchedFloat, looked_at, watched_rates
from torch_ltc.replay.plan import Plan
from torch_ltc.replay.recorded_call import (
    Anatomy,
    NotReplayable,
    RecordedCall,
    Unsettled,
    named_numbers,
    optimizers_of,
    versions_of,
)
from torch_ltc.replay.state import State, TooMuchState, is_lazy

__all__ = ["JitFunction", "jit"]

# Recordings of one kind of call after which nothing is expected to settle any more.
_MOST_RECORDINGS = 32
# Kinds of calls that are kept.
_MOST_KINDS = 32
_MOST_SURPRISES = 3
_UNCERTAIN = "a number has changed, and it is not certain yet what follows from it"
# Those that are alive, for reports.
_functions: weakref.WeakSet[JitFunction] = weakref.WeakSet()


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """Add the leaves of an argument to the list; returns its structure."""
    if isinstance(value, (list, tuple)):
        return (type(value), *[_flatten(item, leaves) for item in value])
    if isinstance(value, dict):
        return (dict, *[(key, _flatten(item, leaves)) for key, item in value.items()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
        return (type(value), *[(name, _flatten(item, leaves)) for name, item in fields])
    leaves.append(value)
    return None


def _kind(leaf: Any) -> Any:
    """A key that is equal for arguments of one kind."""
    if isinstance(leaf, torch.Tensor):
        if not is_lazy(leaf):
            return (torch.Tensor, str(leaf.device), leaf.layout)
        return (spec_of(leaf), buffer_of(leaf).spec, leaf.requires_grad)
    if type(leaf) is float:
        return float
    if isinstance(leaf, (bool, int, str, bytes, type(None), torch.dtype, torch.device)):
        return (type(leaf), leaf)
    return id(leaf)


def _sharing(leaves: list[Any]) -> tuple[tuple[int, int], ...]:
    """For each tensor of the device that is another argument, too, or that lies in its memory: the first such
    argument, and the first that is the same tensor."""
    seen: dict[int, int] = {}
    lazy = [(i, leaf) for i, leaf in enumerate(leaves) if is_lazy(leaf)]
    firsts = [(i, seen.setdefault(id(buffer_of(leaf)), i), seen.setdefault(id(leaf), i)) for i, leaf in lazy]
    return tuple([(first, same) for i, first, same in firsts if first != i])


def _replaced(value: Any, positions: Iterator[int], new: Mapping[int, WatchedFloat], watched: bool = True) -> Any:
    """The same arguments with some leaves replaced, by position. Those of dataclasses stay as they are: what looks at
    them is not seen, and they count as looked at."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_replaced(item, positions, new, watched) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, positions, new, watched) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, positions, new, watched) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            _replaced(getattr(value, each.name), positions, new, watched=False)
        return value
    number = new.get(next(positions))
    if number is not None and not watched:
        number.note()
    return value if number is None or not watched else number


def _unwatched(result: Any) -> Any:
    """What a call returned; numbers that it returns are plain ones, and have been looked at."""
    leaves, structure = pytree.tree_flatten(result)
    if not any(isinstance(leaf, WatchedFloat) for leaf in leaves):
        return result
    return pytree.tree_unflatten(
        [leaf.plain() if isinstance(leaf, WatchedFloat) else leaf for leaf in leaves], structure
    )


def _modes() -> tuple[Any, ...]:
    """The modes of the thread, and of PyTorch, that decide what a call records."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("ltc") and torch.get_autocast_dtype("ltc"),
        recorder.torch_state,
    )


def _host_random() -> Any:
    """The states of the host's random generators."""
    numpy = sys.modules.get("numpy")
    states: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        states += [keys.tolist(), rest]
    return states


@dataclass(slots=True)
class _Calls:
    """Calls of one kind: recorded until two agree, replayed from then on."""

    # Arguments that are known by their identity.
    objects: list[Any]
    # Never waited for.
    busy: threading.Lock = field(default_factory=threading.Lock)
    rules: NumberRules = field(default_factory=NumberRules)
    # The program that the rules are of.
    ruled: CachedProgram | None = None
    last: RecordedCall | None = None
    settled: RecordedCall | None = None
    plan: Plan | None = None
    recordings: int = 0
    replays: int = 0
    since_verified: int = 0
    reason: str = ""
    refused: bool = False
    # Recordings in a row with numbers that no rule explained.
    surprises: int = 0
    # Arguments and learning rates that the function has looked at, besides handing them to operators.
    inspected: set[Any] = field(default_factory=set)
    trials: Trials = field(default_factory=Trials)

    def allow(self, numbers: Context, recorded: Context) -> bool:
        """True when the numbers are those of the last recording, or others that a replay is known to be right for."""
        for name, value in numbers.items():
            if name not in recorded or not same_number(value, recorded[name]):
                # Nobody sees who looks at a whole number.
                if name in self.inspected or type(value) is int:
                    self.reason = "a number has changed that the function looks at"
                    return False
                if not self.trials.covers(name, value):
                    self.reason = _UNCERTAIN
                    return False
        return True


class _Tensors:
    """A quick check that arguments, tensors of the device alone, none of which share memory, are of the kind that they
    were."""

    __slots__ = ("calls", "_modes", "_state", "_count", "_have_shapes", "_wholes", "_native")

    def __init__(self, tensors: list[Any], modes: Any, calls: _Calls) -> None:
        self.calls = calls
        self._modes = modes
        self._state = recorder.torch_state
        self._count = len(tensors)
        self._have_shapes = shape_guard(tensors)
        self._wholes = [(buffer_of(tensor).spec, tensor.storage_offset()) for tensor in tensors]
        self._native = None if extension is None else extension.SameCall(tuple(tensors))

    def takes(self, args: tuple[Any, ...]) -> bool:
        """True when a call with these arguments is one of `calls`."""
        if self._native is not None:
            return recorder.torch_state is self._state and bool(self._native.takes(args))
        return (
            len(args) == self._count
            and _modes() == self._modes
            and self._have_shapes(*args)
            and len({id(buffer_of(one)) for one in args}) == self._count
            and all(
                type(one) is torch.Tensor and buffer_of(one).spec is whole and one.storage_offset() == offset
                for one, (whole, offset) in zip(args, self._wholes, strict=True)
            )
        )


class JitFunction:
    """A function whose calls are replayed where that is certain to do the same; see `jit`."""

    def __init__(self, function: Callable[..., Any], verify_every: int, fallback: Literal["record", "error"]) -> None:
        functools.update_wrapper(self, function)
        self._name: str = getattr(function, "__qualname__", repr(function))
        self._function = function
        self._verify_every = verify_every
        self._fallback = fallback
        self._calls: dict[Any, _Calls] = {}
        # Those of the latest call, if its arguments were tensors alone.
        self._latest: _Tensors | None = None
        _functions.add(self)

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def explain(self) -> str:
        """A text on the calls so far: replayed or recorded, and why."""
        lines = [f"jit of {self._name}:"]
        for number, calls in enumerate(self._calls.values(), 1):
            lines.append(f"  kind {number}: {calls.recordings} recorded, {calls.replays} replayed")
            settled = calls.settled
            if settled is not None:
                given = sum(isinstance(item, int) for item in settled.inputs)
                lines.append(
                    f"    program {settled.entry.program.identity}: {given} inputs are arguments, "
                    f"{len(settled.inputs) - given} stay; {len(settled.places)} places get new tensors, "
                    f"{len(settled.counters) + len(settled.host_tensors)} are counted up"
                )
            if calls.reason:
                lines.append(f"    {'not replayed' if calls.refused else 'last recorded'}: {calls.reason}")
        return "\n".join(lines)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the call, or record it."""
        latest = self._latest
        if latest is not None and not kwargs and not profiler._is_profiler_enabled:
            calls = latest.calls
            plan = calls.plan
            if plan is not None and plan.steady is not None and calls.settled is not None and not self._verify_every:
                result = plan.steady.run(args)
                if result is not None:
                    calls.replays += 1
                    plan.count_versions(args)
                    return result
        if latest is not None and not kwargs and latest.takes(args):
            leaves, calls = list(args), latest.calls
        else:
            leaves, calls = self._find(args, kwargs, _modes())
        if not calls.busy.acquire(blocking=False):
            # Another thread, or the function itself.
            return self._function(*args, **kwargs)
        try:
            if calls.settled is not None and not self._is_due(calls):
                done, result = self._replay(calls, leaves)
                if done:
                    return result
            if calls.refused:
                return self._function(*args, **kwargs)
            return self._record(calls, leaves, args, kwargs)
        finally:
            calls.busy.release()

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: Any) -> tuple[list[Any], _Calls]:
        """The leaves of the arguments, and the calls of their kind."""
        leaves: list[Any] = []
        structure = _flatten((args, kwargs), leaves)
        sharing = _sharing(leaves)
        kind = (structure, tuple([_kind(leaf) for leaf in leaves]), sharing, modes)
        calls = self._calls.get(kind)
        if calls is None:
            if len(self._calls) >= _MOST_KINDS:
                self._calls.pop(next(iter(self._calls)), None)
            objects = [leaf for leaf, part in zip(leaves, kind[1], strict=True) if isinstance(part, int)]
            calls = self._calls.setdefault(kind, _Calls(objects))
        plain = (
            not kwargs
            and leaves
            and not sharing
            and len(leaves) == len(args)
            and all(type(leaf) is torch.Tensor for leaf in leaves)
        )
        self._latest = _Tensors(leaves, modes, calls) if plain and all(map(is_lazy, leaves)) else None
        return leaves, calls

    def _is_due(self, calls: _Calls) -> bool:
        """True when the call is to be recorded to compare it."""
        calls.since_verified += 1
        return bool(self._verify_every) and calls.since_verified >= self._verify_every

    # ---- recording ------------------------------------------------------------------------------------------------

    def _roots(self, leaves: list[Any]) -> dict[str, Any]:
        arguments = {f"argument {i}": leaf for i, leaf in enumerate(leaves) if not is_lazy(leaf)}
        return {"": self._function, **arguments, "hooks of tensors": leaf_hooks}

    def _record(self, calls: _Calls, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        """Run the function, and learn from it."""
        cut(SyncReason.JIT)
        roots = self._roots(leaves)
        calls.recordings += 1
        calls.since_verified = 0
        try:
            before = State.now(roots)
        except TooMuchState as error:
            return self._refuse(calls, str(error), lambda: self._function(*args, **kwargs))
        versions = versions_of(before, leaves)
        seen: list[Event] = []
        thread = threading.get_ident()

        def see(event: Event) -> None:
            # Another thread may upload the next batches meanwhile.
            if not isinstance(event, UploadEvent) or threading.get_ident() == thread:
                seen.append(event)

        stops = [subscribe(see, kind) for kind in (SyncEvent, FallbackEvent, UploadEvent)]
        printed = _Printed(sys.stdout)
        sys.stdout = printed
        try:
            host_random = _host_random()
            numbers = {i: WatchedFloat(leaf) for i, leaf in enumerate(leaves) if type(leaf) is float}
            watched_args, watched_kwargs = _replaced((args, kwargs), iter(range(len(leaves))), numbers)
            with (
                settings.scope(sync_after_optimizer=False),
                eager_regions.suspended(),
                watched_rates(optimizers_of(before)) as rates,
            ):
                result = self._function(*watched_args, **watched_kwargs)
        finally:
            sys.stdout = printed.stream
            for stop in stops:
                stop()
        result = _unwatched(result)
        try:
            _check_events(seen, printed)
            if _host_random() != host_random:
                raise NotReplayable("it draws random numbers on the host")
            calls.inspected |= {name for name, number in {**numbers, **rates}.items() if number.inspected}
            made = self._take_apart(before, State.now(roots), leaves, result, versions)
            self._learn(calls, made)
        except Unsettled as reason:
            calls.last = None
            calls.settled = None
            calls.reason = str(reason)
            if calls.recordings >= _MOST_RECORDINGS:
                self._refuse(calls, f"after {calls.recordings} recordings, {reason}")
        except (NotReplayable, TooMuchState) as reason:
            self._refuse(calls, str(reason))
        self._end()
        return result

    def _end(self) -> None:
        cut(SyncReason.JIT)
        executor.raise_deferred()
        run_step_closures()

    def _refuse(self, calls: _Calls, reason: str, otherwise: Callable[[], Any] = lambda: None) -> Any:
        calls.reason, calls.refused, calls.settled, calls.last = reason, True, None, None
        if self._fallback == "error":
            raise JitError(f"jit cannot replay {self._name}: {reason}", hint='fallback="record" records it')
        return otherwise()

    def _learn(self, calls: _Calls, made: RecordedCall) -> None:
        last = calls.last
        if made.entry is not calls.ruled:
            # Recordings between may have been of other programs, or none that was learned from.
            calls.rules, calls.ruled = NumberRules(), made.entry
        calls.rules.observe(made.scalars, made.context)
        unexplained = calls.rules.unexplained
        if unexplained:
            # Something that the function reads may have been changed between the calls. What changes by itself does so
            # each time.
            calls.surprises += 1
            calls.rules = NumberRules()
            calls.rules.observe(made.scalars, made.context)
            if calls.surprises == _MOST_SURPRISES:
                raise NotReplayable(f"number ${unexplained[0]} of its program changes in a way that jit does not know")
            calls.last, calls.settled = made, None
            calls.trials.observe(looked_at(made.context), agree=False)
            calls.reason = f"number ${unexplained[0]} of its program has changed"
            return
        difference = "" if last is None else made.agrees(last)
        calls.trials.observe(looked_at(made.context), agree=last is not None and not difference)
        calls.last = made
        calls.settled = None
        if last is None or difference:
            if difference:
                calls.reason = f"two recordings differ in {difference}"
            if calls.recordings >= _MOST_RECORDINGS:
                self._refuse(calls, f"after {calls.recordings} recordings, {calls.reason}")
            return
        calls.settled, calls.plan = made, Plan(made)

    def _take_apart(
        self, before: State, after: State, leaves: list[Any], result: Any, versions: list[tuple[torch.Tensor, int]]
    ) -> RecordedCall:
        """Say what a recorded call, which is still pending, took and made."""
        with recorder.lock:
            if recorder.empty:
                raise NotReplayable("it records nothing")
            outputs, live = recorder.live_outputs()
            entry, _ = pending_entry(live)
            inputs, scalars = list(recorder.inputs), list(recorder.scalars)
        return Anatomy(before, after, leaves, entry, inputs, outputs, versions).recorded(result, scalars)

    # ---- replaying ------------------------------------------------------------------------------------------------

    def _replay(self, calls: _Calls, leaves: list[Any]) -> tuple[bool, Any]:
        """True and the result, or False when the call has to be recorded."""
        settled, plan = calls.settled, calls.plan
        assert settled is not None
        assert plan is not None
        changed = plan.change()
        if changed:
            calls.reason = f"{changed} has changed"
            return False, None
        if not plan.shares_as_recorded(leaves):
            calls.reason = "which arguments share memory with tensors that the function takes by itself has changed"
            return False, None
        scalars: list[object] | None = []
        if settled.context:
            context = named_numbers(settled.optimizers, leaves, settled.host_tensors)
            if not calls.allow(looked_at(context), settled.context):
                return False, None
            if settled.scalars:
                scalars = calls.rules.numbers(context)
        elif settled.scalars:
            scalars = calls.rules.numbers({})
        if scalars is None:
            calls.reason = _UNCERTAIN
            return False, None
        calls.replays += 1
        calls.surprises = 0
        return True, plan.run(leaves, scalars)


class _Printed:
    """Standard output, which notes that something was written."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.used = False

    def write(self, text: str) -> int:
        self.used = True
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _check_events(seen: list[Event], printed: _Printed) -> None:
    """Raise when the call did what a replay would not."""
    for event in seen:
        if isinstance(event, FallbackEvent):
            raise NotReplayable(f"{event.op} runs eagerly at {event.source}: {event.reason}")
        if isinstance(event, UploadEvent):
            raise NotReplayable(f"a tensor is copied to the device at {event.source}; do that before the call")
        if isinstance(event, SyncEvent) and event.reason is not SyncReason.JIT:
            raise NotReplayable(f"there is a sync at {event.source}: {event.reason.value}")
    if printed.used:
        raise NotReplayable("it prints")


def jit(
    function: Callable[..., Any] | None = None,
    *,
    verify_every: int = 0,
    fallback: Literal["record", "error"] = "record",
) -> Any:
    """Replay the calls of a function without running its Python code, where that is certain to do the same.

    A whole training step is a good function: forward, backward, optimizer. Its calls are recorded until two recordings
    agree in the program, in the tensors that it takes and in all that it leaves behind; later calls rebind arguments,
    gradients, counters and numbers, and run the program. A call is recorded again when something that can be reached
    from the function has changed. What can never be replayed (a read, a print, a list that grows, a tensor kept
    somewhere else) is recorded each time, or with `fallback="error"` an error; `.explain()` says what and why.

    With `verify_every=N` every Nth call is recorded, and compared with what a replay would have done.
    """
    if function is None:
        return lambda decorated: JitFunction(decorated, verify_every, fallback)
    return JitFunction(function, verify_every, fallback)


def _explained() -> list[str]:
    """What the functions that were called say, by name."""
    return sorted(function.explain() for function in list(_functions) if function._calls)


functions_explained.add(_explained)
