"""Capture: the launches of a hot program, taken down once as graphs of the device, and replayed from then on.

It stands between the tiers and the backends: whatever computes a program on such a device may be captured. Decided here
is when a program is captured, captured again, or left alone; `captured_program` has the graphs themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.events import CaptureEvent, emit
from torch_ltc.execute.captured_program import (
    CapturedCalls,
    CapturedFunction,
    CapturedProgram,
    Graph,
    Graphs,
    segments_of,
    users_of,
)
from torch_ltc.execute.cuda_graphs import CudaGraphs
from torch_ltc.execute.graph_cache import graph_cache
from torch_ltc.lowering.functional_computation import FunctionalComputation
from torch_ltc.lowering.interface import Arguments, Computation, Outcome
from torch_ltc.lowering.lower import same_number
from torch_ltc.lowering.out_of_memory import make_room
from torch_ltc.program.collectives import collectives_of, is_collective
from torch_ltc.program.effects import may_fail
from torch_ltc.program.instruction import Call, Program
from torch_ltc.pytorch.private import data_pointer
from torch_ltc.record.buffer import Buffer

__all__ = ["Capture", "Graph", "Graphs", "graphs_of"]

# Executions that are watched before a program is captured, and with `cuda_graphs = "always"`.
_WATCHED = 3
_WATCHED_LEAST = 2
# How often a program is captured before it is left alone, and into how many graphs.
_MOST_CAPTURES = 8
_MOST_GRAPHS = 64
# How often a program is captured although there was no memory for its graphs, and for how many executions one whose
# graphs were dropped is left alone, each time that many more.
_MOST_ATTEMPTS = 3
_LEFT_ALONE = 16
# Libraries of linear algebra wait for the device, and what a failed capture leaves in their handles fails later calls.
_SOLVING = (
    "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky_inverse cholesky_solve geqrf "
    "linalg_cholesky_ex linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve "
    "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular ormqr triangular_solve"
)
_SOLVERS = frozenset(f"aten::{name}" for name in _SOLVING.split())
# Of linear algebra, those that neither wait nor look at data; the others look whether they were successful.
_PLAIN = frozenset(f"aten::linalg_{name}" for name in ("cross", "vector_norm", "vecdot", "diagonal", "lu"))
_RESIZING = frozenset({"aten::resize_", "aten::resize_as_"})


_by_device: dict[str, Graphs] = {"cuda": CudaGraphs()}


def graphs_of(device: torch.device) -> Graphs | None:
    """The device's graphs, if it has any."""
    return _by_device.get(device.type)


def _solves(call: Call) -> bool:
    """True for a call of a library of linear algebra."""
    return call.name.partition(".")[0] in _SOLVERS


def _resizes(call: Call, sizes: Mapping[int, tuple[int, ...]]) -> bool:
    """True for a call with `out=` that gives its target another size. `sizes` are those of values by number."""
    if not any(argument.kwarg_only and argument.alias_info is not None for argument in call.op._schema.arguments):
        return False
    return any(
        number in sizes and returned.spec is not None and returned.spec.size != sizes[number]
        for number, returned in zip(call.mutated, call.flat_returns, strict=False)
    )


def _unfit(program: Program) -> tuple[str, Call] | None:
    """Why a program is left alone, and the call because of which."""
    sizes = {number: spec.size for number, spec in program.specs().items()}
    for call in program.calls:
        name = call.name.partition(".")[0]
        if name in _RESIZING or _resizes(call, sizes):
            return "it may move memory to another place", call
        looks = name.startswith(("aten::linalg_", "aten::_linalg_")) or name == "aten::cholesky"
        if looks and name not in _SOLVERS and name not in _PLAIN:
            return "it reads data on the host, and may raise an error", call
    return None


@dataclass(slots=True)
class _Watched:
    """The differences between executions of a program: input buffers that move, and run-time numbers."""

    addresses: list[int] | None = None
    numbers: list[object] | None = None
    moving: set[int] = field(default_factory=set)
    varying: set[int] = field(default_factory=set)

    def look(self, program: Program, addresses: list[int], numbers: list[object]) -> None:
        """Compare one more execution with the last."""
        if self.addresses is not None and self.addresses != addresses:
            pairs = zip(program.inputs, self.addresses, addresses, strict=True)
            self.moving.update(instruction.buffer for instruction, old, new in pairs if old != new)
        if self.numbers is not None:
            pairs_of_numbers = enumerate(zip(self.numbers, numbers, strict=True))
            self.varying.update(slot for slot, (old, new) in pairs_of_numbers if not same_number(old, new))
        self.addresses, self.numbers = addresses, numbers


