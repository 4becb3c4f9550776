"""The backend itself: compiles the graph of a program with Inductor, and runs the code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from torch_ltc.backends.inductor.artifact import direct_call, dump, load
from torch_ltc.backends.inductor.graph import Built, build, example_inputs
from torch_ltc.backends.inductor.preconditions import (
    divides_by_zero,
    has_preconditions,
    indexes_unknown,
    is_checked,
)
from torch_ltc.backends.inductor.private import (
    InterpreterShim,
    compile_fx,
    compile_fx_inner,
    compile_lock,
    functorch_config,
    inductor_config,
    inductor_lowering,
    select_decomp_table,
)
from torch_ltc.backends.inductor.random_state import random_state_left_alone
from torch_ltc.backends.inductor.recomputation import NOTHING, Recomputed, recompute
from torch_ltc.errors import CompileError
from torch_ltc.lowering.backend_data import BackendData
from torch_ltc.lowering.decomposition_tables import list_operators, only_ours
from torch_ltc.lowering.flex_attention import BACKWARD, FORWARD
from torch_ltc.lowering.interface import Backend, Form
from torch_ltc.lowering.kernel_call import laid_out
from torch_ltc.lowering.serialize import dump_data, load_own_data
from torch_ltc.lowering.symbolic import SymbolicSizes
from torch_ltc.program.instruction import Call, Program, SymbolicShape
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.program.specialization import known_sizes
from torch_ltc.pytorch.private import FakeTensorMode, OpOverload

# Compiling with PyTorch's lock held keeps apart from a torch.compile on another thread. That thread may itself wait for
# the device, so that the lock is not waited for without end.
_LOCK_TIMEOUT_S = 120.0
# What a thread pool says when the main thread has ended. Work that is still queued then is compiled without threads.
_AT_EXIT = "cannot schedule new futures after"
_WRONG_DATA = "an index is out of range, or a division has no result, or something is no probability"
_COMPILER_MODULES = r"torch\._(inductor|functorch|dynamo|decomp|refs|prims_common)\b"
_PATCHES: dict[str, Any] = {
    # Strides of outputs are those that were recorded.
    "keep_output_stride": True,
    # Half precision is rounded after every call, as eager does; else a value and its cast to float32 differ.
    "emulate_precision_casts": True,
    # The function looks at the layout of its inputs itself, and corrects it.
    "size_asserts": False,
    # Random calls do not come here. If Inductor makes one of its own it draws as eager does.
    "fallback_random": True,
    # Recorded graphs of device calls would keep the memory of inputs, which other programs replace.
    "triton.cudagraphs": False,
}
# PyTorch's cache of what it wraps around compiled code would keep the code itself from us.
_OURS: dict[str, Any] = {"enable_autograd_cache": False}


class InductorBackend(Backend):
    """Compiles functional programs with Inductor."""

    name = "inductor"
    form = Form.FUNCTIONAL
    symbolic_sizes = True
    compiles_out_of_process = True
    repeats_layouts = True
    numbers_on_device = True

    def __init__(self) -> None:
        # Settings of `torch._inductor.config`, by name, that count for programs compiled from now on. Those that the
        # user's thread has set do not reach the thread that compiles.
        self.options: dict[str, Any] = {}
        # Whether training steps on the CPU compute some values again instead of keeping them.
        self.recomputes = True

    def initialize_aten_bindings(self) -> None:
        """Have Inductor make now, on the thread of whoever chose it, the one graph for which it uses PyTorch's symbolic
        tracer: while that works, every module that any thread calls ends up in it."""
        InterpreterShim._dummy_gm()

    def decompositions(self) -> Mapping[OpOverload, Callable[..., Any]]:
        """Next to none: Inductor decomposes operators itself."""
        return _COMPOSITE

    def supports(self, call: Call) -> bool:
        """Everything but calls whose data could end the process."""
        if call.op in (FORWARD, BACKWARD):
            return not super().may_fail(call)
        return not (divides_by_zero(call) or (indexes_unknown(call) and not _left_to_kernel(call.op)))

    def may_fail(self, call: Call) -> bool:
        """Also where the graph checks what kernels do not."""
        return has_preconditions(call) or super().may_fail(call)

    def fails_midway(self, call: Call, specs: Mapping[int, Spec]) -> bool:
        """Not where the graph checks all that the call demands of its data: then nothing is written. On a device that
        runs asynchronously, where nothing is checked, such a call does not raise."""
        return super().may_fail(call) and not is_checked(call, specs)

    def compile(self, program: Program) -> InductorFunction:
        """A function that runs code made by Inductor."""
        options = {**_PATCHES, **self.options}
        try:
            try:
                return self._compiled(program, options)
            except Exception as error:
                if _AT_EXIT not in str(error):
                    raise
                return self._compiled(program, {**options, "compile_threads": 1})
        except CompileError:
            raise
        except Exception as error:
            raise _refusal(program, error) from error

    def dump(self, compiled: object) -> bytes | None:
        """The machine code, and how to call it."""
        assert isinstance(compiled, InductorFunction)
        code = dump(compiled.graph)
        return None if code is None else dump_data((compiled.interface, code))

    def load(self, program: Program, data: bytes) -> InductorFunction:
        """Ready in milliseconds: nothing is compiled."""
        del program
        interface, code = load_own_data(data, InductorBackend)
        return InductorFunction(interface, *load(code))

    def version(self) -> str:
        """The processor, and the options."""
        portable = inductor_config.save_config_portable()
        options = {**_PATCHES, **self.options}
        switches = f"numbers on device, recomputes: {self.recomputes}"
        return f"{torch.backends.cpu.get_cpu_capability()} {options} {sorted(portable.items())} {switches}"

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "recomputes": self.recomputes}

    def _compiled(self, program: Program, options: Mapping[str, Any]) -> InductorFunction:
        recomputes = self.recomputes and program.device.type == "cpu"
        if not any(call.op is FORWARD for call in program.calls):
            return _compiled(program, options, recomputes, by_kernel=False)
        try:
            return _compiled(program, options, recomputes, by_kernel=True)
        except Exception:
            # Each version of its kernel for attention has sizes and functions that it does not take.
            return _compiled(program, options, recomputes, by_kernel=False)


def _compiled(program: Program, options: Mapping[str, Any], recomputes: bool, by_kernel: bool) -> InductorFunction:
    built = build(program, by_kernel)
    readable = built.module.code
    codes: list[Any] = []

    recomputed = NOTHING

    def inner_compile(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal recomputed
        if recomputes:
            recomputed = recompute(module)
        codes.append(compile_fx_inner(module, *args, **kwargs))
        return codes[-1]

    with (
        _compiler_lock(),
        _quiet(),
        random_state_left_alone(),
        torch.no_grad(),
        inductor_config.patch(dict(options)),
        functorch_config.patch(_OURS),
    ):
        # An environment for symbols of sizes also where there are none: without one Inductor uses none of its caches.
        symbolic = SymbolicSizes(program.symbols)
        with FakeTensorMode(shape_env=symbolic.env):
            examples = example_inputs(program, symbolic)
        compiled: Any = compile_fx(built.module, examples, inner_compile=inner_compile)
    source = str(getattr(codes[-1], "source_code", "")) if codes else ""
    graph = codes[0] if len(codes) == 1 else None
    direct = direct_call(graph)
    run = direct or (lambda given: compiled(*given))
    interface = Interface.of(program, built, symbolic.guards(), recomputed)
    return InductorFunction(interface, run, source or readable, graph)


class _Composite(Mapping[OpOverload, Callable[..., Any]]):
    """A table that decomposes no operator, not even those that PyTorch would decompose by itself, but for the few that
    PyTorch has nothing for, and operators on lists that Inductor would leave to a kernel: their results would lie in
    memory of their own, and be copied to the inputs that they update."""

    def __getitem__(self, op: OpOverload) -> Callable[..., Any]:
        return only_ours().get(op) or _fused_list(op) or _not_decomposed

    def __iter__(self) -> Iterator[OpOverload]:
        return iter(only_ours())

    def __len__(self) -> int:
        return len(only_ours())


def _not_decomposed(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


@cache
def _fused_list(op: OpOverload) -> Callable[..., Any] | None:
    """A form of an operator on lists that Inductor fuses, where it leaves the operator itself to a kernel."""
    slow = list_operators().get(op)
    if slow is None or not _left_to_kernel(op):
        return None
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::"))
    single = getattr(packet, "Scalar", None)
    if op._overloadname != "ScalarList" or single is None or _left_to_kernel(single):
        return slow

    def run(*args: Any) -> Any:
        *lists, scalars = args
        # As text, in which 0.0 is not -0.0.
        same = len(set(map(repr, scalars))) == 1
        return single(*lists, scalars[0]) if same else slow(*args)

    return run


_COMPOSITE = _Composite()


@dataclass(frozen=True, slots=True)
class Interface:
    """The calling convention of compiled code: where a program's inputs and results are among its own."""

    specs: tuple[Spec, ...]
    strides: tuple[tuple[int, ...], ...]
    updated: frozenset[int]
    # Where each result is: a place among what the code returns, or -1, -2 ... for an input.
    results: tuple[int, ...]
    # True if the last thing that the code returns says that the data was wrong.
    checked: bool
    # Names of the symbols, whose values the code takes last, the conditions on them, and the shapes of the inputs
    # that depend on them, by position.
    symbols: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    shapes: tuple[tuple[int, SymbolicShape], ...] = ()
    recomputed: Recomputed = NOTHING

    @classmethod
    def of(
        cls, program: Program, built: Built, guards: tuple[str, ...] = (), recomputed: Recomputed = NOTHING
    ) -> Interface:
        """That of a program and the graph that was made of it."""
        specs = tuple([i.spec for i in program.inputs] + [i.spec for i in program.numbers])
        updated = frozenset(update.input for update in program.updates)
        strides = tuple(spec.stride for spec in specs)
        names = tuple(symbol.name for symbol in program.symbols)
        known = program.symbolic_shapes
        shapes = tuple((n, known[i.number]) for n, i in enumerate(program.inputs) if i.number in known)
        return cls(specs, strides, updated, _places(program, built), built.checked, names, guards, shapes, recomputed)

    def with_symbols(self, symbols: Mapping[str, int]) -> Interface:
        """The same for a program in which the symbols are these."""
        specs = list(self.specs)
        for position, shape in self.shapes:
            old = specs[position]
            size, stride = known_sizes(shape.size, symbols), known_sizes(shape.stride, symbols)
            [offset] = known_sizes((shape.offset,), symbols)
            specs[position] = make_spec(old.dtype, size, stride, offset, old.conj, old.neg)
        return replace(self, specs=tuple(specs), strides=tuple(spec.stride for spec in specs))


