"""The ways to run PyTorch that are compared: how each is opened, where its tensors live, what ends a step.

Owns everything that differs between systems; workloads and workers treat them alike. A system is opened in a process
of its own, because the lazy devices change PyTorch for the whole process. What only one of them needs is imported when
it is opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Function = TypeVar("Function", bound=Callable[..., Any])

# Steps that have to look alike before a system counts as warmed up.
STEADY_STEPS = 3


class UnavailableError(Exception):
    """The system cannot run here; the message says why."""


class System:
    """Eager PyTorch on CPU, and what the others change of it."""

    device = "cpu"
    # Whether recording and running are apart, so that there is a record time.
    records = False
    # Whether it compiles the optimizer by itself: such a system differs from its sibling only where there is one.
    needs_optimizer = False

    def __init__(self) -> None:
        # Seconds that the host spent waiting for results, inside a step or after it.
        self.waited_s = 0.0

    def compile_loss(self, loss: Function) -> Function:
        """The function from batch to loss as this system wants to call it."""
        return loss

    def compile_update(self, update: Function) -> Function:
        """The optimizer's step as this system wants to call it."""
        return update

    def compile_step(self, step: Function) -> Function:
        """The whole step, a function of its batch, as this system wants to call it."""
        return step

    def sync(self) -> None:
        """End a step."""

    def read(self, tensor: Tensor) -> float:
        """The value of a tensor with one element."""
        return float(tensor.item())

    def choose(self, tensor: Tensor) -> bool:
        """A decision of the program that depends on data."""
        return bool(tensor)

    def compiles(self) -> int:
        """Programs or graphs compiled since the process began."""
        return 0

    def refusals(self) -> list[str]:
        """Why the backend could not compile or run a program, for each that runs in the interpreter instead."""
        return []

    def remarks(self) -> list[str]:
        """What a reader of the figures should know, as that nothing was replayed."""
        return []

    def compile_intervals(self) -> list[tuple[float, float]]:
        """Begin and end of every compile on the clock `time.perf_counter`, where the system tells."""
        return []

    def is_compiling(self) -> bool:
        """Whether something is being compiled now, beside the steps."""
        return False

    def steady(self) -> bool:
        """Whether the last step ran as all later ones will, as far as the system can tell."""
        return True

    def step_began(self) -> None:
        """Told before every step."""

    def timing_begins(self) -> None:
        """Told before steps are timed: nobody but the benchmark would listen to what it listens to."""

    def timing_ends(self) -> None:
        """Told afterwards."""

    def count_operations(self, step: Callable[[], object]) -> int | None:
        """Operations of one step, which is run once for it; None where the system has no such thing."""
        with _Count() as count:
            step()
        return count.calls


class _Count(TorchDispatchMode):
    """Counts the operations that reach PyTorch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Original(System):
    """PyTorch's own Lazy Tensor Core with its TorchScript backend."""

    device = "lazy"
    records = True

    def __init__(self, reuse_ir: bool = False) -> None:
        super().__init__()
        importlib.import_module("torch._lazy.ts_backend").init()
        self._mark_step = importlib.import_module("torch._lazy").mark_step
        self._metrics = importlib.import_module("torch._lazy.metrics")
        if reuse_ir:
            importlib.import_module("torch._lazy.config").set_reuse_ir(True)

    def sync(self) -> None:
        """Run what was recorded; it waits by itself."""
        self._mark_step()

    def choose(self, tensor: Tensor) -> bool:
        """Wait for a decision."""
        began = time.perf_counter()
        decision = bool(tensor)
        self.waited_s += time.perf_counter() - began
        return decision

    def compiles(self) -> int:
        """Graphs that were not in its cache."""
        return int(self._metrics.counter_value("UncachedCompile") or 0)

    def count_operations(self, step: Callable[[], object]) -> int | None:
        """Operations recorded, and operations that ran eagerly."""
        before = self._operations()
        step()
        return self._operations() - before

    def _operations(self) -> int:
        names = [name for name in self._metrics.counter_names() if name.startswith(("lazy::", "aten::"))]
        return sum(int(self._metrics.counter_value(name) or 0) for name in names)


class HandCaptured(System):
    """Eager PyTorch whose whole step is captured by hand as a CUDA graph, after some eager steps.

    Where there is no GPU every step runs eagerly, which tries the code around the graph.
    """

    EAGER_STEPS = 4

    def compile_step(self, step: Function) -> Function:
        """The first calls run on a side stream, as capture wants it; later ones copy the batch and replay."""
        if self.device != "cuda":
            return step
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        calls = 0
        inputs: tuple[Any, ...] = ()
        result: Any = None

        def captured(*batch: Any) -> Any:
            nonlocal calls, inputs, result
            calls += 1
            if calls <= self.EAGER_STEPS:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    made = step(*batch)
                torch.cuda.current_stream().wait_stream(stream)
                return made
            if calls == self.EAGER_STEPS + 1:
                inputs = tuple(tensor.clone() for tensor in batch)
                with torch.cuda.graph(graph, stream=stream):
                    result = step(*inputs)
            for target, tensor in zip(inputs, batch, strict=True):
                target.copy_(tensor)
            graph.replay()
            return result

        return captured  # type: ignore[return-value]

    def count_operations(self, step: Callable[[], object]) -> int | None:
        """One launch: there is nothing to count."""
        del step
        return None


