"""The interface between the runtime and a backend.

The least a backend needs is a name and `compile(program)`, which returns a function. Everything else has a default
that works on PyTorch tensors: devices, data handles, random numbers, memory figures, text.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from torch_ltc import metrics
from torch_ltc.config import settings
from torch_ltc.errors import BackendError, CompileError, LtcError
from torch_ltc.lowering.backend_data import BackendData, BackendDevice, BackendDeviceType, common_device
from torch_ltc.program.effects import may_fail
from torch_ltc.program.instruction import Call, Input, Program
from torch_ltc.program.spec import Spec
from torch_ltc.program.text import program_text
from torch_ltc.pytorch.private import OpOverload
from torch_ltc.source import Source

__all__ = [
    "Arguments",
    "Backend",
    "BackendData",
    "BackendDevice",
    "BackendDeviceType",
    "Computation",
    "Form",
    "LoweringContext",
    "Outcome",
    "ProgramFunction",
]

ProgramFunction = Callable[..., Sequence[Any]]
Held = torch.Tensor | BackendData | LtcError


class Form(enum.Enum):
    """The form in which a backend wants its programs.

    The function that `compile` returns takes, by position, and returns:

    - RECORDED: the input tensors, the run-time numbers, and the generator if `program.random`; returns the outputs.
      Writes to inputs happen in place.
    - FUNCTIONAL: the input tensors, and the `program.numbers` as tensors without dimensions; returns `program.results`,
      that is the outputs and then the new value of each input that the program updates.
    """

    RECORDED = "as recorded: views, in-place calls, run-time numbers, random calls"
    FUNCTIONAL = "functionalized and decomposed: pure calls on tensors, no random calls"


class Arguments:
    """The arguments of a run: what stands for each program input, the run-time numbers, the random generator and the
    device.

    `held` has a tensor, a handle of some backend, or the error that lost it, for each input. `replaceable` says that
    an input which the program updates may be given other memory, in `Outcome.replaced`.
    """

    __slots__ = ("held", "scalars", "generator", "device", "sources", "replaceable", "numbers", "_plain", "_inputs")

    def __init__(
        self,
        held: Sequence[Held],
        scalars: Sequence[object],
        generator: torch.Generator,
        device: torch.device,
        sources: Mapping[int, Source] | None = None,
        replaceable: bool = False,
        plain: bool = False,
    ) -> None:
        self.held = held
        self.scalars = scalars
        self.generator = generator
        self.device = device
        # Where calls that may fail were recorded this time, by the identity of the call.
        self.sources: Mapping[int, Source] = {} if sources is None else sources
        self.replaceable = replaceable
        # Tensors for the run-time numbers that compiled code takes, by value number; None: made at each run.
        self.numbers: Mapping[int, torch.Tensor] | None = None
        self._plain = plain
        # When plain, the very list: most inputs of most programs are.
        self._inputs: list[torch.Tensor | LtcError] | None = held if plain else None  # type: ignore[assignment]

    @property
    def plain(self) -> bool:
        """True when every input is a PyTorch tensor: no handle, and none lost."""
        return self._plain or all(isinstance(held, torch.Tensor) for held in self.held)

    @property
    def lost(self) -> bool:
        """True when an input was lost."""
        return not self._plain and any(isinstance(held, LtcError) for held in self.held)

    def make_writable(self, positions: Sequence[int]) -> dict[int, torch.Tensor | BackendData]:
        """Before a run that writes in place: tensors instead of handles at these positions. They replace what stands
        for the inputs outside."""
        made: dict[int, torch.Tensor | BackendData] = {}
        if self._plain:
            return made
        held = list(self.held)
        for position in positions:
            item = held[position]
            if isinstance(item, BackendData):
                # A copy: what the handle gives may be memory that other handles share.
                spec = item.spec
                base = torch.empty(spec.extent(), dtype=spec.dtype, device=self.device)
                tensor = base.as_strided(spec.size, spec.stride, spec.offset).copy_(item.tensor())
                held[position] = made[position] = tensor
        if made:
            self.held, self._inputs = held, None
        return made

    def tensor(self, position: int) -> torch.Tensor | LtcError:
        """A PyTorch tensor, or the error that lost it, for one input."""
        held = self.held[position]
        return held.tensor() if isinstance(held, BackendData) else held

    @property
    def inputs(self) -> list[torch.Tensor | LtcError]:
        """A PyTorch tensor, or the error that lost it, per input."""
        if self._inputs is None:
            self._inputs = [item.tensor() if isinstance(item, BackendData) else item for item in self.held]
        return self._inputs


@dataclass(slots=True)
class Outcome:
    """The results of a run: data, or the error that lost it, per output; the errors of the calls that failed, each to
    be raised once; and new data for inputs, by position, instead of a write in place."""

    results: list[Held]
    failures: list[LtcError] = field(default_factory=list)
    replaced: dict[int, torch.Tensor | BackendData] = field(default_factory=dict)


class Computation(abc.ABC):
    """A program made ready to run."""

    program: Program
    # Positions of the inputs that must be saved before a run, because a failing call may come after they were written
    # to. None: as the order of the recorded program says.
    restored: tuple[int, ...] | None = None
    # True if a run that raises has left its inputs as they were.
    keeps_inputs: bool = False
    # True if it takes handles as they are, and says in `Outcome.replaced` what becomes of the inputs that it updates.
    takes_handles: bool = False
    # True if `run` itself compares its results with what was recorded, and lays them out so.
    checks_results: bool = False
    # True if its results have the same dtypes, sizes and strides at every run: they are checked until a run needed no
    # correction, and it is `settled`.
    repeats_layouts: bool = False
    settled: bool = False

    @abc.abstractmethod
    def run(self, arguments: Arguments) -> Outcome:
        """Run once. On the executor's thread."""

    def resume(self, index: int, values: list[Any], arguments: Arguments, error: Exception | None = None) -> Outcome:
        """Run the calls from this one on, with the values of those before it; the first has failed already if there is
        an error. The reference computation alone can do that."""
        raise NotImplementedError(f"{type(self).__name__} runs whole programs only")

    def accepts(self, numbers: Sequence[object]) -> bool:
        """True when it computes what PyTorch's kernels do with these run-time numbers."""
        del numbers
        return True

    def bind(self, program: Program, symbols: tuple[int, ...]) -> Computation:
        """A computation for another program that was compiled with this one, with these values of the symbols."""
        raise NotImplementedError(f"{type(self).__name__} runs one program only")

    @property
    def functions(self) -> list[Any]:
        """The parts of it that the backend's `dump` and `load` are asked for: by default all of it. What is around them
        must be something that can be pickled."""
        return [self]

    def to_string(self) -> str:
        """The backend's own text for the program."""
        return program_text(self.program)

    @property
    def parameters_size(self) -> int:
        """The number of tensors and numbers that the computation takes."""
        return len(self.program.inputs) + self.program.scalars

    @property
    def parameter_shapes(self) -> list[Spec]:
        """The spec of each input tensor."""
        return [instruction.spec for instruction in self.program.inputs]

    @property
    def parameter_names(self) -> list[str]:
        """A name for each tensor and number, as the text of the program has them."""
        named = [f"%{instruction.number}" for instruction in self.program.inputs]
        return named + [f"${slot}" for slot in range(self.program.scalars)]

    @property
    def result_shape(self) -> list[Spec]:
        """The spec of each output."""
        specs = self.program.specs()
        return [specs[number] for number in self.program.outputs]