class InductorFunction:
    """Runs a compiled program."""

    def __init__(
        self, interface: Interface, run: Callable[[list[Any]], Sequence[Any]], text: str, graph: object = None
    ) -> None:
        self.interface = interface
        # What Inductor returned, if the code can be had from it. It must live as long as the code.
        self.graph = graph
        self._run = run
        self._strides = list(interface.strides)
        self._results = interface.results
        self._checked = interface.checked
        self._text = text
        self._symbols: tuple[int, ...] = ()

    @property
    def guards(self) -> tuple[str, ...]:
        """Conditions on the symbols under which the code is right."""
        return self.interface.guards

    @property
    def remark(self) -> str:
        """What is computed again, and what memory that saves."""
        return self.interface.recomputed.text

    def bind(self, symbols: Mapping[str, int]) -> InductorFunction:
        """The same code for a program in which the symbols are these."""
        bound = InductorFunction(self.interface.with_symbols(symbols), self._run, self._text, self.graph)
        bound._symbols = tuple([symbols[name] for name in self.interface.symbols])
        return bound

    def __call__(self, *given: Any) -> list[Any]:
        """Run once. Inputs that the program updates are written to, unless it raises because of their data."""
        tensors = list(given)
        if not self._lie_as_expected(given):
            for position, (held, stride) in enumerate(zip(given, self._strides, strict=True)):
                if isinstance(held, BackendData) or held.stride() != stride:
                    tensors[position] = self._own(position, held)
        returned = self._run([*tensors, *self._symbols])
        if self._checked and returned[-1].item():
            raise IndexError(_WRONG_DATA)
        return [returned[place] if place >= 0 else tensors[-1 - place] for place in self._results]

    def _lie_as_expected(self, given: Sequence[Any]) -> bool:
        try:
            return list(map(torch.Tensor.stride, given)) == self._strides
        except TypeError:
            # A handle of another backend.
            return False

    def _own(self, position: int, held: torch.Tensor | BackendData) -> torch.Tensor:
        """Data as the code expects it, though another backend holds it or it lies in memory in another way. What the
        program writes to is a copy."""
        tensor = held.tensor() if isinstance(held, BackendData) else held
        if position in self.interface.updated or tensor.stride() != self._strides[position]:
            tensor = laid_out(tensor, self.interface.specs[position])
        return tensor

    def text(self) -> str:
        """The code that Inductor made."""
        return self._text


