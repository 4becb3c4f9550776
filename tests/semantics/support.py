"""What the semantics tests share: events of a block, a function on both devices, custom operators to look inside."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import torch_ltc
from torch_ltc import events

# Long enough for a loaded machine; a test that waits this long has failed.
LONG_S = 60.0
# How long a closed gate holds its operator back when nobody opens it.
GATE_S = 20.0
BACKENDS = ("interpreter", "torchscript")


@dataclass(slots=True)
class Seen:
    """The events of one block, by kind, in order."""

    syncs: list[events.SyncEvent] = field(default_factory=list)
    compiles: list[events.CompileEvent] = field(default_factory=list)
    runs: list[events.ExecuteEvent] = field(default_factory=list)
    fallbacks: list[events.FallbackEvent] = field(default_factory=list)
    reads: list[events.ReadEvent] = field(default_factory=list)
    prunes: list[events.PruneEvent] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Why each sync happened."""
        return [sync.reason.name for sync in self.syncs]


@contextmanager
def observe() -> Iterator[Seen]:
    """The events of the block, those of programs that it queued included and of earlier ones not."""
    torch_ltc.wait_device_ops()
    seen = Seen()
    pairs: list[tuple[Callable[[Any], None], type]] = [
        (seen.syncs.append, events.SyncEvent),
        (seen.compiles.append, events.CompileEvent),
        (seen.runs.append, events.ExecuteEvent),
        (seen.fallbacks.append, events.FallbackEvent),
        (seen.reads.append, events.ReadEvent),
        (seen.prunes.append, events.PruneEvent),
    ]
    stops = [events.subscribe(listener, kind) for listener, kind in pairs]
    try:
        yield seen
        torch_ltc.wait_device_ops()
    finally:
        for stop in stops:
            stop()


def lazy(*values: Tensor) -> Any:
    """Copies of CPU tensors on the device; one tensor for one argument."""
    moved = tuple(value.detach().to("ltc") for value in values)
    return moved[0] if len(moved) == 1 else moved


def assert_same(actual: Any, expected: Any, *, exact: bool = True) -> None:
    """Values, dtypes, sizes and strides agree; bit for bit unless `exact` is off."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    left, right = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        if isinstance(theirs, Tensor):
            assert isinstance(ours, Tensor)
            assert ours.stride() == theirs.stride(), (ours.size(), ours.stride(), theirs.size(), theirs.stride())
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), equal_nan=True, **tolerance)
        else:
            assert ours == theirs


def assert_like_eager(function: Callable[[str], Any], *, exact: bool = True, seed: int = 0) -> None:
    """`function(device)` gives on the device what it gives on CPU, from the same seed."""
    torch.manual_seed(seed)
    expected = function("cpu")
    torch.manual_seed(seed)
    assert_same(function("ltc"), expected, exact=exact)


def repeat(function: Callable[[], Any], times: int = 3) -> list[Any]:
    """What the function gives each time: the first time interpreted, from the second on compiled by the backend."""
    return [function() for _ in range(times)]


class Probe:
    """State behind the custom operators: how often they ran, and a gate that can hold one back."""

    def __init__(self) -> None:
        self.runs = 0
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def reset(self) -> None:
        """Count from zero, the gate open."""
        self.runs = 0
        self.entered.clear()
        self.gate.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """The operator `torch_ltc_tests::gated` waits until the block ends, or until `gate` is set."""
        self.entered.clear()
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


probe = Probe()


@torch.library.custom_op("torch_ltc_tests::counted", mutates_args=(), device_types="cpu")
def counted(tensor: Tensor) -> Tensor:
    """Adds one, and counts that it ran."""
    probe.runs += 1
    return tensor + 1


@counted.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


@torch.library.custom_op("torch_ltc_tests::gated", mutates_args=(), device_types="cpu")
def gated(tensor: Tensor) -> Tensor:
    """Adds one when the gate is open."""
    probe.entered.set()
    assert probe.gate.wait(GATE_S), "whoever should have opened the gate waits for this operator"
    return tensor + 1


@gated.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


@torch.library.custom_op("torch_ltc_tests::no_meta", mutates_args=(), device_types="cpu")
def no_meta(tensor: Tensor) -> Tensor:
    """Doubles; has no fake kernel, so that it cannot be recorded."""
    return tensor * 2


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)` on threads of their own; raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(LONG_S)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


@contextmanager
def threads_of_runs() -> Iterator[list[int]]:
    """The threads that programs of the block ran on."""
    found: list[int] = []
    stop = events.subscribe(lambda event: found.append(threading.get_ident()), events.ExecuteEvent)
    try:
        yield found
    finally:
        torch_ltc.wait_device_ops()
        stop()


def run_script(source: str, timeout_s: float = 5 * LONG_S, options: Sequence[str] = ()) -> str:
    """What a script prints, run in a process of its own; fails when the process does, also by a signal."""
    command = [sys.executable, *options, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def parameters_of(module: torch.nn.Module) -> Sequence[Tensor]:
    """The module's parameters, on CPU."""
    return [parameter.detach().cpu() for parameter in module.parameters()]


def train_in_process(index: int, model: torch.nn.Module, x: torch.Tensor, path: str) -> None:
    """In a process of its own: one backward pass, whose loss and gradients go to a file."""
    loss = model(x).sum()
    loss.backward()
    gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    torch.save([index, str(x.device), loss.item(), gradients], path)


modes_of_the_thread = pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.device("ltc"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        torch.no_grad,
    ],
    ids=["default device", "autocast", "inference", "no_grad"],
)
"""With the modes that a thread may be in when a program runs on it."""
