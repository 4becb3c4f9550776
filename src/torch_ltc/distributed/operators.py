"""Operators that stand for collectives in programs, made from the schemas of PyTorch's own (`c10d::allreduce_`).

Theirs take process groups and return handles, and say nothing of what they write to. Ours name the group, say what they
write to, return nothing, and when they have run they are done. Of each there is a functional form, which returns the
new values of what the other writes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.distributed.groups import groups
from torch_ltc.errors import GroupError, RankMismatchError
from torch_ltc.program.collectives import NAMESPACE, functional_name
from torch_ltc.pytorch.distributed import (
    PREMULTIPLIED_SUM,
    collective_schemas,
    reduction_of,
    unbox_group,
    unbox_work,
)

__all__ = ["Collective", "define"]

# The arguments that each writes to. What is sent counts: nothing may be written to it before.
WRITTEN = {
    "allreduce_": "tensors",
    "allreduce_coalesced_": "tensors",
    "broadcast_": "tensors",
    "reduce_": "tensors",
    "allgather_": "output_tensors",
    "_allgather_base_": "output_tensor",
    "allgather_coalesced_": "output_lists",
    "allgather_into_tensor_coalesced_": "outputs",
    "reduce_scatter_": "output_tensors",
    "_reduce_scatter_base_": "output_tensor",
    "reduce_scatter_tensor_coalesced_": "outputs",
    "gather_": "output_tensors",
    "gather_into_tensor_": "output_tensor",
    "scatter_": "output_tensors",
    "alltoall_": "output_tensors",
    "alltoall_base_": "output",
    "send": "tensors",
    "recv_": "tensors",
}

_LISTS = "List[List[Tensor]]"
_GROUP, _REDUCTION = "ProcessGroup", "ReduceOp"
# Gloo divides their larger tensor along its first dimension, which may be 1.
_FLAT = frozenset({"_allgather_base_", "_reduce_scatter_base_"})
# The reductions as C++ objects, by number: some versions cannot make them anew.
_reductions: dict[int, Any] = {}


@dataclass(frozen=True, slots=True)
class Part:
    """One argument of PyTorch's operator, and its place in ours."""

    name: str
    type: str
    written: bool
    default: Any

    @property
    def declared(self) -> str:
        """The argument in the schema of ours; nothing if it has no place there."""
        alias = "(a!)" if self.written else ""
        if self.type == "Tensor":
            return f"Tensor{alias} {self.name}"
        if self.type == "List[Tensor]":
            return f"Tensor{alias}[] {self.name}"
        if self.type == _LISTS:
            return f"Tensor{alias}[] {self.name}, int[] {self.name}_lengths"
        kind = {"int": "int", "bool": "bool", "List[int]": "int[]", _GROUP: "str", _REDUCTION: "int"}.get(self.type, "")
        return f"{kind} {self.name}" if kind and self.name != "async_op" else ""

    def recorded(self, value: Any) -> list[Any]:
        """What ours takes for this value."""
        if self.type == _LISTS:
            return [[tensor for one in value for tensor in one], [len(one) for one in value]]
        if self.type == _GROUP:
            return [groups.name_of(unbox_group(value))]
        if self.type == _REDUCTION:
            return [_number_of(value)]
        if not self.declared:
            if isinstance(value, torch.Tensor):
                raise GroupError("sparse tensors of the ltc device cannot be reduced", hint="reduce them on the CPU")
            return []
        return [value]

    def physical(self, values: list[Any]) -> Any:
        """What PyTorch's operator takes for the next of these values, which are taken off the list."""
        if not self.declared:
            return self.default
        value = values.pop(0)
        if self.type == _LISTS:
            rest = list(value)
            return [[rest.pop(0) for _ in range(length)] for length in values.pop(0)]
        if self.type == _GROUP:
            return groups.physical(value).boxed()
        return _reductions[value] if self.type == _REDUCTION else value