class FunctionComputation(Computation):
    """A program as recorded, behind a plain function."""

    def __init__(self, program: Program, function: ProgramFunction, text: str = "") -> None:
        self.program = program
        self._function = function
        self._text = text

    def run(self, arguments: Arguments) -> Outcome:
        """Call the function on tensors, numbers, and the generator where the program draws random numbers."""
        given: list[Any] = [*arguments.inputs, *arguments.scalars]
        if self.program.random:
            given.append(arguments.generator)
        # Checked, and made a list, by the runtime.
        return Outcome(self._function(*given))  # type: ignore[arg-type]

    def to_string(self) -> str:
        """The text that came with the function, or the program's."""
        return self._text or program_text(self.program)


def refusal(backend: str, program: Program, error: Exception) -> CompileError:
    """The error to raise when a backend fails with one of its own: backend, operator and line named."""
    if isinstance(error, CompileError) and error.source:
        return error
    call = _call_in(error.__traceback__) or (program.calls[0] if program.calls else None)
    lines = str(error).strip().splitlines() or [""]
    where = f" at {call.name}" if call is not None else ""
    made = CompileError(
        f"{backend} cannot compile program {program.identity} of {len(program.calls)} calls{where}: "
        f"{type(error).__name__}: {lines[0]}",
        source=str(call.source) if call is not None else None,
        hint=error.hint if isinstance(error, LtcError) else None,
    )
    made.__cause__ = error
    return made


