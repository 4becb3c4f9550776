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
from torch_ltc.config import settings
from torch_ltc.errors import ExecutionError, PoisonedTensorError
from torch_ltc.execute.executor import executor
from torch_ltc.execute.pending import pending_program
from torch_ltc.lowering.interface import Arguments, Outcome
from torch_ltc.lowering.registry import registry
from torch_ltc.program.spec import spec_of

PROGRAMS = all_programs()
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


class Kept(list[ScriptComputation]):
    """Computations that were made, and results of theirs that lie in memory in another way than was recorded."""

    misplaced: list[str]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """The computations that the backend makes during the test."""
    kept = Kept()
    kept.misplaced = []
    original_compile, original_run = TorchScriptBackend.compile, ScriptComputation.run

    def compile_and_keep(self: TorchScriptBackend, *given: Any) -> Any:
        computation = original_compile(self, *given)
        assert isinstance(computation, ScriptComputation)
        kept.append(computation)
        return computation

    def run_and_look(self: ScriptComputation, arguments: Arguments) -> Outcome:
        outcome = original_run(self, arguments)
        for result, expected in zip(outcome.results, self.result_shape, strict=True):
            assert isinstance(result, Tensor)
            if spec_of(result) is not expected:
                kept.misplaced.append(f"{spec_of(result)} where {expected} was recorded")
        return outcome

    monkeypatch.setattr(TorchScriptBackend, "compile", compile_and_keep)
    monkeypatch.setattr(ScriptComputation, "run", run_and_look)
    return kept


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
def test_compiled_program_gives_the_bits_of_eager(name: str, compiled: Kept) -> None:
    program = PROGRAMS[name]
    torch.manual_seed(0)
    expected = program("cpu")
    for number in range(3):
        torch.manual_seed(0)
        with observe() as seen:
            result = program("ltc")
            # Also where a read would not need it: views of inputs.
            torch_ltc.sync()
            assert_same(result, expected)
        used = {run.backend for run in seen.runs}
        assert used == ({"interpreter"} if number == 0 else {"torchscript"})
        assert {event.backend for event in seen.compiles} == ({"torchscript"} if number == 1 else set())
    assert compiled.misplaced == []
    direct = {call.name for computation in compiled for call in computation.direct_calls}
    assert direct == ({"aten::view.dtype"} if name in WITH_DIRECT_CALLS else set())


@torch.library.custom_op("torch_ltc_tests_script::doubled", mutates_args=(), device_types="cpu")
def doubled(tensor: Tensor) -> Tensor:
    """Doubles, row by row in memory."""
    return tensor.contiguous() * 2


@doubled.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.size()[::-1]).t()


def test_result_that_lies_in_memory_in_another_way_than_promised_is_laid_out_as_promised(compiled: Kept) -> None:
    for _ in range(3):
        result = doubled(lazy(torch.arange(6.0).view(2, 3)) + 1)
        flat = result.as_strided((6,), (1,))
        assert result.stride() == (1, 2)
        assert flat.tolist() == [2.0, 8.0, 4.0, 10.0, 6.0, 12.0]
    assert len(compiled) == 1
    assert compiled.misplaced == []


# ---- the user's lines in the graph --------------------------------------------------------------------------------

STEP = """\
def step(x):
    hidden = x * 2.5
    hidden.t().add_(1)
    bits = hidden.view(torch.int32)
    first, second = bits.split([1, 2])
    x.mul_(True)
    return first.random_().sum()
"""

