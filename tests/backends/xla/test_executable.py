"""Compiled programs: layouts, memory that is reused or kept apart, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.backends.xla.rules import functional
from torch_ltc import events
from torch_ltc.backends.xla import executable
from torch_ltc.backends.xla.data import JaxData
from torch_ltc.backends.xla.executable import Executable
from torch_ltc.config import settings
from torch_ltc.errors import CompileError, ExecutionError
from torch_ltc.lowering.backend_data import BackendData
from torch_ltc.program.spec import make_spec


def tensors(results: list[JaxData]) -> list[Tensor]:
    return [result.tensor() for result in results]


def test_results_lie_in_memory_as_recorded() -> None:
    x = torch.arange(6.0).view(2, 3)
    run = Executable(functional(lambda x: x.t() * 2, x))
    [result] = tensors(run(x))
    assert result.stride() == (1, 3)
    assert torch.equal(result, x.t() * 2)


def test_no_two_results_share_memory() -> None:
    x = torch.arange(4.0)
    program = functional(lambda x: [x + 1, (x + 1).view(2, 2), x.clone(), x.clone()], x)
    results = Executable(program)(x)
    pointers = {each.array.unsafe_buffer_pointer() for each in results}
    assert len(pointers) == 4
    assert x.data_ptr() not in pointers


def test_text_is_xlas_own() -> None:
    text = Executable(functional(lambda x: x.sin(), torch.ones(3))).text()
    assert "stablehlo.sine" in text


def update(weight: Tensor, gradient: Tensor) -> list[Tensor]:
    weight.sub_(gradient, alpha=0.5)
    return []


def test_an_update_takes_the_memory_of_an_array_that_nobody_shares() -> None:
    program = functional(update, torch.ones(64), torch.ones(64))
    run = Executable(program)
    [held] = run(torch.ones(64), torch.ones(64))
    before = held.array.unsafe_buffer_pointer()
    [again] = run(held, torch.ones(64))
    assert again is held
    assert held.array.unsafe_buffer_pointer() == before
    assert held.tensor().unique().tolist() == [0.0]


def test_an_update_leaves_an_array_alone_that_a_tensor_shares() -> None:
    program = functional(update, torch.ones(64), torch.ones(64))
    run = Executable(program)
    [held] = run(torch.ones(64), torch.ones(64))
    view = held.tensor()
    [again] = run(held, torch.ones(64))
    assert again is not held
    assert view.unique().tolist() == [0.5]
    assert again.tensor().unique().tolist() == [0.0]


def test_a_tensor_that_is_updated_is_not_written() -> None:
    program = functional(update, torch.ones(64), torch.ones(64))
    weight = torch.ones(64)
    [new] = Executable(program)(weight, torch.ones(64))
    assert weight.unique().tolist() == [1.0]
    assert new.tensor().unique().tolist() == [0.5]


def test_an_update_of_another_size_is_refused() -> None:
    program = functional(update, torch.ones(4), torch.ones(4))
    weight, gradient = program.inputs
    larger = replace(weight, spec=make_spec(torch.float32, (8,), (1,)))
    with pytest.raises(CompileError, match=r"writes float32\[4\] where float32\[8\] is"):
        Executable(replace(program, instructions=(larger, gradient, *program.calls)))


def lookup_and_update(table: Tensor, places: Tensor) -> Tensor:
    rows = table[places]
    table.add_(1)
    return rows


def test_a_failing_run_leaves_reused_memory_as_it_was() -> None:
    program = functional(lookup_and_update, torch.ones(3, 2), torch.tensor([0, 1]))
    run = Executable(program)
    held = run(torch.ones(3, 2), torch.tensor([0, 2]))[-1]
    assert not held.shared
    with pytest.raises(IndexError, match="out of range"):
        run(held, torch.tensor([0, 3]))
    assert held.tensor().unique().tolist() == [2.0]


def test_handles_of_other_backends_are_taken() -> None:
    run = Executable(functional(lambda x: x * 2, torch.ones(3)))
    [result] = tensors(run(BackendData.from_tensor(torch.tensor([1.0, 2.0, 3.0]))))
    assert result.tolist() == [2.0, 4.0, 6.0]


def test_the_users_own_jax_keeps_its_precision() -> None:
    run = Executable(functional(lambda x: x * 2, torch.ones(3, dtype=torch.float64)))
    [result] = run(torch.ones(3, dtype=torch.float64))
    assert result.tensor().dtype is torch.float64
    assert jnp.ones(3).dtype == jnp.float32


def test_half_precision_is_rounded_after_every_call() -> None:
    def rounded(x: Tensor) -> Tensor:
        return ((x / 4 - 1).sigmoid() * x).add_(x, alpha=0.5).to(torch.float32)

    x = torch.linspace(0.1, 9.0, 64).to(torch.bfloat16)
    [result] = tensors(Executable(functional(rounded, x))(x))
    assert torch.equal(result, rounded(x))


# ---- on the device


@pytest.fixture
def on_xla() -> Iterator[None]:
    failure = settings.backend_failure
    settings.backend_failure = "error"
    with torch_ltc.use_backend("xla"):
        yield
        torch_ltc.sync(wait=True)
    settings.backend_failure = failure


@pytest.mark.usefixtures("on_xla")
class TestOnTheDevice:
    def test_an_index_out_of_range_is_eagers_error_at_the_users_line(self) -> None:
        table = torch.arange(8.0).view(4, 2).to("ltc")
        for place in (1, 2, 3):
            rows = table[torch.tensor([place], device="ltc")] * 2
            torch_ltc.sync(wait=True)
            assert rows.tolist() == [[place * 4.0, place * 4.0 + 2]]
        rows = table[torch.tensor([9], device="ltc")] * 2
        with pytest.raises(ExecutionError, match=r"index 9 is out of bounds.*(?s:.*)test_executable\.py"):
            torch_ltc.sync(wait=True)
        assert table.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]

    def test_an_integer_divided_by_zero_is_eagers_error(self) -> None:
        x = torch.tensor([6, 7], device="ltc")
        for divisor in (2, 3):
            assert (x // torch.tensor([divisor, 1], device="ltc")).tolist() == [6 // divisor, 7]
        quotient = x // torch.tensor([0, 1], device="ltc")
        with pytest.raises(ExecutionError, match="ZeroDivisionError"):
            quotient.tolist()

    @pytest.mark.parametrize("name", ["inv", "cholesky", "lu_factor"])
    def test_a_singular_matrix_is_eagers_error(self, name: str) -> None:
        function = getattr(torch.linalg, name)
        for matrix in (torch.eye(3), 2 * torch.eye(3), 3 * torch.eye(3)):
            result = function(matrix.to("ltc"))
            torch_ltc.sync(wait=True)
        result = function(torch.zeros(3, 3).to("ltc"))
        with pytest.raises(ExecutionError, match=f"linalg.{name}"):
            torch_ltc.sync(wait=True)
        del result

    def test_data_stays_in_arrays_between_steps(self) -> None:
        seen: list[int] = []
        original = Executable.__call__

        def call(self: Executable, *given: object) -> list[JaxData]:
            seen.append(sum(isinstance(each, JaxData) for each in given))
            return original(self, *given)

        weight = torch.ones(8, device="ltc")
        executable.Executable.__call__ = call  # type: ignore[method-assign]
        try:
            for _ in range(5):
                weight.mul_(0.5)
                torch_ltc.sync(wait=True)
        finally:
            executable.Executable.__call__ = original  # type: ignore[method-assign]
        assert seen[1:] == [1] * len(seen[1:])
        assert len(seen) >= 3
        assert weight.tolist() == [0.5**5] * 8

    def test_a_tensor_that_was_read_is_updated_without_touching_what_was_read(self) -> None:
        weight = torch.ones(4, device="ltc")
        read = []
        for _ in range(5):
            weight.add_(1)
            torch_ltc.sync()
            read.append(weight.cpu())
        assert [each.tolist() for each in read] == [[n + 2.0] * 4 for n in range(5)]

    def test_an_operator_without_a_rule_is_named_with_its_line(self) -> None:
        x = torch.ones(4, device="ltc")
        made = []
        with pytest.raises(torch_ltc.errors.UnsupportedCallError, match=r"hash_tensor(?s:.*)test_executable\.py"):
            for _ in range(3):
                made.append(torch.hash_tensor(x + 1))
                torch_ltc.sync(wait=True)

    def test_an_operator_without_a_rule_runs_with_pytorchs_kernel_when_allowed(self) -> None:
        settings.backend_failure = "warn"
        x = torch.tensor([1.0, 2.0])
        runs: list[str] = []
        stop = events.subscribe(lambda event: runs.append(event.backend), events.ExecuteEvent)
        with pytest.warns(torch_ltc.errors.BackendWarning, match="hash_tensor"):
            for _ in range(3):
                result = torch.hash_tensor(x.to("ltc") + 1).view(torch.int64) + 1
                torch_ltc.sync(wait=True)
        stop()
        assert runs[-1] == "xla"
        assert result.item() == (torch.hash_tensor(x + 1).view(torch.int64) + 1).item()