class Capture:
    """All that is known of capturing one program. Used on the executor's thread."""

    __slots__ = (
        "_program",
        "_written",
        "_graphs",
        "_watched",
        "_runs",
        "_captures",
        "_direct",
        "_computation",
        "_captured",
        "_attempts",
        "_drops",
        "size_bytes",
        "refusal",
        "__weakref__",
    )

    def __init__(self, entry: CachedProgram, graphs: Graphs) -> None:
        # Not the entry, which holds this: what leaves the program cache is to be freed at once.
        self._program = entry.program
        self._written = entry.written
        self._graphs = graphs
        # The reason why the program is left alone.
        self.refusal = ""
        self._drops = 0
        self._begin(None)

    def _begin(self, computation: Computation | None) -> None:
        self._computation = computation
        self._watched = _Watched()
        self._runs = 0
        self._captures = 0
        self._direct: set[int] = set()
        self._captured: CapturedProgram | None = None
        self._attempts = 0
        # Bytes that its graphs hold.
        self.size_bytes = 0
        self.refusal = ""

    def drop(self) -> None:
        """Let go of the graphs. Outputs that someone holds stay where they are."""
        self._captured = None
        self.size_bytes = 0
        self._drops += 1
        self._runs = -_LEFT_ALONE * self._drops
        self._captures = 0

    def release(self) -> None:
        """Let go of the graphs before an execution without them: a replay after it would know the outputs of that one
        only, and write over those of the replay before."""
        self._captured = None
        self.size_bytes = 0

    def run(
        self,
        computation: Computation | None,
        arguments: Arguments,
        previous: Sequence[weakref.ref[Buffer]],
        always: bool,
    ) -> Outcome | None:
        """Replay the program's graphs, or capture them while running it once; None when the caller is to run it.
        `previous` are the outputs of the last execution."""
        if self._computation is not computation:
            self._begin(computation)
        if self.refusal or not arguments.plain:
            return None
        tensors: list[Any] = arguments.inputs
        captured = self._captured
        if captured is not None and captured.fits(tensors, arguments.scalars):
            graph_cache.touch(self)
            try:
                captured.move_out(previous, tensors)
            except Exception as error:
                if not make_room(error):
                    raise
                captured.move_out(previous, tensors)
            return captured.replay(arguments)
        self._watched.look(self._program, list(map(data_pointer, tensors)), list(arguments.scalars))
        self._runs += 1
        if self._runs < (_WATCHED_LEAST if always else _WATCHED):
            return None
        if captured is not None:
            # Its outputs stay where they are as long as someone holds them.
            self._captured = None
            if captured.is_stale:
                # Another program's capture is why.
                self._captures -= 1
        return self._capture(computation, arguments)

    def _capture(self, computation: Computation | None, arguments: Arguments) -> Outcome | None:
        if self._captures == _MOST_CAPTURES:
            self._refuse("its inputs or numbers change in ever new ways", self._first_with_a_changing_number())
            return None
        self._captures += 1
        program = self._program
        unfit = _unfit(program)
        if unfit is not None:
            self._refuse(*unfit)
            return None
        made: CapturedProgram
        if isinstance(computation, FunctionalComputation):
            if not self._may_vary(computation):
                reason = "compiled code takes its run-time numbers from the host, and they change"
                self._refuse(reason, self._first_with_a_changing_number())
                return None
            talking = collectives_of(program)
            if talking:
                self._refuse("compiled code cannot be captured around calls that talk to other ranks", talking[0])
                return None
            solving = next(filter(_solves, program.calls), None)
            if solving is not None:
                self._refuse("compiled code cannot be captured around calls that wait for the device", solving)
                return None
            made = CapturedFunction(program, self._written, computation, self._graphs, self._watched.moving)
        else:
            if any(call.layout.copied is None for call in program.calls):
                # The interpreter has not seen yet how the results of all kernels lie in memory.
                return None
            direct = self._direct | users_of(program, self._watched.varying)
            # Ranks wait for each other on the host, and may not capture at the same step.
            direct |= {i for i, call in enumerate(program.calls) if is_collective(call.op) or _solves(call)}
            segments = segments_of(program.calls, direct)
            graphs = sum(not segment.direct for segment in segments)
            if not segments:
                return None
            if not 0 < graphs <= _MOST_GRAPHS:
                first = program.calls[min(direct)]
                what = "all of its calls" if not graphs else f"calls between {graphs} graphs"
                self._refuse(f"{what} would have to run by themselves, because of what they take", first)
                return None
            made = CapturedCalls(program, self._written, self._graphs, self._watched.moving, segments)
        outcome = made.first_run(arguments)
        if made.failure is None:
            self._captured = made
            self.size_bytes = max(made.size_bytes, 1)
            graph_cache.add(self, self._graphs.total_bytes())
            emit(CaptureEvent(program.identity, made.graph_count, made.describe(), ""))
        elif made.failure.out_of_memory:
            self._attempts += 1
            if self._attempts == _MOST_ATTEMPTS:
                self._refuse("there is no memory for its graphs")
        elif (
            (failed := made.failure.call) is None or isinstance(computation, FunctionalComputation) or may_fail(failed)
        ):
            # Between graphs a call may not fail: what depends on it could not be told from the rest.
            self._refuse(str(made.failure), made.failure.call)
        else:
            # Next time it runs between the graphs.
            self._direct.add(program.calls.index(failed))
        return outcome

    def _may_vary(self, computation: FunctionalComputation) -> bool:
        """True when the numbers that vary are tensors of the device in compiled code."""
        taken = (
            {slot for _, slot, _ in computation.numbers} if computation.number_device == self._program.device else {}
        )
        return self._watched.varying <= set(taken)

    def _first_with_a_changing_number(self) -> Call | None:
        users = users_of(self._program, self._watched.varying)
        return self._program.calls[min(users)] if users else None

    def _refuse(self, reason: str, call: Call | None = None) -> None:
        self.refusal = reason if call is None else f"{call.name} at {call.source}: {reason}"
        emit(CaptureEvent(self._program.identity, 0, "", self.refusal))