STEP_TEXT = """\
# part 1 of 3: a function of 3 calls
graph(%p0 : Tensor,
      %s0 : float,
      %s1 : int):
  %v1 : Tensor = aten::mul(%p0, %s0) # step.py:2:4
  %v2 : Tensor = aten::t(%v1) # step.py:3:4
  %5 : int = prim::Constant[value=1]() # step.py:3:4
  %6 : Tensor = aten::add_(%v2, %s1, %5) # step.py:3:4
  %7 : (Tensor) = prim::TupleConstruct(%v1)
  return (%7)
# part 2 of 3: a call that TorchScript lacks, run by PyTorch's own kernel
%3: int32[3,2] view = aten::view.dtype(%1, torch.int32)  # step.py:4 step
# part 3 of 3: a function of 4 calls
graph(%p0 : Tensor,
      %moved : Tensor[],
      %s2 : Scalar,
      %generator : Generator):
  %v3 : Tensor = prim::ListUnpack(%moved) # step.py:5:4
   = aten::clear(%moved) # step.py:5:4
  %5 : int[] = prim::Constant[value=[1, 2]]() # step.py:5:4
  %6 : int = prim::Constant[value=0]() # step.py:5:4
  %7 : Tensor[] = aten::split_with_sizes(%v3, %5, %6) # step.py:5:4
  %v4 : Tensor, %v5 : Tensor = prim::ListUnpack(%7) # step.py:5:4
  %10 : Tensor = aten::mul_(%p0, %s2) # step.py:6:4
  %11 : Tensor = aten::random_(%v4, %generator) # step.py:7:4
  %12 : int? = prim::Constant() # step.py:7:4
  %v6 : Tensor = aten::sum(%v4, %12) # step.py:7:4
  %14 : (Tensor) = prim::TupleConstruct(%v6)
  return (%14)
"""


@pytest.fixture
def step() -> Iterator[Callable[[Tensor], Tensor]]:
    """The function above, in a file of its own that can be read."""
    linecache.cache["step.py"] = (len(STEP), None, STEP.splitlines(keepends=True), "step.py")
    yield run_named(STEP, "step.py", torch=torch)["step"]
    del linecache.cache["step.py"]


def test_text_names_inputs_parts_lines_and_direct_calls(step: Callable[[Tensor], Tensor]) -> None:
    total = step(lazy(torch.ones(3, 2)))
    assert torch_ltc.debug.dump_ir([total], "backend") == STEP_TEXT


def test_text_does_not_depend_on_how_the_process_prints_graphs(step: Callable[[Tensor], Tensor]) -> None:
    total = step(lazy(torch.ones(3, 2)))
    computation = recorded(total)
    text = computation.to_string()
    torch._C.Graph.set_global_print_source_ranges(False)
    try:
        assert computation.to_string() == recorded(total).to_string() == text
        assert registry.get("torchscript").get_computation_backend_text(computation) == text
    finally:
        torch._C.Graph.set_global_print_source_ranges(True)


def test_every_node_has_the_users_line(step: Callable[[Tensor], Tensor]) -> None:
    computation = recorded(step(lazy(torch.ones(3, 2))))
    seen = set()
    for function in computation.functions:
        for node in function.graph.nodes():
            if node.kind() != "prim::TupleConstruct":
                [file, text, _mark, *_rest] = node.sourceRange().splitlines()
                line = int(file.removeprefix('  File "step.py", line '))
                assert text == STEP.splitlines()[line - 1]
                seen.add(line)
    assert seen == {2, 3, 5, 6, 7}


def test_calls_of_backward_have_the_line_that_called_backward() -> None:
    x = lazy(torch.ones(2)).requires_grad_()
    loss = x.exp().sum()
    loss.backward()
    line = line_number() - 1
    assert x.grad is not None
    text = recorded(x.grad).to_string()
    [node] = [node for node in text.splitlines() if "aten::expand" in node]
    assert node.endswith(f"# {__file__}:{line}:4")


def test_torchscripts_own_error_shows_the_users_line() -> None:
    rows = F.embedding(lazy(torch.tensor([1])), lazy(torch.ones(3, 2)))  # this line
    [function] = recorded(rows).functions
    with torch.jit.optimized_execution(False), pytest.raises(RuntimeError) as caught:
        function(torch.ones(3, 2), torch.tensor([9]))
    assert f'File "{__file__}", line {line_number() - 4}, in program' in str(caught.value)
    assert "lazy(torch.ones(3, 2)))  # this line" in str(caught.value)


