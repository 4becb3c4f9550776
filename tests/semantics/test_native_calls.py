"""The interpreter runs the calls of a known program in C++, and they do what they did in Python."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import assert_same, lazy, observe, repeat
from torch_ltc.config import settings
from torch_ltc.errors import ExecutionError
from torch_ltc.lowering.native_calls import NativeCalls
from torch_ltc.native.library import extension

pytestmark = pytest.mark.skipif(extension is None, reason="the extension is not built")


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """Where each run of calls in C++ ended, and whether in an error; the backend is the interpreter."""
    seen: list[tuple[int, bool]] = []
    original = NativeCalls.run

    def run(self: NativeCalls, values: list[Any], arguments: Any, begin: int) -> tuple[int, Exception | None]:
        index, error = original(self, values, arguments, begin)
        seen.append((index, error is not None))
        return index, error

    monkeypatch.setattr(NativeCalls, "run", run)
    torch_ltc.ir_cache.reset()
    with settings.scope(backend="interpreter"):
        yield seen


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "lists of results": lambda x: [part * 2 for part in x.split(2)],
    "lists of tensors": lambda x: torch.cat([x, x + 1, x[:1]]),
    "lists with gaps": lambda x: x[:, torch.tensor([2, 0], device=x.device)],
    "several results": lambda x: torch.topk(x, 2).values + torch.var_mean(x, 0)[0].sum(),
    "views of views": lambda x: x.t()[1:].unsqueeze(0).transpose(1, 2) * 3,
    "writes through views": lambda x: (x.clone().narrow(0, 1, 2).fill_(7), x.clone().t().add_(1)),
    "out=": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "numbers of all kinds": lambda x: (x * 2, x + 0.5, x.pow(True), x.clamp(max=3), x.sum(dtype=torch.float64)),
    "random": lambda x: (torch.rand_like(x), torch.nn.functional.dropout(x, 0.5), torch.randperm(4, device=x.device)),
    "memory formats": lambda x: x.view(1, 2, 2, 3).contiguous(memory_format=torch.channels_last) + 1,
    "complex": lambda x: torch.view_as_real(torch.complex(x, x + 1).conj() * 2),
    "foreach": lambda x: torch._foreach_add([x, x * 2], [1.0, 2.0]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_eager(name: str, runs: list[tuple[int, bool]]) -> None:
    source = torch.arange(12.0).view(4, 3)
    x = lazy(source)
    torch.manual_seed(0)
    expected = repeat(lambda: PROGRAMS[name](source), 4)
    torch.manual_seed(0)
    for wanted in expected:
        assert_same(PROGRAMS[name](x), wanted)
    assert runs
    assert not any(failed for _, failed in runs)


def test_numbers_that_change_are_taken_from_the_call(runs: list[tuple[int, bool]]) -> None:
    x = lazy(torch.ones(3))
    for step in range(6):
        assert (x * (step + 0.5) + step).tolist() == [step + 0.5 + step] * 3
    assert runs


def test_a_call_that_fails_loses_what_depends_on_it_alone(runs: list[tuple[int, bool]]) -> None:
    table, good = lazy(torch.arange(4.0)), lazy(torch.tensor([1, 2]))
    bad = lazy(torch.tensor([1, 9]))

    def step(index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = table + 1
        picked = table.index_select(0, index)  # the line of the failure
        return before, picked * 2, table * 3

    for _ in range(3):
        results = step(good)
        torch_ltc.sync(wait=True)
    before, picked, after = step(bad)
    with pytest.raises(ExecutionError) as raised:
        torch_ltc.sync(wait=True)
    lines, first = inspect.getsourcelines(step)
    line = first + next(i for i, text in enumerate(lines) if "the line of the failure" in text)
    assert f"{__file__}:{line}" in str(raised.value)
    assert (before.tolist(), after.tolist()) == ([1.0, 2.0, 3.0, 4.0], [0.0, 3.0, 6.0, 9.0])
    with pytest.raises(ExecutionError):
        picked.tolist()
    assert runs[-1] == (1, True)
    assert [part.tolist() for part in step(good)] == [part.tolist() for part in results]


def test_errors_have_the_class_that_eager_raises() -> None:
    x, index = torch.zeros(3), torch.tensor([5])
    y, positions = lazy(x), lazy(torch.tensor([1]))
    for _ in range(3):
        (y + 1)[positions].tolist()
    with pytest.raises(IndexError):
        (x + 1)[index].tolist()
    with pytest.raises(IndexError):
        (y + 1)[lazy(index)].tolist()


def test_a_call_of_another_library_runs_between_others(runs: list[tuple[int, bool]]) -> None:
    x = lazy(torch.ones(2))

    def step() -> list[float]:
        y = torch.ops.torch_ltc_tests.counted(x + 1)
        return (y * 2).tolist()

    for _ in range(3):
        assert step() == [6.0, 6.0]
    assert [index for index, _ in runs[-2:]] == [1, 3]


def test_warnings_of_kernels_have_the_line_of_their_call(runs: list[tuple[int, bool]]) -> None:
    x = lazy(torch.ones(2, 3))
    target = lazy(torch.empty(5))

    def step(out: Tensor) -> None:
        torch.add(x, 1, out=out)  # resizes, and warns
        torch_ltc.sync(wait=True)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            step(lazy(torch.empty(5)))
    del target
    lines, first = inspect.getsourcelines(step)
    line = first + next(i for i, text in enumerate(lines) if "resizes" in text)
    found = [(item.filename, item.lineno) for item in seen if "was resized" in str(item.message)]
    assert found
    assert set(found) == {(__file__, line)}
    assert runs


def test_slice_assignments_are_recorded_and_known_again() -> None:
    def fill(device: str) -> Tensor:
        x, row = torch.zeros(20, 8, device=device), torch.ones(3, 8, device=device)
        for k in range(15):
            x[k : k + 3] = float(k)
            x[2, 3:7] = row[0, :4]
            x.index_copy_(0, torch.tensor([1, 3, 5], device=device), row)
        return x

    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            with observe() as seen:
                results = repeat(lambda: fill("ltc").cpu(), 3)
            assert_same(results, repeat(lambda: fill("cpu"), 3))
        finally:
            torch.use_deterministic_algorithms(False)
        assert not seen.fallbacks
        # One program, whose calls are a constant number for each assignment.
        assert len({sync.program for sync in seen.syncs}) == 1
        assert seen.syncs[-1].instructions < 15 * 14
