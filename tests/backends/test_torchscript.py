"""The TorchScript backend as a user meets it: bits of eager, the user's lines, failures, no warm-up."""

from __future__ import annotations

import inspect
import linecache
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from tests.backends.torchscript_programs import all_programs
from tests.semantics.support import LONG_S, assert_same, gated, lazy, observe, probe
from torch_ltc.backends.torchscript import ScriptComputation, TorchScriptBackend, graph, segments
from torch_ltc.backends.torchscript.lines import Lines
from torch_ltc.config import settings
from torch_ltc.errors import ExecutionError, PoisonedTensorError
from torch_ltc.lowering.registry import registry
from torch_ltc.program.source import Source
from torch_ltc.runtime.pending import pending_program

PROGRAMS = all_programs()
# Calls that TorchScript has no operator for, whatever their arguments; the first of these because its compiler takes a
# dtype for a size, the others because an `out` is a tensor like any other to it.
LACKING = {"aten::view.dtype", "aten::max.unary_out", "aten::min.unary_out", "aten::set.out"}
# The names of programs that use `view.dtype`.
WITH_DIRECT_CALLS = {"view: dtype", "view: smaller dtype", "view: written dtype"}


@pytest.fixture(autouse=True)
def on_torchscript() -> Iterator[None]:
    """Every test begins with nothing known, pending or failed, on this backend, and without eager calls."""
    torch_ltc.sync(wait=True)
    torch_ltc.ir_cache.reset()
    probe.reset()
    with settings.scope(backend="torchscript", fallback="error"):
        yield
        probe.reset()
        torch_ltc.sync(wait=True)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[ScriptComputation]:
    """The computations that the backend makes during the test."""
    made: list[ScriptComputation] = []
    original = TorchScriptBackend.compile

    def compile_and_keep(self: TorchScriptBackend, *given: Any) -> Any:
        computation = original(self, *given)
        assert isinstance(computation, ScriptComputation)
        made.append(computation)
        return computation

    monkeypatch.setattr(TorchScriptBackend, "compile", compile_and_keep)
    return made


def line_number() -> int:
    """The caller's line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def recorded(*tensors: Tensor) -> ScriptComputation:
    """The pending program with these outputs, compiled."""
    computation = TorchScriptBackend().compile(pending_program(tensors))
    assert isinstance(computation, ScriptComputation)
    return computation


def run_named(source: str, file: str, **names: Any) -> dict[str, Any]:
    """Run source text as if it were in `file`, and give its names."""
    exec(compile(source, file, "exec"), names)
    return names


# ---- what a program gives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_program_gives_the_bits_of_eager(name: str, compiled: list[ScriptComputation]) -> None:
    program = PROGRAMS[name]
    torch.manual_seed(0)
    expected = program("cpu")
    for number in range(3):
        torch.manual_seed(0)
        with observe() as seen:
            assert_same(program("ltc"), expected)
        used = {run.backend for run in seen.runs}
        assert used == ({"interpreter"} if number == 0 else {"torchscript"})
        assert {event.backend for event in seen.compiles} == ({"torchscript"} if number == 1 else set())
    direct = {call.name for computation in compiled for call in computation.direct_calls}
    assert direct == ({"aten::view.dtype"} if name in WITH_DIRECT_CALLS else set())