def _places(program: Program, built: Built) -> tuple[int, ...]:
    place_of = {number: place for place, number in enumerate(built.returned)}
    inputs = {instruction.number: position for position, instruction in enumerate(program.inputs)}
    places = [place_of[number] if number in place_of else -1 - inputs[number] for number in program.outputs]
    return (*places, *(-1 - update.input for update in program.updates))


def _left_to_kernel(op: OpOverload) -> bool:
    """True for an operator that Inductor leaves to PyTorch's kernel."""
    if op in select_decomp_table():
        return False
    return op in inductor_lowering.fallbacks or op not in inductor_lowering.lowerings


@contextmanager
def _compiler_lock() -> Iterator[None]:
    acquired = compile_lock.acquire(timeout=_LOCK_TIMEOUT_S)
    try:
        yield
    finally:
        if acquired:
            compile_lock.release()


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of the compiler about itself: the user wrote nothing that they speak of."""
    warnings.filterwarnings("ignore", module=_COMPILER_MODULES)
    try:
        yield
    finally:
        # One entry is taken out: `catch_warnings` would put the whole list back, and undo what other threads changed.
        for entry in warnings.filters:
            if entry[0] == "ignore" and getattr(entry[3], "pattern", None) == _COMPILER_MODULES:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]
                break


def _refusal(program: Program, error: Exception) -> CompileError:
    """Inductor's error with the call that it is about, if it names one."""
    text = str(error)
    call = next((call for call in program.calls if f"target: {call.op}" in text), None)
    where = f" at {call.name}" if call is not None else ""
    hint = "install a C++ compiler, g++ or clang" if "InvalidCxxCompiler" in text else None
    lines = text.strip().splitlines() or [""]
    return CompileError(
        f"inductor cannot compile program {program.identity} of {len(program.calls)} calls{where}: "
        f"{type(error).__name__}: {lines[0]}",
        source=str(call.source) if call is not None else None,
        hint=hint,
    )