# ---- failures -----------------------------------------------------------------------------------------------------

FAILING: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "embedding": ("aten::embedding", lambda bad: F.embedding(bad * 9, torch.ones(3, 2, device="ltc"))),
    "gather": ("aten::gather", lambda bad: torch.ones(3, device="ltc").gather(0, bad * 9)),
    "division": ("aten::floor_divide", lambda bad: torch.ones(1, dtype=torch.int64, device="ltc") // (1 - bad)),
}


@pytest.mark.parametrize("name", FAILING)
def test_failing_call_of_a_compiled_program_is_named_with_the_line_that_recorded_it(name: str) -> None:
    op, call = FAILING[name]
    for bad in (0, 0, 0, 1, 0):
        flag = lazy(torch.tensor([bad]))
        torch_ltc.sync(wait=True)
        with observe() as seen:
            before = flag + 1
            result = call(flag)
            after = before * 2
            if bad:
                with pytest.raises(ExecutionError) as caught:
                    torch_ltc.sync(wait=True)
                assert caught.value.op == op
                line = inspect.getsourcelines(call)[1]
                assert f"{__file__}:{line} in " in str(caught.value)
                with pytest.raises(PoisonedTensorError):
                    result.cpu()
            assert after.tolist() == [2 * (bad + 1)]
    assert [(run.backend, run.failed) for run in seen.runs][:1] == [("torchscript", False)]


LAYOUTS = ("one function", "several functions", "direct call")


