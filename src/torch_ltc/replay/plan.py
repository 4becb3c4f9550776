"""The replay of a recorded call: everything that does not depend on the single call is worked out once."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from torch_ltc.closures import end_step
from torch_ltc.execute.executor import executor
from torch_ltc.execute.replay import Replayed
from torch_ltc.native.library import extension
from torch_ltc.program.spec import spec_of
from torch_ltc.pytorch.private import get_gradient, pytree, storage_use_count
from torch_ltc.record.buffer import Buffer, buffer_of, new_buffer, storage_of
from torch_ltc.replay.guard import Guard, shape_guard
from torch_ltc.replay.recorded_call import Argument, Made, RecordedCall, add_steps, by_step
from torch_ltc.replay.steady import steady_replay

__all__ = ["Plan"]

_cdata = operator.attrgetter("_cdata")
_spec = operator.attrgetter("spec")


class Plan:
    """How a call is replayed, and what that relies on. Built when two recordings agree; for one thread at a time."""

    def __init__(self, settled: RecordedCall) -> None:
        self._program = Replayed(settled.entry)
        self._all = [(i, spec) for i, (_, spec) in enumerate(settled.entry.outputs)]
        self._guard = _guard_of(settled)
        # Tensors that the program takes, and their memory.
        self._taken = [tensor for tensor, _ in settled.captured]
        self._storages = list(map(storage_of, self._taken))
        self._inputs: list[Any] = list(settled.inputs)
        self._given = [(i, item) for i, item in enumerate(settled.inputs) if isinstance(item, int)]
        self._kept = frozenset([id(item) for item in settled.inputs if not isinstance(item, int)])
        self._given_too = settled.given_too
        self._gradients = _BoundGradients(settled)
        self._guard.watch(self._taken, self._gradients.expected())
        self._fresh = [(i, spec) for i, spec in self._all if i not in self._gradients.staying]
        self._flags = _Flags(settled)
        self._places = [(place, made) for place, made in settled.places if not isinstance(place.holder, torch.Tensor)]
        self._counters = settled.counters
        self._host_tensors = by_step(settled.host_tensors)
        self._written_captured = [item for item in settled.written if not isinstance(item, int)]
        self._written_given = [item for item in settled.written if isinstance(item, int)]
        self._leaves = settled.leaves
        self._rebuild = _rebuilder(settled.result)
        # The replay in one go, once there was one on the calling thread.
        self.steady: Any = None
        # Numbers that follow from none of the call are the same each time.
        self._is_plain = not (
            settled.context or settled.places or settled.counters or settled.host_tensors or settled.flags
        )
        # What the places held then is not kept alive.
        settled.after.values.clear()

    def change(self) -> str:
        """Something that a replay relies on and that has changed, or an empty text."""
        if self._guard.holds():
            return self._flags.change() if self._flags.there else ""
        changed = self._guard.change() or self._gradients.change() or self._flags.change()
        if self._guard.unchanged is None:
            # What is to be compared may have changed.
            self.steady = None
        if not changed and not all(map(operator.is_, map(storage_of, self._taken), self._storages)):
            changed = "the memory of a captured tensor"
        return changed

    def shares_as_recorded(self, leaves: list[Any]) -> bool:
        """True when those of these arguments that lie in the memory of tensors that stay are those that did."""
        return all(id(buffer_of(leaves[leaf])) not in self._kept for _, leaf in self._given) and all(
            buffer_of(leaves[position]) is buffer for position, buffer in self._given_too
        )

    def run(self, leaves: list[Any], scalars: list[object]) -> Any:
        """Replay the call with these arguments and run-time numbers, after `change` found nothing."""
        inputs = self._inputs.copy()
        for position, leaf in self._given:
            inputs[position] = buffer_of(leaves[leaf])
        outputs, rebound = self._gradients.outputs() if self._gradients.bound else self._gradients.nothing()
        # Where gradients do not stay, their outputs are new ones, too.
        for i, spec in self._fresh if rebound is self._gradients.others else self._all:
            if outputs[i] is None:
                outputs[i] = new_buffer(spec, 0)
        self._program.run(inputs, scalars, outputs)
        self.count_versions(leaves)
        if self._is_plain and self.steady is None and self._program.ran_here is not None:
            self._try_steady(leaves)
        if self._flags.change_some:
            self._flags.set()
        bases: dict[int, torch.Tensor] = {}
        for owner, made in rebound:
            owner.grad = made.tensor(outputs, bases)
        for place, made in self._places:
            place.put(made.tensor(outputs, bases))
        for place, step in self._counters:
            place.put(place.get() + step)
        if self._host_tensors:
            add_steps(self._host_tensors)
        returned = [_returned(leaf, leaves, outputs, bases) for leaf in self._leaves]
        executor.raise_deferred()
        end_step()
        return self._rebuild(returned)

    def count_versions(self, leaves: Sequence[Any]) -> None:
        """Tell autograd of the tensors that a replay has written to: it must not use what it kept of them."""
        if self._written_captured:
            increment_version(self._written_captured)
        for position in self._written_given:
            if not leaves[position].is_inference():
                increment_version(leaves[position])

    def _try_steady(self, leaves: list[Any]) -> None:
        """Let the next replays happen in one go, if they can."""
        guards = self._guard.unchanged
        if guards is not None and leaves and not self._given_too and all(type(leaf) is torch.Tensor for leaf in leaves):
            self.steady = steady_replay(
                self._program, tuple(leaves), guards, self._inputs, self._given, self._leaves, self._rebuild
            )


def _rebuilder(structure: Any) -> Callable[[list[Any]], Any]:
    """The function that makes a result of this structure of its leaves."""
    if structure.is_leaf():
        return operator.itemgetter(0)
    if structure.type in (tuple, list) and all(child.is_leaf() for child in structure.children_specs):
        make: Callable[[list[Any]], Any] = structure.type
        return make
    return lambda leaves: pytree.tree_unflatten(leaves, structure)


def _guard_of(settled: RecordedCall) -> Guard:
    """Guards on everything but what a replay changes itself, and on learning rates, which are numbers of the call."""
    skipped = {place.identity for place, _ in (*settled.places, *settled.counters)}
    skipped |= {place.identity for place in settled.rates}
    counted = {id(tensor) for tensor, _ in settled.host_tensors}
    changed = {id(tensor) for tensor, _, _ in settled.flags}
    return Guard(settled.after, skipped, [tensor for tensor, _ in settled.captured], changed, counted)


def _returned(leaf: Any, leaves: list[Any], outputs: list[Buffer], bases: dict[int, torch.Tensor]) -> Any:
    if isinstance(leaf, Made):
        return leaf.tensor(outputs, bases)
    return leaves[leaf.position] if isinstance(leaf, Argument) else leaf


class _Flags:
    """Tensors whose `requires_grad` a call changes, as code does that trains parts of a model in turn."""

    def __init__(self, settled: RecordedCall) -> None:
        self._changes = [(tensor, after) for tensor, before, after in settled.flags if before is not after]
        self._tensors = [tensor for tensor, _, _ in settled.flags]
        self._expected = [(spec_of(tensor), before) for tensor, before, _ in settled.flags]
        self.there = bool(settled.flags)
        self.change_some = bool(self._changes)
        # Made when they are next as they were before the call.
        self._have_shapes: Callable[..., bool] | None = None

    def change(self) -> str:
        """A text when a call would find them other than it did."""
        if self._have_shapes is not None and self._have_shapes(*self._tensors):
            return ""
        if [(spec_of(tensor), tensor.requires_grad) for tensor in self._tensors] != self._expected:
            return "requires_grad of a tensor"
        self._have_shapes = shape_guard(self._tensors)
        return ""

    def set(self) -> None:
        """Change them as the call does."""
        for tensor, after in self._changes:
            tensor.requires_grad_(after)


class _BoundGradients:
    """The gradients that a replay binds. One that nobody holds besides its tensor stays, and gets new values."""

    def __init__(self, settled: RecordedCall) -> None:
        bound = [(place.holder, made) for place, made in settled.places if isinstance(place.holder, torch.Tensor)]
        had = {id(tensor): there for tensor, there in settled.gradients}
        whole = [spec for _, spec in settled.entry.outputs]
        # Those that may stay, and those that are there only after the call.
        self._staying = [(owner, made) for owner, made in bound if had[id(owner)]]
        self.others = [(owner, made) for owner, made in bound if not had[id(owner)]]
        self.bound = bool(bound)
        self._owners = [owner for owner, _ in self._staying]
        self._positions = [made.output for _, made in self._staying]
        # Outputs that are gradients which may stay.
        self.staying = frozenset(self._positions)
        self._wholes = [whole[made.output] for _, made in self._staying]
        self._nothing: list[Any] = [None] * len(whole)
        self._have_shapes = shape_guard([owner.grad for owner in self._owners])
        self._alone = [[count] * len(self._owners) for count in _counts_of_one()]
        # Quick where nothing happened to the gradients since the last replay.
        self._held: Any = None
        if extension is not None and self._owners:
            self._held = extension.HeldGradients(self._owners, self._positions, self._wholes, _owner_of_one())

    def expected(self) -> list[tuple[torch.Tensor, bool]]:
        """The tensors whose gradients a replay binds, and whether they have one before."""
        return [(owner, True) for owner in self._owners] + [(owner, False) for owner, _ in self.others]

    def change(self) -> str:
        """A text when gradients are there that were not, or the other way round."""
        there = all(map(operator.is_not, map(get_gradient, self._owners), itertools.repeat(None)))
        return "" if there and not any(owner.grad is not None for owner, _ in self.others) else "a gradient"

    def nothing(self) -> tuple[list[Any], list[tuple[torch.Tensor, Made]]]:
        """As `outputs`, where no gradients are bound."""
        return self._nothing.copy(), self.others

    def outputs(self) -> tuple[list[Any], list[tuple[torch.Tensor, Made]]]:
        """The buffers of gradients that stay, by output; and the tensors that get new ones, whose old ones end here:
        nobody sees a gradient between its end and its new value."""
        outputs = self._nothing.copy()
        rebound = self.others
        if self._held is not None and self._held.put(outputs):
            for owner, _ in rebound:
                owner.grad = None
            return outputs, rebound
        outputs = self._nothing.copy()
        current: list[Any] = list(map(get_gradient, self._owners))
        references, uses, buffers = _counts(current)
        if (
            [references, uses] == self._alone
            and self._have_shapes(*current)
            and all(map(operator.is_, map(_spec, buffers), self._wholes))
        ):
            for position, buffer in zip(self._positions, buffers, strict=True):
                outputs[position] = buffer
            if self._held is not None:
                self._held.note(buffers)
        else:
            rebound = [*rebound]
            alone = zip(zip(references, uses, strict=True), zip(*self._alone, strict=True), self._wholes, strict=True)
            for pair, gradient, buffer, (now, one, whole) in zip(self._staying, current, buffers, alone, strict=True):
                made = pair[1]
                assert gradient is not None
                if now == one and spec_of(gradient) is made.spec and buffer.spec is whole:
                    outputs[made.output] = buffer
                else:
                    rebound.append(pair)
        for owner, _ in rebound:
            owner.grad = None
        return outputs, rebound


def _counts(gradients: list[Any]) -> tuple[list[int], list[int], list[Buffer]]:
    """The number of references to each of these tensors and to its memory, and the buffers."""
    references = list(map(sys.getrefcount, gradients))
    storages = list(map(storage_of, gradients))
    return references, list(map(storage_use_count, map(_cdata, storages))), list(map(buffer_of, gradients))


@functools.cache
def _owner_of_one() -> torch.Tensor:
    """A tensor with a gradient that nobody else holds."""
    owner = torch.empty(1, device="ltc").requires_grad_()
    owner.grad = torch.empty(1, device="ltc")
    return owner


@functools.cache
def _counts_of_one() -> tuple[int, int]:
    """The counts for a gradient that only its tensor holds: measured, because interpreters count differently."""
    references, uses, _ = _counts(list(map(get_gradient, [_owner_of_one()])))
    return references[0], uses[0]