class Compiled(System):
    """torch.compile with Inductor: forward, loss and backward; the optimizer's step too if asked for."""

    def __init__(self, optimizer: bool = False, mode: str | None = None) -> None:
        super().__init__()
        self._mode = mode
        self.needs_optimizer = optimizer
        self._counters = importlib.import_module("torch._dynamo.utils").counters

    def compile_loss(self, loss: Function) -> Function:
        """Compiled on its first call."""
        return torch.compile(loss, mode=self._mode)  # type: ignore[return-value]

    def step_began(self) -> None:
        """Results of the last step may be overwritten."""
        if self._mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()

    def compile_update(self, update: Function) -> Function:
        """Compiled on its first call, or as it is."""
        return torch.compile(update) if self.needs_optimizer else update  # type: ignore[return-value]

    def compiles(self) -> int:
        """Graphs that Dynamo handed over; a graph that is trained is compiled as two."""
        return int(self._counters["stats"]["unique_graphs"])

    def count_operations(self, step: Callable[[], object]) -> int | None:
        """Kernels are fused: there is nothing to count."""
        del step
        return None


class Ltc(System):
    """torch_ltc with one of its backends: recorded, and captured where the device has graphs; or jit of the step."""

    device = "ltc"

    def __init__(self, backend: str, *, capture: bool = True, jit: bool = False) -> None:
        super().__init__()
        self._ltc = importlib.import_module("torch_ltc")
        self._backend = backend
        self._ltc.use_backend(backend)
        if not capture:
            self._ltc.config.settings.cuda_graphs = "off"
        self._jit = jit
        self.records = not jit
        self._replayed: Any = None
        self._captures = 0
        self._not_captured: dict[int, str] = {}
        # Programs whose forms were measured, and what was found.
        self._chosen: dict[int, str] = {}
        events = self._ltc.events
        self._compiles: list[tuple[float, float]] = []
        self._runs: deque[tuple[int, str]] = deque(maxlen=100_000)
        self._refused: dict[int, str] = {}
        # Programs of one call, which are left to the interpreter.
        self._single: set[int] = set()
        self._instructions = 0
        self._compiles_before = 0
        events.subscribe(self._on_compile, events.CompileEvent)
        events.subscribe(self._on_refusal, events.RefusalEvent)
        events.subscribe(self._on_capture, events.CaptureEvent)
        events.subscribe(self._on_choice, events.ChoiceEvent)
        self._stops: list[Callable[[], None]] = []
        self._listen()

    def _listen(self) -> None:
        """To what comes at every step."""
        events = self._ltc.events
        self._stops = [
            events.subscribe(lambda event: self._runs.append((event.program, event.backend)), events.ExecuteEvent),
            events.subscribe(self._on_sync, events.SyncEvent),
            events.subscribe(self._on_read, events.ReadEvent),
        ]

    def timing_begins(self) -> None:
        """What a replayed step tells is not needed while it is timed: there is no record time."""
        if self._jit:
            for stop in self._stops:
                stop()

    def timing_ends(self) -> None:
        """Listen again."""
        if self._jit:
            self._listen()

    def compile_step(self, step: Function) -> Function:
        """Recorded each time, or replayed."""
        if not self._jit:
            return step
        self._replayed = self._ltc.jit(step)
        return self._replayed  # type: ignore[no-any-return]

    def sync(self) -> None:
        """Queue what was recorded."""
        if not self._jit:
            self._ltc.sync()

    def compiles(self) -> int:
        """Programs that the backend compiled."""
        return len(self._compiles)

    def remarks(self) -> list[str]:
        """Steps that were not replayed, programs that were not captured."""
        found = [f"not captured: {reason}" for reason in self._not_captured.values()]
        found += self._chosen.values()
        explained = self._replayed.explain() if self._replayed is not None else ""
        if "not replayed" in explained or " 0 replayed" in explained:
            found += explained.splitlines()
        return found

    def refusals(self) -> list[str]:
        """As the refusal events tell."""
        return list(self._refused.values())

    def compile_intervals(self) -> list[tuple[float, float]]:
        """As the compile events tell."""
        return list(self._compiles)

    def is_compiling(self) -> bool:
        """As the device says; its first line is about what is done."""
        return len(self._ltc.debug.compilations().splitlines()) > 1

    def step_began(self) -> None:
        """Forget which programs ran before."""
        self._runs.clear()
        self._compiles_before = len(self._compiles) + self._captures

    def steady(self) -> bool:
        """Whether the backend ran every program of the last step, but for those that it cannot or need not compile."""
        if len(self._compiles) + self._captures != self._compiles_before:
            return False
        spared = self._single.union(self._refused)
        if self._backend == "auto":
            return all(program in self._chosen or program in spared for program, _ in list(self._runs))
        return all(backend == self._backend or program in spared for program, backend in list(self._runs))

    def count_operations(self, step: Callable[[], object]) -> int | None:
        """Instructions of the programs of a step."""
        before = self._instructions
        step()
        return self._instructions - before

    def _on_compile(self, event: Any) -> None:
        now = time.perf_counter()
        self._compiles.append((now - event.duration_s, now))

    def _on_refusal(self, event: Any) -> None:
        self._refused[event.program] = event.reason

    def _on_capture(self, event: Any) -> None:
        self._captures += 1
        if event.refusal:
            self._not_captured[event.program] = event.refusal
        else:
            self._not_captured.pop(event.program, None)

    def _on_choice(self, event: Any) -> None:
        timings = ", ".join(f"{name} {took_s * 1e3:.3g} ms" for name, took_s in event.timings)
        self._chosen[event.program] = f"program {event.program} runs on {event.kept}: {timings}"

    def _on_sync(self, event: Any) -> None:
        self._instructions += event.instructions
        if event.instructions - event.inputs <= 1:
            self._single.add(event.program)

    def _on_read(self, event: Any) -> None:
        self.waited_s += event.duration_s


