"""The reference backend, run by hand on recorded programs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from torch_ltc import events
from torch_ltc.backends.interpreter import InterpreterBackend, memory_roots
from torch_ltc.backends.torchscript import TorchScriptBackend
from torch_ltc.errors import ExecutionError, InferenceError, LtcError, PoisonedTensorError
from torch_ltc.execute.executor import executor
from torch_ltc.execute.pending import pending_program
from torch_ltc.lowering.interface import Arguments, Backend, Outcome
from torch_ltc.program.instruction import Program

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def record(function: Callable[..., object], *inputs: Tensor) -> Program:
    """The program that the function records on inputs of these shapes, and its numbers."""
    moved = [value.to("ltc") for value in inputs]
    torch_ltc.sync(wait=True)
    out = function(*moved)
    outputs = list(out) if isinstance(out, (tuple, list)) else [out]
    program = pending_program([value for value in outputs if isinstance(value, Tensor)])
    torch_ltc.sync(wait=True)
    return program


def run(backend: Backend, program: Program, *inputs: Tensor | LtcError, scalars: tuple[object, ...] = ()) -> Outcome:
    computation = backend.compile(program)
    return executor.call(lambda: computation.run(Arguments(inputs, scalars, torch.Generator().manual_seed(0), CPU)))


@pytest.fixture(params=[InterpreterBackend, TorchScriptBackend], ids=["interpreter", "torchscript"])
def either(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param()
    return backend


def test_program_runs_on_other_inputs_and_numbers(either: Backend) -> None:
    program = record(lambda x: (x * 2 + 1.5).t(), torch.zeros(2, 3))
    outcome = run(either, program, torch.arange(6.0).view(2, 3), scalars=(10, 0.5))
    assert outcome.failures == []
    (result,) = outcome.results
    assert torch.equal(result, (torch.arange(6.0).view(2, 3) * 10 + 0.5).t())


def test_in_place_calls_write_to_the_inputs(either: Backend) -> None:
    program = record(lambda x, y: (x[0].add_(y), x * 2)[1], torch.zeros(2, 2), torch.ones(2))
    x = torch.zeros(2, 2)
    outcome = run(either, program, x, torch.full((2,), 5.0), scalars=(2,))
    assert x.tolist() == [[5.0, 5.0], [0.0, 0.0]]
    assert outcome.results[0].tolist() == [[10.0, 10.0], [0.0, 0.0]]


def test_draws_come_from_the_generator_that_is_handed_in(either: Backend) -> None:
    program = record(lambda: torch.empty(4, device="ltc").normal_())
    outcome = run(either, program)
    assert torch.equal(outcome.results[0], torch.randn(4, generator=torch.Generator().manual_seed(0)))


def test_duplicate_and_unused_outputs(either: Backend) -> None:
    program = record(lambda x: (lambda y: (y, y, x))(x + 1), torch.zeros(2))
    outcome = run(either, program, torch.ones(2), scalars=(1,))
    assert [result.tolist() for result in outcome.results] == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0]]


def test_failing_call_loses_what_depends_on_it_and_nothing_else() -> None:
    program = record(
        lambda x, index: (x + 1, F.embedding(index, x), F.embedding(index, x).sum() + x, x * 3),
        torch.zeros(2, 2),
        torch.zeros(1, dtype=torch.int64),
    )
    outcome = run(InterpreterBackend(), program, torch.ones(2, 2), torch.tensor([7]), scalars=(1, 3))
    sound, lost, depends, also_sound = outcome.results
    assert torch.equal(sound, torch.full((2, 2), 2.0))
    assert torch.equal(also_sound, torch.full((2, 2), 3.0))
    assert isinstance(lost, ExecutionError)
    assert isinstance(depends, ExecutionError)
    assert len(outcome.failures) == 2
    assert outcome.failures[0].op == "aten::embedding"
    assert outcome.failures[0].input_shapes == ("float32[2,2]", "int64[1]")


def test_lost_inputs_lose_their_dependents_without_a_new_failure() -> None:
    program = record(lambda x, y: (x + 1, y + 1), torch.zeros(2), torch.zeros(2))
    lost = PoisonedTensorError("gone")
    outcome = run(InterpreterBackend(), program, lost, torch.zeros(2), scalars=(1, 1))
    assert outcome.results[0] is lost
    assert outcome.results[1].tolist() == [1.0, 1.0]
    assert outcome.failures == []


def test_torchscript_raises_instead() -> None:
    program = record(lambda x, i: F.embedding(i, x), torch.zeros(2, 2), torch.zeros(1, dtype=torch.int64))
    with pytest.raises((IndexError, RuntimeError)):
        run(TorchScriptBackend(), program, torch.ones(2, 2), torch.tensor([7]))


def test_values_are_freed_after_their_last_use() -> None:
    alive: list[int] = []
    references: list[weakref.ref[Tensor]] = []

    @torch.library.custom_op("torch_ltc_tests_unit::watched", mutates_args=(), device_types="cpu")
    def watched(x: Tensor) -> Tensor:
        out = x + 1
        references.append(weakref.ref(out))
        alive.append(sum(reference() is not None for reference in references))
        return out

    @watched.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def chain(x: Tensor) -> Tensor:
        for _ in range(10):
            x = watched(x)
        return x

    program = record(chain, torch.zeros(3))
    references.clear()
    alive.clear()
    outcome = run(InterpreterBackend(), program, torch.zeros(3))
    assert outcome.results[0].tolist() == [10.0] * 3
    assert max(alive) <= 3, "a chain holds what it works on, not what it has worked on"


def test_a_kernel_that_lays_its_result_out_otherwise_is_copied_into_the_recorded_layout() -> None:
    @torch.library.custom_op("torch_ltc_tests_unit::transposed", mutates_args=(), device_types="cpu")
    def transposed(x: Tensor) -> Tensor:
        return x.t().contiguous().t() * 2

    @transposed.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    seen: list[events.MismatchEvent] = []
    stop = events.subscribe(seen.append, events.MismatchEvent)
    try:
        for _ in range(4):
            x = torch.arange(6.0).view(2, 3).to("ltc")
            y = transposed(x)
            assert y.stride() == (3, 1)
            assert y.view(6).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
            assert y.cpu().stride() == (3, 1)
    finally:
        stop()
    assert [(event.op, event.inferred, event.actual) for event in seen] == [
        ("torch_ltc_tests_unit::transposed", "float32[2,3]", "float32[2,3] stride=(1,2)")
    ]


def test_a_kernel_of_another_size_than_promised_is_an_error() -> None:
    @torch.library.custom_op("torch_ltc_tests_unit::liar", mutates_args=(), device_types="cpu")
    def liar(x: Tensor) -> Tensor:
        return x.new_zeros(5)

    @liar.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    y = liar(torch.zeros(3).to("ltc"))
    with pytest.raises(InferenceError, match=r"returned float32\[5\] where float32\[3\] was recorded"):
        y.cpu()


def test_memory_roots_follow_views() -> None:
    program = record(lambda x: ((x + 1).view(6)[2:].t(), x.t()), torch.zeros(2, 3))
    roots = memory_roots(program)
    fresh = program.calls[0].numbers[0]
    assert roots[fresh] == fresh
    assert [roots[call.numbers[0]] for call in program.calls[1:4]] == [fresh] * 3
    assert roots[program.calls[4].numbers[0]] < 0, "the memory of an input comes from outside"


def test_text_of_the_interpreter_is_the_program() -> None:
    program = record(lambda x: x + 1, torch.zeros(2))
    assert "aten::add.Tensor" in InterpreterBackend().compile(program).to_string()
