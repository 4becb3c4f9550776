"""The TorchScript backend, the default: the program as one TorchScript function.

TorchScript takes views, in-place calls, lists and run-time numbers as they are, and runs them without the GIL.
`segments` cuts a program into runs of calls, one function each, `graph` builds the graphs, `source_ranges` puts the
user's lines on their nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.backends.torchscript.graph import GraphLowering, NotTaken
from torch_ltc.backends.torchscript.private import ScriptList, create_function
from torch_ltc.backends.torchscript.segments import Segment, split
from torch_ltc.backends.torchscript.serialize import dump_function, load_function
from torch_ltc.backends.torchscript.source_ranges import lines as user_lines
from torch_ltc.errors import CompileError
from torch_ltc.lowering.decompose import decompose_composites
from torch_ltc.lowering.interface import Arguments, Backend, Computation, Outcome
from torch_ltc.lowering.kernel_call import laid_out, run_call
from torch_ltc.program.instruction import Call, Program, ReturnKind, Scalar
from torch_ltc.program.text import instruction_text
from torch_ltc.source import Source

__all__ = ["ScriptComputation", "TorchScriptBackend"]


class TorchScriptBackend(Backend):
    """Lowers a program to TorchScript graphs, call by call."""

    name = "torchscript"
    symbolic_sizes = True

    def __init__(self) -> None:
        # Calls, by operator and kinds of arguments, that TorchScript was found to lack.
        self._lacking: set[object] = set()

    def initialize_aten_bindings(self) -> None:
        """Have TorchScript's compiler make itself ready, for some milliseconds in which nothing else can run."""
        user_lines.of([Source(__file__, 1, "")])

    def compile(self, program: Program) -> Computation:
        """TorchScript functions for the program: one, unless it is very long or has calls that TorchScript lacks."""
        program = decompose_composites(program)
        while True:
            direct = {id(call) for call in program.calls if _kind(call) in self._lacking}
            if program.symbols:
                # Results that are laid out anew have sizes of their own in each program.
                direct |= {id(call) for call in program.calls if call.layout.copied}
            try:
                parts = [_compile(segment, program.device) for segment in split(program, direct)]
                return ScriptComputation(parts, program)
            except NotTaken as refusal:
                self._lacking.add(_kind(refusal.call))

    def dump(self, compiled: object) -> bytes | None:
        """The graph of one function."""
        return dump_function(compiled)

    def load(self, program: Program, data: bytes) -> Any:
        """The function of a graph."""
        del program
        return load_function(data)


