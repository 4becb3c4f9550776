"""Calls that all processes of a group make together: each runs once, in the order of the program, on every rank."""

from __future__ import annotations

from torch_ltc.program.instruction import Call, Program
from torch_ltc.pytorch.private import OpOverload

NAMESPACE = "ltc_distributed"


def functional_name(name: str) -> str:
    """The name of the form that returns what the operator of this name writes to."""
    return f"{name}functional" if name.endswith("_") else f"{name}_functional"


def is_collective(op: OpOverload) -> bool:
    """True for an operator that talks to other processes."""
    return bool(op.namespace == NAMESPACE)


def is_ordered(call: Call) -> bool:
    """True for a call that runs exactly once and in its place among others of its kind: it moves the generator on, or
    other processes wait for it."""
    return call.random or is_collective(call.op)


def collectives_of(program: Program) -> list[Call]:
    """The calls of a program that talk to other processes, in order."""
    return [call for call in program.calls if is_collective(call.op)]