def _call_in(traceback: TracebackType | None) -> Call | None:
    """The call that the innermost frame which has one was looking at."""
    found: Call | None = None
    while traceback is not None:
        values: Any = traceback.tb_frame.f_locals.values()
        found = next((value for value in values if isinstance(value, Call)), found)
        traceback = traceback.tb_next
    return found


class LoweringContext:
    """Lowers one program for one device: holds what belongs to the lowering, and builds the computation."""

    def __init__(self, backend: Backend, name: str, device: BackendDevice, program: Program) -> None:
        self.backend = backend
        self.name = name
        self.device = device
        self.program = program

    @property
    def parameters(self) -> list[Input]:
        """The program's inputs."""
        return self.program.inputs

    @property
    def result_count(self) -> int:
        """The number of results that the computation will have."""
        return len(self.program.results)

    def build(self) -> ProgramFunction | Computation:
        """Compile the program."""
        return self.backend.compile(self.program)


class Backend(abc.ABC):
    """Turns programs into functions. Derive from it, give it a `name` and a `compile`."""

    # What `LTC_BACKEND`, `use_backend` and the registry know it by.
    name: str
    form: Form = Form.RECORDED
    # Whether the random numbers of a program that it compiles are those of eager for the same seed.
    eager_random: bool = True
    # True if a function that raises has left every input that it was given as it was: nothing is saved before it runs.
    keeps_inputs: bool = False
    # True if the results of a functional program's function have the same dtypes, sizes and strides at every run, and
    # share memory with each other and with inputs in the same way: they are checked until a run needed no correction.
    repeats_layouts: bool = False
    # True if the tensors that stand for run-time numbers lie on the program's device, else they lie on the host.
    numbers_on_device: bool = False
    # What the conformance suite holds it to: equal bits, or tolerances (relative, absolute) by dtype where they differ
    # from PyTorch's own; and what is known to be wrong, as "operator/dtype/what", with the reason.
    exact_values: bool = False
    tolerances: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType({})
    known_gaps: Mapping[str, str] = MappingProxyType({})
    # False for a backend whose results are not meant to be right.
    computes: bool = True
    # True if compiling takes seconds: it happens in another process, so that this one goes on undisturbed. What
    # `compile` returns must be something that `dump` can write, and the backend itself something that can be pickled.
    compiles_out_of_process: bool = False
    # True if it takes programs with `symbols`, which stand for many; see `Computation.bind`.
    symbolic_sizes: bool = False

    # ---- compiling and running

    @abc.abstractmethod
    def compile(self, program: Program) -> ProgramFunction | Computation:
        """A function that runs `program`; see `Form` for what it takes and returns.

        Raises `CompileError` when it cannot. May return a `Computation` of its own instead of a function.
        """

    def supports(self, call: Call) -> bool:
        """True when `compile` can take this call of a functional program; the others run with PyTorch's own kernels."""
        del call
        return True

    def may_fail(self, call: Call) -> bool:
        """True when a function that contains this call may raise because of the call's data."""
        return may_fail(call)

    def fails_midway(self, call: Call, specs: Mapping[int, Spec]) -> bool:
        """True when such a function may have overwritten some of the inputs that it updates by then: these are saved
        before each run, unless their new value depends on the call. `specs` are those of all values."""
        del specs
        return not self.keeps_inputs and self.may_fail(call)

    def decompositions(self) -> Mapping[OpOverload, Callable[..., Any]] | None:
        """Decompositions for the operators of a functional program; None for the core ATen set."""
        return None

    def compile_instances(
        self, contexts: Sequence[LoweringContext]
    ) -> list[ProgramFunction | Computation | CompileError]:
        """Compile several programs. Each gives a result or an error of its own."""
        built: list[ProgramFunction | Computation | CompileError] = []
        for context in contexts:
            try:
                built.append(context.build())
            except Exception as error:
                built.append(refusal(self.name, context.program, error))
        return built

    # ---- keeping what was compiled

    def dump(self, compiled: ProgramFunction | Computation) -> bytes | None:
        """Serialize what `compile` returned, or one of the `functions` of that, to bytes from which `load` makes it
        again in another process; None if that cannot be done: then nothing is kept on disk."""
        del compiled
        return None

    def load(self, program: Program, data: bytes) -> ProgramFunction | Computation:
        """Load what `dump` wrote; `program` is the recorded program that it belongs to. Any exception means that the
        data is corrupt or stale."""
        raise NotImplementedError(f"{self.name} cannot load what it compiled")

    def version(self) -> str:
        """Everything that must be as it was for bytes of `dump` to be right: versions, options, kind of processor."""
        return ""

    def execute_computation(
        self, computation: Computation, arguments: Sequence[BackendData], device: BackendDevice
    ) -> list[BackendData]:
        """Run on these handles: one per input, then one per run-time number. Raises the first failure."""
        if len(arguments) != computation.parameters_size:
            raise BackendError(f"the computation takes {computation.parameters_size} arguments, got {len(arguments)}")
        if arguments and common_device(list(arguments)) != device:
            raise BackendError(f"the arguments are not on {device}")
        count = len(computation.program.inputs)
        generator = torch.default_generator if device.type.name == "cpu" else None
        generator = generator or torch.cuda.default_generators[device.ordinal]
        numbers = [item.tensor().item() for item in arguments[count:]]
        outcome = computation.run(Arguments(list(arguments[:count]), numbers, generator, device.torch))
        if outcome.failures:
            raise outcome.failures[0]
        return [self._handle(result) for result in outcome.results]

    @staticmethod
    def _handle(result: Held) -> BackendData:
        if isinstance(result, LtcError):
            raise result
        return result if isinstance(result, BackendData) else BackendData.from_tensor(result)

    def create_lowering_context(self, name: str, device: BackendDevice, program: Program) -> LoweringContext:
        """A context that lowers `program` for `device`."""
        return LoweringContext(self, name, device, program)

    def get_ir_builder(self) -> Form:
        """The form of the programs that this backend lowers."""
        return self.form

    def get_computation_backend_text(self, computation: Computation) -> str:
        """The backend's own text for a computation."""
        return computation.to_string()

    # ---- data

    def make_computation_data_from_tensor(
        self, tensor: torch.Tensor, spec: Spec | None, device: BackendDevice
    ) -> BackendData:
        """A handle on a copy of `tensor` on the device, laid out as `spec` says, or as the tensor is."""
        pinned = tensor.device.type == "cpu" and device.type.name == "cuda" and tensor.is_pinned()
        target = device.torch
        if spec is None:
            copied = tensor.detach().to(target, copy=True, non_blocking=pinned or tensor.device.type == target.type)
        else:
            copied = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=target)
            copied.copy_(tensor.detach(), non_blocking=pinned)
        return BackendData.from_tensor(copied)

    def make_computation_data_from_scalar(
        self, value: bool | int | float | complex, dtype: torch.dtype, device: BackendDevice
    ) -> BackendData:
        """A handle on one number."""
        return BackendData.from_scalar(value, dtype, device)

    def make_tensor_from_computation_data(self, data: BackendData, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The data as a tensor, in this dtype if one is given."""
        tensor = data.tensor()
        return tensor if dtype is None else tensor.to(dtype)

    def create_data_placeholder(self, device: BackendDevice, spec: Spec) -> BackendData:
        """A handle that holds nothing yet."""
        return BackendData(device, spec, None)

    def get_computation_data_from_node(
        self, instruction: object, computation: Computation, arguments: Arguments
    ) -> Held | None:
        """The data behind an input instruction of the computation, or None for any other instruction."""
        for position, known in enumerate(computation.program.inputs):
            if known is instruction:
                return arguments.held[position]
        return None

    # ---- devices

    def get_backend_devices(self) -> list[BackendDevice]:
        """Every physical device that there is."""
        found = [BackendDevice()]
        if torch.cuda.is_available():
            found += [BackendDevice(BackendDeviceType("cuda"), i) for i in range(torch.cuda.device_count())]
        return found

    def get_backend_device(self, device: torch.device) -> BackendDevice:
        """The physical device of this name. Raises when it is not there."""
        wanted = BackendDevice.of(device)
        if wanted not in self.get_backend_devices():
            there = ", ".join(map(str, self.get_backend_devices()))
            raise BackendError(f"{self.name} has no device {wanted}", hint=f"there are: {there}")
        return wanted

    def get_compilation_devices(self, device: BackendDevice, devices: Sequence[BackendDevice]) -> list[BackendDevice]:
        """The devices that a program for `device` is compiled for."""
        return list(devices) or [device]

    def eager_fallback_device_type(self) -> str:
        """The kind of device on which calls run that are not recorded."""
        return self.get_default_device_type().name

    def get_default_device_type(self) -> BackendDeviceType:
        """The kind of device that programs run on."""
        return BackendDeviceType(settings.device_type)

    def set_default_device_type(self, type: BackendDeviceType) -> None:
        """Run programs on devices of this kind. Raises when there is none."""
        self.get_backend_device(torch.device(type.name))
        settings.device_type = type.name  # type: ignore[assignment]

    def get_default_device_ordinal(self) -> int:
        """The place of the device that programs run on among those of its kind."""
        return settings.device_ordinal

    def set_default_device_ordinal(self, ordinal: int) -> None:
        """Run programs on the device with this place. Raises when it is not there."""
        self.get_backend_device(torch.device(settings.device_type, ordinal))
        settings.device_ordinal = ordinal

    # ---- random numbers, figures, start and end

    def set_rng_seed(self, seed: int) -> None:
        """Seed the device's random numbers."""
        torch.get_device_module("ltc").manual_seed(seed)

    def create_metric_report(self) -> str:
        """The package's counters and timings as text."""
        return metrics.metrics_report()

    def get_metrics(self) -> dict[str, float]:
        """The package's counters by name."""
        return {name: float(metrics.counter_value(name) or 0) for name in metrics.counter_names()}

    def get_memory_info(self, device: BackendDevice) -> tuple[int, int]:
        """Bytes free and in all, of the device's memory."""
        if device.type.name == "cuda":
            return torch.cuda.mem_get_info(device.ordinal)
        free, total = torch.get_device_module("ltc").get_memory_info()
        return free, total

    def initialize_aten_bindings(self) -> None:
        """Called once, before the first program is compiled: import what is heavy, register what is needed."""
        return

    def prepare_to_exit(self) -> None:
        """Called at exit, after all queued work has run: give back what the backend holds."""
        return