def train(backend: str) -> tuple[list[object], torch.Tensor]:
    """Steps that draw, update in place and look up, the fourth with an index that is out of range: all that is seen."""
    collected: list[object] = []
    with settings.scope(backend=backend):
        torch.manual_seed(0)
        weight, rows = lazy(torch.ones(4), torch.arange(6.0).view(3, 2))
        for index in (0, 1, 2, 8, 1):
            where = lazy(torch.tensor([index]))
            torch_ltc.sync(wait=True)
            weight.add_(torch.randn(4, device="ltc"))
            weight[:2].mul_(2)
            kept = weight * 2
            found = F.embedding(where, rows)  # fails here
            noise = torch.rand(2, device="ltc")
            weight.mul_(0.5)
            rows[0].add_(found[0])
            later = found + noise
            try:
                torch_ltc.sync(wait=True)
                collected += [found.tolist(), later.tolist()]
            except ExecutionError as error:
                collected.append(str(error))
                for lost in (found, later):
                    with pytest.raises(PoisonedTensorError):
                        lost.cpu()
            collected += [weight.tolist(), rows.tolist(), kept.tolist(), noise.tolist()]
    return collected, torch.ltc.get_rng_state()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_failing_compiled_program_leaves_what_the_interpreter_leaves(
    layout: str, compiled: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "several functions":
        monkeypatch.setattr(segments, "SEGMENT_CALLS", 2)
    if layout == "direct call":
        is_recorded = graph._is_recorded_overload
        refuse = lambda call, schema: call.name != "aten::embedding" and is_recorded(call, schema)  # noqa: E731
        monkeypatch.setattr(graph, "_is_recorded_overload", refuse)
        monkeypatch.setattr(registry.get("torchscript"), "_lacking", set())
    expected, state = train("interpreter")
    assert not compiled
    with observe() as seen:
        actual, state_now = train("torchscript")
    assert actual == expected
    assert torch.equal(state_now, state)
    [message] = [item for item in expected if isinstance(item, str)]
    assert "aten::embedding failed when its program ran: index out of range in self" in message
    source, first = inspect.getsourcelines(train)
    [failing] = [number for number, text in enumerate(source, first) if text.endswith("# fails here\n")]
    assert f"{__file__}:{failing} in train" in message
    steps = [(run.backend, run.failed) for run in seen.runs if run.program == seen.runs[0].program]
    assert steps == [("torchscript", failed) for failed in (False, False, False, True, False)]
    shape = (len(compiled[0].functions), [call.name for call in compiled[0].direct_calls])
    assert (
        shape
        == {"one function": (1, []), "several functions": (7, []), "direct call": (2, ["aten::embedding"])}[layout]
    )


def test_random_numbers_of_a_failing_compiled_program_are_drawn_once() -> None:
    values, _ = train("torchscript")
    torch.manual_seed(0)
    expected = []
    for _ in range(5):
        torch.randn(4)
        expected.append(torch.rand(2).tolist())
    assert [item for item in values if item in expected] == expected


# ---- the graph executor -------------------------------------------------------------------------------------------

optimizing: list[bool] = []


def scripted() -> Any:
    """A function of the user's own."""

    def double_and_one(x: Tensor) -> Tensor:
        return x * 2 + 1

    return torch.jit.script(double_and_one)


@torch.library.custom_op("torch_ltc_tests_script::looks", mutates_args=(), device_types="cpu")
def looks(tensor: Tensor) -> Tensor:
    """Adds one, and notes whether TorchScript would optimize on this thread."""
    optimizing.append(torch._C._get_graph_executor_optimize())
    return tensor + 1


@looks.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def test_programs_are_neither_profiled_nor_specialised(compiled: Kept) -> None:
    optimizing.clear()
    for _ in range(6):
        assert (looks(lazy(torch.ones(2)) * 2) * 3).tolist() == [9.0, 9.0]
    # The first time in the interpreter.
    assert optimizing == [True, *[False] * 5]
    [computation] = compiled
    [function] = computation.functions
    assert "prim::profile" not in str(function.graph)
    with pytest.raises(RuntimeError, match="optimized_plan_"):
        # Asks for the plan that profiling leads to: there is none.
        function.get_debug_state()
    assert executor.call(torch._C._get_graph_executor_optimize)


@pytest.mark.parametrize("optimized", [True, False])
def test_the_users_own_functions_are_optimized_as_the_user_says_while_programs_run(optimized: bool) -> None:
    def program() -> Tensor:
        return gated(lazy(torch.ones(2)) * 2) + 1

    for _ in range(2):
        assert program().tolist() == [4.0, 4.0]
    own = scripted()
    with torch.jit.optimized_execution(optimized):
        with probe.closed():
            result = program()
            torch_ltc.sync()
            assert probe.entered.wait(LONG_S)
            assert torch._C._get_graph_executor_optimize() == optimized
            for _ in range(3):
                assert own(torch.ones(2)).tolist() == [3.0, 3.0]
        assert result.tolist() == [4.0, 4.0]
        assert torch._C._get_graph_executor_optimize() == optimized
    if optimized:
        assert own.get_debug_state().execution_plans
    else:
        with pytest.raises(RuntimeError, match="optimized_plan_"):
            own.get_debug_state()


def test_programs_run_while_another_thread_scripts_functions() -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def script() -> None:
        try:
            while not stop.is_set():
                scripted()(torch.ones(2))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=script, daemon=True)
    thread.start()
    try:
        for size in range(1, 30):
            x = lazy(torch.ones(size))
            for number in range(3):
                made = run_named("y = x * 2 + 1", f"cell{size}.py", x=x)["y"]
                assert made.sum().item() == 3.0 * size, number
    finally:
        stop.set()
        thread.join(LONG_S)
    assert errors == []


def test_values_between_parts_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_CALLS", 4)
    parts = [torch.ones(1 << 20, device="ltc") * number for number in range(8)]
    total = parts[0] * 2
    for part in parts[1:]:
        total = total + part.sin() * part
    program = pending_program([total])
    computation = TorchScriptBackend().compile(program)
    moved = [part.segment.moved for part in computation._parts]
    assert sum(map(len, moved)) > 8
    assert ["aten::clear" in str(function.graph) for function in computation.functions] == [bool(m) for m in moved]
    expected = sum(((torch.ones(1 << 20) * n).sin() * (torch.ones(1 << 20) * n) for n in range(1, 8)), torch.zeros(1))
    torch.testing.assert_close(total.cpu(), expected)
