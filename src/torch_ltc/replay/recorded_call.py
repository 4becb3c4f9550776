"""A recorded call of a jit function, taken apart: what its program takes, and all that the call leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.device.registration import alias
from torch_ltc.device.tensors import new_tensor
from torch_ltc.native.library import extension
from torch_ltc.program.spec import Spec, spec_of
from torch_ltc.pytorch.private import add_to_each, pytree
from torch_ltc.record.buffer import Buffer, buffer_of
from torch_ltc.replay.numbers import optimizer_numbers
from torch_ltc.replay.state import MISSING, Place, State, is_lazy

__all__ = [
    "Anatomy",
    "Argument",
    "Made",
    "NotReplayable",
    "RecordedCall",
    "Unsettled",
    "add_steps",
    "by_step",
    "named_numbers",
    "optimizers_of",
    "versions_of",
]

_NUMBERS = (int, float)
# Optimizers that do the same at each number of steps, but for numbers that rules explain. RAdam begins to rectify after
# five, LBFGS remembers, and those of others may do anything.
_COUNTING = frozenset(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RMSprop", "Rprop", "SGD", "SparseAdam")
)


def _counts_only(kind: type[torch.optim.Optimizer]) -> bool:
    """True for an optimizer whose `step` is that of one of these."""
    return next((base for base in kind.__mro__ if "step" in vars(base)), None) in _COUNTING


class NotReplayable(Exception):
    """The reason why a recorded call cannot be replayed."""


class Unsettled(Exception):
    """The reason why this recording is not like the next one will be."""


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a replay makes: on which output, and how it looks at it."""

    output: int
    spec: Spec

    def tensor(self, buffers: list[Buffer], bases: dict[int, torch.Tensor]) -> torch.Tensor:
        """The tensor on these outputs; `bases` has those that look at a whole one, and, under the complement, those of
        them that were given away."""
        buffer = buffers[self.output]
        base = bases.get(self.output)
        if base is None:
            base = bases[self.output] = new_tensor(buffer, buffer.spec)
        if self.spec is buffer.spec and ~self.output not in bases:
            bases[~self.output] = base
            return base
        return alias(base, self.spec.size, self.spec.stride, self.spec.offset)


@dataclass(slots=True)
class RecordedCall:
    """One recorded call, taken apart."""

    entry: CachedProgram
    # For each input the position of an argument, or the buffer itself.
    inputs: list[int | Buffer]
    scalars: list[object]
    context: dict[Any, float | int]
    result: Any
    leaves: list[Any]
    places: list[tuple[Place, Made]]
    # Gradients that were there, or not, when the call began.
    gradients: list[tuple[torch.Tensor, bool]]
    counters: list[tuple[Place, float | int]]
    host_tensors: list[tuple[torch.Tensor, float]]
    rates: list[Place]
    # Tensors whose `requires_grad` the call changes: before, and after it.
    flags: list[tuple[torch.Tensor, bool, bool]]
    optimizers: list[torch.optim.Optimizer]
    # The tensors behind the inputs that stay, with their buffers.
    captured: list[tuple[torch.Tensor, Buffer]]
    # Those of them that were arguments, too, by position.
    given_too: list[tuple[int, Buffer]]
    # Tensors that the call writes to, or the positions of arguments.
    written: list[torch.Tensor | int]
    after: State

    def agrees(self, other: RecordedCall) -> str:
        """Empty when a replay of one is a replay of the other; else what differs."""
        if self.entry is not other.entry:
            return "the program, or what is alive at its end"
        if len(self.inputs) != len(other.inputs) or any(
            a != b if isinstance(a, int) else a is not b for a, b in zip(self.inputs, other.inputs, strict=True)
        ):
            return "the tensors that the program takes"
        if [(p.identity, made) for p, made in self.places] != [(p.identity, made) for p, made in other.places]:
            return "the places where new tensors are bound"
        if self.result != other.result or not _same_leaves(self.leaves, other.leaves):
            return "what is returned"
        if [(p.identity, d) for p, d in self.counters] != [(p.identity, d) for p, d in other.counters]:
            return "how numbers are counted up"
        flags = [(id(t), *values) for t, *values in self.flags], [(id(t), *values) for t, *values in other.flags]
        if flags[0] != flags[1]:
            return "which tensors require gradients"
        steps = [(id(t), d) for t, d in self.host_tensors], [(id(t), d) for t, d in other.host_tensors]
        return "" if steps[0] == steps[1] else "how tensors on the host are counted up"


def _same_leaves(first: list[Any], second: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)

    return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))


@dataclass(slots=True)
class Argument:
    """An argument that is returned."""

    position: int