def _kind(call: Call) -> object:
    """The operator with what TorchScript resolves it by: which arguments are given as what."""

    def of(operand: object) -> object:
        if isinstance(operand, Scalar):
            return operand.type
        return frozenset(map(of, operand)) if isinstance(operand, tuple) else type(operand)

    return (call.op, *map(of, call.args), *map(of, call.kwargs.values()))


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment and its function; None for a call that TorchScript lacks."""

    segment: Segment
    function: Any


def _compile(segment: Segment, device: torch.device) -> _Part:
    if segment.direct:
        return _Part(segment, None)
    lowering = GraphLowering(segment, device)
    try:
        graph = lowering.lower()
        graph.lint()
        function = create_function("program", graph)
    except (RuntimeError, ValueError, TypeError) as error:
        call = lowering.current
        where = f" at {call.name}" if call is not None else ""
        raise CompileError(
            f"TorchScript cannot take program {segment.program.identity}{where}: {str(error).splitlines()[0]}",
            source=str(call.source) if call is not None else None,
        ) from error
    return _Part(segment, function)


class ScriptComputation(Computation):
    """Compiled functions, run one after the other."""

    # PyTorch's own kernels run, on the specs of one program.
    repeats_layouts = True

    def __init__(self, parts: list[_Part], program: Program, symbols: tuple[int, ...] = ()) -> None:
        self.program = program
        self._parts = parts
        self._inputs = [i.number for i in program.inputs]
        self._outputs = program.outputs
        self._symbols = symbols
        # The calls that PyTorch runs, by part: those of this very program.
        self._direct = _direct_calls(parts, program)

    def bind(self, program: Program, symbols: tuple[int, ...]) -> ScriptComputation:
        """The same functions for another program: its sizes are arguments of theirs."""
        return ScriptComputation(self._parts, program, symbols)

    @property
    def functions(self) -> list[Any]:
        """The TorchScript functions, in order."""
        return [part.function for part in self._parts if part.function is not None]

    @property
    def direct_calls(self) -> list[Call]:
        """The calls that TorchScript lacks and that PyTorch's own kernels run in between."""
        return [part.segment.calls[0] for part in self._parts if part.function is None]

    def run(self, arguments: Arguments) -> Outcome:
        """Call the functions. A failure raises: which calls ran before it is not known."""
        values: dict[int, Any] = dict(zip(self._inputs, arguments.inputs, strict=True))
        # Without this the executor profiles the first runs and then specialises: pauses that the user would see. It is
        # a setting of this thread: functions that the user scripts are optimized as ever.
        with torch.jit.optimized_execution(False):
            for place, part in enumerate(self._parts):
                segment = part.segment
                if part.function is None:
                    made = _run_direct(self._direct[place], values, arguments)
                    values.update((number, made[number]) for number in segment.gives)
                    for number in segment.dead:
                        del values[number]
                    continue
                given = [values[n] for n in segment.kept]
                if segment.moved:
                    given.append(ScriptList([values.pop(n) for n in segment.moved]))
                given += [arguments.scalars[slot] for slot in segment.scalars]
                given += [self._symbols[place] for place in segment.symbols]
                if segment.random:
                    given.append(arguments.generator)
                for number in segment.dead:
                    values.pop(number, None)
                values.update(zip(segment.gives, part.function(*given), strict=True))
        return Outcome([values[n] for n in self._outputs])

    def to_string(self) -> str:
        """The graphs of the functions, and the calls between them as the program's listing has them."""
        texts = [self._part_text(part) for part in self._parts]
        if len(texts) == 1:
            return texts[0]
        return "".join(
            f"# part {position} of {len(texts)}: {_title(part)}\n{text}"
            for position, (part, text) in enumerate(zip(self._parts, texts, strict=True), 1)
        )

    @staticmethod
    def _part_text(part: _Part) -> str:
        if part.function is None:
            return instruction_text(part.segment.calls[0], {}) + "\n"
        # With the lines, whatever the process has set for the printing of graphs.
        return str(part.function.graph.str(True))


def _direct_calls(parts: list[_Part], program: Program) -> dict[int, Call]:
    found: dict[int, Call] = {}
    calls: list[Call] | None = None
    for place, part in enumerate(parts):
        if part.function is None:
            # As `compile` saw the program; this one may be another of its kind.
            calls = decompose_composites(program).calls if calls is None else calls
            [known] = part.segment.calls
            found[place] = call = calls[part.segment.start]
            if call.op is not known.op or call.numbers != known.numbers:
                raise CompileError(f"program {program.identity} is decomposed in another way")
    return found


def _run_direct(call: Call, values: dict[int, Any], arguments: Arguments) -> dict[int, Any]:
    made = run_call(call, values.__getitem__, arguments)
    if call.layout.copied is None:
        # The interpreter, which learns this, has not run the program before others of its kind were compiled.
        for item, number in zip(call.flat_returns, call.numbers, strict=True):
            spec = item.spec
            if item.kind is ReturnKind.FRESH and spec is not None and made[number].stride() != spec.stride:
                made[number] = laid_out(made[number], spec)
    return made


def _title(part: _Part) -> str:
    if part.function is None:
        return "a call that TorchScript lacks, run by PyTorch's own kernel"
    count = len(part.segment.calls)
    return f"a function of {count} call{'s' if count != 1 else ''}"