@dataclass(frozen=True, slots=True)
class Collective:
    """One of PyTorch's operators on process groups, as the recorder sees it."""

    name: str
    parts: tuple[Part, ...]
    returns: tuple[str, ...]

    @property
    def arguments(self) -> str:
        """The arguments of ours, as a schema has them."""
        return ", ".join(part.declared for part in self.parts if part.declared)

    def values(self, given: Sequence[Any]) -> list[Any]:
        """All arguments of PyTorch's operator: the dispatcher leaves out those that are defaults."""
        return [*given, *(part.default for part in self.parts[len(given) :])]

    def record(self, given: Sequence[Any]) -> None:
        """Put the call into the pending program: the device's own kernel does, because of the tensors."""
        values = [item for part, value in zip(self.parts, given, strict=True) for item in part.recorded(value)]
        getattr(getattr(torch.ops, NAMESPACE), self.name).default(*values)

    def run(self, *values: Any) -> None:
        """Run the call on the physical device, and return when its results can be used."""
        rest = list(values)
        copied_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        if groups.is_on_host(self._group(values)):
            written = {position for position, _ in self._written_positions()}
            rest = [_on_host(value, copied_back if i in written else []) for i, value in enumerate(values)]
            if self.name in _FLAT:
                rest = [value.view(-1) if isinstance(value, torch.Tensor) else value for value in rest]
        arguments = [part.physical(rest) for part in self.parts]
        try:
            made = getattr(torch.ops.c10d, self.name).default(*arguments)
            unbox_work(made[-1] if isinstance(made, tuple) else made).wait()
            for tensor, copy in copied_back:
                tensor.copy_(copy)
        except RuntimeError as error:
            word = groups.word_of_others(self._group(values))
            if word is not None:
                raise RankMismatchError(word) from error
            raise

    def run_functionally(self, *values: Any) -> list[torch.Tensor]:
        """As `run`, on copies of what it writes to, which are returned."""
        given, copies = list(values), []
        for position, written in self._written_positions():
            if written == "Tensor":
                given[position] = given[position].clone()
                copies = [given[position]]
            else:
                given[position] = copies = [tensor.clone() for tensor in given[position]]
        self.run(*given)
        return copies

    def _group(self, values: Sequence[Any]) -> str:
        """The name of the group among the arguments of ours."""
        names = [argument.rpartition(" ")[2] for argument in self.arguments.split(", ")]
        return str(values[names.index("process_group")])

    def _written_positions(self) -> list[tuple[int, str]]:
        """The place of each written argument among those of ours, and its type."""
        found, position = [], 0
        for part in self.parts:
            if part.written:
                found.append((position, part.type))
            position += 2 if part.type == _LISTS else 1 if part.declared else 0
        return found


def _on_host(value: Any, copied: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """An argument with copies on the host for tensors elsewhere, which are noted: gloo takes no memory of a GPU for
    some collectives, and ends the process."""
    if isinstance(value, (list, tuple)):
        return [_on_host(item, copied) for item in value]
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    copied.append((value, value.cpu()))
    return copied[-1][1]


def _number_of(boxed: Any) -> int:
    number = reduction_of(boxed)
    if number == PREMULTIPLIED_SUM:
        raise GroupError("PREMUL_SUM cannot be recorded: its factor is hidden", hint="multiply before a SUM")
    _reductions.setdefault(number, boxed)
    return number


def _collective(schema: Any) -> Collective:
    name = schema.name.removeprefix("c10d::")
    parts = tuple(
        Part(
            argument.name,
            str(argument.type).rpartition(".")[2],
            argument.name == WRITTEN[name],
            argument.default_value if argument.has_default_value() else None,
        )
        for argument in schema.arguments
    )
    return Collective(name, parts, tuple(str(item.type).rpartition(".")[2] for item in schema.returns))


def define() -> tuple[list[Collective], torch.library.Library]:
    """Define ours, and how they run. The library is to be kept."""
    known = {schema.name.removeprefix("c10d::"): schema for schema in collective_schemas()}
    library = torch.library.Library(NAMESPACE, "DEF")
    made = [_collective(known[name]) for name in WRITTEN if name in known]
    for collective in made:
        functional = functional_name(collective.name)
        library.define(f"{collective.name}({collective.arguments}) -> ()")
        library.define(f"{functional}({collective.arguments.replace('(a!)', '')}) -> Tensor[]")
        for key in ("CPU", "CUDA"):
            library.impl(collective.name, collective.run, key)
            library.impl(functional, collective.run_functionally, key)
        library.impl(collective.name, _nothing, "Meta")
    return made, library


def _nothing(*values: Any) -> None:
    """A call on tensors without data."""