def versions_of(state: State, leaves: list[Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors that can be reached, with their versions."""
    found = {id(value): value for value in (*state.values.values(), *leaves) if is_lazy(value)}
    return [(tensor, tensor._version) for tensor in found.values() if not tensor.is_inference()]


def optimizers_of(state: State) -> list[torch.optim.Optimizer]:
    """The optimizers that can be reached."""
    found = {id(value): value for value in state.values.values() if isinstance(value, torch.optim.Optimizer)}
    return list(found.values())


def named_numbers(
    optimizers: list[torch.optim.Optimizer],
    leaves: list[Any],
    host_tensors: list[tuple[torch.Tensor, float]],
    ahead: bool = True,
) -> dict[Any, float | int]:
    """The named numbers of a call: its arguments, and what its optimizers make of their options. With `ahead` the
    steps that the call will count up are counted."""
    context: dict[Any, float | int] = {i: leaf for i, leaf in enumerate(leaves) if type(leaf) is float}
    steps = {id(tensor): step for tensor, step in host_tensors}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            counted = next((optimizer.state[p].get("step") for p in group["params"] if p in optimizer.state), None)
            step: float | None = None
            if isinstance(counted, torch.Tensor) and counted.device.type == "cpu":
                step = counted.item() + (steps.get(id(counted), 0) if ahead else 0)
            context.update(optimizer_numbers((number, index), group, step))
    return context


def by_step(host_tensors: list[tuple[torch.Tensor, float]]) -> dict[float, list[torch.Tensor]]:
    """The tensors on the host that a call counts up, by how much."""
    found: dict[float, list[torch.Tensor]] = {}
    for tensor, step in host_tensors:
        found.setdefault(step, []).append(tensor)
    return found


def add_steps(tensors: dict[float, list[torch.Tensor]]) -> None:
    """Count them up."""
    for step, counted in tensors.items():
        if extension is None or not extension.count_up(counted, step):
            add_to_each(counted, step)


def _brief(value: Any) -> str:
    text = f"a {type(value).__name__} of {len(value)}" if isinstance(value, (dict, list, set)) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Anatomy:
    """Takes a recorded call apart: what each buffer is to the world outside."""

    def __init__(
        self,
        before: State,
        after: State,
        leaves: list[Any],
        entry: CachedProgram,
        inputs: list[Buffer],
        outputs: list[Buffer],
        versions: list[tuple[torch.Tensor, int]],
    ) -> None:
        self._versions = versions
        self._before, self._after, self._leaves, self._entry = before, after, leaves, entry
        self._inputs = inputs
        self._optimizers = optimizers_of(after)
        self._output_of = {id(buffer): position for position, buffer in enumerate(outputs)}
        self._bound: set[int] = set()
        self._counters: list[tuple[Place, float | int]] = []
        self._host: list[tuple[torch.Tensor, float]] = []
        self._places: list[tuple[Place, Made]] = []
        self._captured: list[tuple[torch.Tensor, Buffer]] = []
        self._given_too: list[tuple[int, Buffer]] = []
        self._flags: dict[int, tuple[torch.Tensor, bool, bool]] = {}

    def recorded(self, result: Any, scalars: list[object]) -> RecordedCall:
        """The call, taken apart. Raises NotReplayable or Unsettled."""
        for place, old, new in self._before.changes(self._after):
            self._change(place, old, new)
        returned, structure = pytree.tree_flatten(result)
        leaves = [self._returned(leaf) for leaf in returned]
        if len(self._bound) < len(self._output_of):
            position = next(i for i in range(len(self._output_of)) if i not in self._bound)
            call = self._entry.program.maker_of(self._entry.program.outputs[position])
            where = "" if call is None else f": {call.name} at {call.source}"
            raise NotReplayable(f"a tensor that it makes stays alive where jit cannot find it{where}")
        gradients = [place.holder for place, _ in self._places if isinstance(place.holder, torch.Tensor)]
        had = {id(t): self._before.values.get((id(t), "grad")) is not None for t in gradients}
        context = named_numbers(self._optimizers, self._leaves, self._host, ahead=False)
        return RecordedCall(
            self._entry,
            self._bindings(),
            scalars,
            context,
            structure,
            leaves,
            self._places,
            [(t, had[id(t)]) for t in gradients],
            self._counters,
            self._host,
            self._rates(),
            list(self._flags.values()),
            self._optimizers,
            self._captured,
            self._given_too,
            self._written(),
            self._after,
        )

    def _written(self) -> list[torch.Tensor | int]:
        """What the call has written to. Tensors that a replay makes anew, or that are gone, are left out; so is the
        state of optimizers, which no graph keeps."""
        positions = {id(leaf): position for position, leaf in enumerate(self._leaves)}
        there = {id(value) for value in self._after.values.values()}
        held = [held for optimizer in self._optimizers for held in optimizer.state.values() if isinstance(held, dict)]
        there -= {id(value) for state in held for value in state.values()}
        # As often as it does.
        written = [tensor for tensor, version in self._versions for _ in range(tensor._version - version)]
        found: list[torch.Tensor | int] = [positions[id(t)] for t in written if id(t) in positions]
        kept = [t for t in written if id(t) in there and id(t) not in positions]
        return found + [t for t in kept if id(buffer_of(t)) not in self._output_of]

    def _rates(self) -> list[Place]:
        """Learning rates: a change of one does not change what is recorded."""
        groups = {id(group) for optimizer in self._optimizers for group in optimizer.param_groups}
        places = self._after.places.values()
        return [p for p in places if id(p.holder) in groups and p.key == "lr" and type(p.get()) in _NUMBERS]

    def _bindings(self) -> list[int | Buffer]:
        arguments: dict[int, int] = {}
        for position, leaf in enumerate(self._leaves):
            if is_lazy(leaf) and arguments.setdefault(id(buffer_of(leaf)), position) != position:
                raise NotReplayable(f"arguments {arguments[id(buffer_of(leaf))]} and {position} share memory")
        known = {id(buffer_of(value)): value for value in self._before.values.values() if is_lazy(value)}
        bindings: list[int | Buffer] = []
        for buffer in self._inputs:
            position = arguments.get(id(buffer), -1)
            if position >= 0 and id(buffer) not in known:
                bindings.append(position)
            elif id(buffer) in known:
                bindings.append(buffer)
                self._captured.append((known[id(buffer)], buffer))
                if position >= 0:
                    self._given_too.append((position, buffer))
            else:
                raise NotReplayable("it reads a tensor that is no argument, and that jit cannot find from the function")
        return bindings

    def _change(self, place: Place, old: Any, new: Any) -> None:
        if is_lazy(new) and new is old:
            (_, shape, before), (_, changed, after) = (s.tokens[place.identity] for s in (self._before, self._after))
            if shape is not changed:
                raise NotReplayable(f"it changes the shape of {place.path} in place, from {shape} to {changed}")
            self._flags[id(new)] = (new, before, after)
        elif is_lazy(new):
            made = self._made(new)
            if made is None:
                raise Unsettled(f"{place.path} is bound to another tensor")
            if new.requires_grad and new.grad_fn is not None:
                raise NotReplayable(f"{place.path} is bound to a tensor whose graph is kept")
            self._places.append((place, made))
        elif isinstance(new, dict) and new is old and self._is_of_optimizer(place):
            # State that the first step makes.
            raise Unsettled(f"{place.path} has grown")
        elif old is MISSING or new is MISSING:
            raise Unsettled(f"{place.path} was {'added' if old is MISSING else 'removed'}")
        elif type(old) is type(new) and type(new) in _NUMBERS and self._is_counter(place):
            self._counters.append((place, new - old))
        elif isinstance(new, torch.Tensor) and new is old and self._is_counter(place):
            self._host_change(place, new)
        else:
            raise NotReplayable(
                f"it changes {place.path} from {_brief(old)} to {_brief(new)}; do that outside of the function"
            )

    def _is_of_optimizer(self, place: Place) -> bool:
        """True for the state of an optimizer, and for its attributes."""
        return place.key != "lr" and self._optimizer_of(place) is not None

    def _is_counter(self, place: Place) -> bool:
        """True for what an optimizer counts up, and does not decide by."""
        if place.key == "lr":
            return False
        optimizer = self._optimizer_of(place)
        if optimizer is not None and not _counts_only(type(optimizer)):
            name = type(optimizer).__name__
            raise NotReplayable(f"it changes {place.path}, and {name} may do something else at another number of steps")
        return optimizer is not None

    def _optimizer_of(self, place: Place) -> torch.optim.Optimizer | None:
        for optimizer in self._optimizers:
            if any(place.holder is held for held in (*optimizer.state.values(), vars(optimizer))):
                return optimizer
        return None

    def _host_change(self, place: Place, tensor: torch.Tensor) -> None:
        old = self._before.tokens[place.identity][1]
        new = self._after.tokens[place.identity][1]
        steps = {b - a for a, b in zip(old, new, strict=True)} if isinstance(new, tuple) else set()
        if len(steps) != 1 or tensor.requires_grad:
            raise NotReplayable(f"{place.path}, a tensor on the host, is changed in a way that jit cannot repeat")
        if all(tensor is not known for known, _ in self._host):
            self._host.append((tensor, steps.pop()))

    def _made(self, tensor: torch.Tensor) -> Made | None:
        position = self._output_of.get(id(buffer_of(tensor)))
        if position is None:
            return None
        spec, whole = spec_of(tensor), self._entry.outputs[position][1]
        if (spec.dtype, spec.conj, spec.neg) != (whole.dtype, whole.conj, whole.neg):
            raise NotReplayable("a tensor that it makes is a view with another dtype")
        self._bound.add(position)
        return Made(position, spec)

    def _returned(self, leaf: Any) -> Any:
        if is_lazy(leaf):
            made = self._made(leaf)
            if made is not None:
                return made
            position = next((i for i, given in enumerate(self._leaves) if given is leaf), -1)
            return Argument(position) if position >= 0 else leaf
        if isinstance(leaf, torch.Tensor):
            raise NotReplayable("it returns a tensor of another device")
        return leaf