class TorchXla(System):
    """torch_xla on CPU: its lazy device, compiled by XLA."""

    device = "xla"
    records = True

    def __init__(self) -> None:
        super().__init__()
        self._xla = _import("torch_xla")
        self._model = _import("torch_xla.core.xla_model")
        self._metrics = _import("torch_xla.debug.metrics")

    def sync(self) -> None:
        """Run what was recorded. `sync(wait=True)` does not wait for the device, `wait_device_ops` does."""
        self._xla.sync()
        self._model.wait_device_ops()

    def choose(self, tensor: Tensor) -> bool:
        """Wait for a decision."""
        began = time.perf_counter()
        decision = bool(tensor)
        self.waited_s += time.perf_counter() - began
        return decision

    def compiles(self) -> int:
        """Graphs that XLA compiled."""
        return int(self._metrics.counter_value("UncachedCompile") or 0)

    def count_operations(self, step: Callable[[], object]) -> int | None:
        """Not counted."""
        del step
        return None


class Torchax(System):
    """torchax: PyTorch's operations one by one on JAX."""

    device = "jax"

    def __init__(self) -> None:
        super().__init__()
        _import("torchax").enable_globally()

    def count_operations(self, step: Callable[[], object]) -> int | None:
        """Not counted."""
        del step
        return None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        # Packages built for another PyTorch fail in many ways, not only with ImportError.
        raise UnavailableError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


SYSTEMS: dict[str, Callable[[], System]] = {
    "eager": System,
    "eager-graph": HandCaptured,
    "original": Original,
    "original-reuse": lambda: Original(reuse_ir=True),
    "compile": Compiled,
    "compile-optimizer": lambda: Compiled(optimizer=True),
    "compile-reduce-overhead": lambda: Compiled(mode="reduce-overhead"),
    "compile-max-autotune": lambda: Compiled(mode="max-autotune-no-cudagraphs"),
    "ltc": lambda: Ltc("auto"),
    "ltc-recorded": lambda: Ltc("torchscript", capture=False),
    "ltc-interpreter": lambda: Ltc("interpreter"),
    "ltc-torchscript": lambda: Ltc("torchscript"),
    "ltc-inductor": lambda: Ltc("inductor"),
    "ltc-jit": lambda: Ltc("interpreter", jit=True),
    "ltc-jit-inductor": lambda: Ltc("inductor", jit=True),
    "ltc-jit-torchscript": lambda: Ltc("torchscript", jit=True),
    "torch_xla": TorchXla,
    "torchax": Torchax,
}

_PACKAGES = {"torch_xla": "torch_xla", "torchax": "torchax"}


def missing_package(name: str) -> str | None:
    """Why a system cannot run with this Python, found without opening it; None when nothing speaks against it."""
    package = _PACKAGES.get(name)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"the package {package} is not installed"


def open_system(name: str, physical: str = "cpu") -> System:
    """Set the system up in this process; raises UnavailableError where its packages are missing.

    `physical` is the device that computes in the end. torch_ltc is told by the environment (LTC_TS_CUDA).
    """
    system = SYSTEMS[name]()
    if system.device == "cpu":
        system.device = physical
    return system
