"""What is kept for a program: fingerprints for people, a bound on compiled programs, what a failed run puts back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import torch_ltc
from torch_ltc.compile import program_cache
from torch_ltc.compile.program_cache import (
    CachedProgram,
    ExecutableCache,
    fingerprint,
    inputs_to_restore,
    may_fail,
    next_identity,
)
from torch_ltc.config import settings
from torch_ltc.execute.pending import pending_program
from torch_ltc.lowering.interface import Arguments, Computation, Outcome
from torch_ltc.lowering.lower import Executable
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program

FAKE = b"the same for all"


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def record(function: Callable[[Tensor, Tensor], object]) -> Program:
    """The program that the function records on two matrices."""
    x, y = torch.ones(2, 2).to("ltc"), torch.ones(2, 2).to("ltc")
    torch_ltc.sync(wait=True)
    out = function(x, y)
    program = pending_program([out] if isinstance(out, Tensor) else [])
    torch_ltc.sync(wait=True)
    return program


class Ready(Computation):
    def run(self, arguments: Arguments) -> Outcome:
        return Outcome([])

    def to_string(self) -> str:
        return ""


def compiled_entry() -> CachedProgram:
    entry = CachedProgram(Program(next_identity(), (), (), 0, 0, False))
    entry.activate(registry.reference)
    entry.compiled = Executable(Ready())
    return entry


def test_fingerprint_depends_on_the_program_alone() -> None:
    first = fingerprint(record(lambda x, y: x + y))
    assert len(first) == 16
    assert fingerprint(record(lambda x, y: x * y)) != first


def test_published_bytes_bring_back_the_very_entry_whatever_the_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "fingerprint", lambda program: FAKE)
    executables = ExecutableCache()
    entries = [compiled_entry() for _ in range(20)]
    digests = [executables.publish(entry) for entry in entries]
    assert len(set(digests)) == 20
    assert all(len(digest) == 16 for digest in digests)
    assert [executables.find(digest) for digest in digests] == entries
    assert [executables.publish(entry) for entry in entries] == digests
    assert executables.find(b"another") is None


def test_dropping_an_entry_forgets_its_bytes_only() -> None:
    executables = ExecutableCache()
    one, two = compiled_entry(), compiled_entry()
    first, second = executables.publish(one), executables.publish(two)
    executables.remove(one)
    assert executables.find(first) is None
    assert executables.find(second) is two


def test_least_recently_used_programs_lose_their_compiled_form() -> None:
    executables = ExecutableCache()
    entries = [compiled_entry() for _ in range(4)]
    with settings.scope(executables_bound=3):
        for entry in entries[:3]:
            executables.touch(entry)
        executables.touch(entries[0])
        executables.touch(entries[3])
        assert [entry.compiled is not None for entry in entries] == [True, False, True, True]
        assert len(executables) == 3
    with settings.scope(executables_bound=1):
        executables.touch(entries[0])
    assert [entry.compiled is not None for entry in entries] == [True, False, False, False]
    executables.clear()
    assert len(executables) == 0
    assert entries[0].compiled is None


def last_call_may_fail(function: Callable[[Tensor, Tensor], object]) -> bool:
    return may_fail(record(function).calls[-1])


def test_which_calls_may_fail_on_data() -> None:
    may = [
        lambda x, y: torch.nn.functional.embedding(x.long(), y),
        lambda x, y: x.gather(0, y.long()),
        lambda x, y: x.long() // y.long(),
        lambda x, y: torch.linalg.cholesky_ex(x)[0],
        lambda x, y: torch.multinomial(x, 1),
        lambda x, y: torch.ops.torch_ltc_tests_cache.mine(x),
    ]
    must_not = [
        lambda x, y: x + y,
        lambda x, y: x @ y,
        lambda x, y: x.t(),
        lambda x, y: x.add_(y),
        lambda x, y: x.relu(),
        lambda x, y: x / y,
        lambda x, y: torch._foreach_add([x], [y])[0],
    ]
    with torch.library._scoped_library("torch_ltc_tests_cache", "DEF") as library:
        library.define("mine(Tensor x) -> Tensor")
        library.impl("mine", lambda x: x.clone(), "CPU")
        library.impl("mine", lambda x: torch.empty_like(x), "Meta")
        assert [last_call_may_fail(function) for function in may] == [True] * len(may)
    assert [last_call_may_fail(function) for function in must_not] == [False] * len(must_not)


def step_then_look_up(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return torch.nn.functional.embedding(y.long(), torch.ones(3, 3, device="ltc"))


def look_up_then_step(x: Tensor, y: Tensor) -> Tensor:
    found = torch.nn.functional.embedding(y.long(), torch.ones(3, 3, device="ltc"))
    x.add_(1)
    return found


def step_through_views(x: Tensor, y: Tensor) -> Tensor:
    x.t()[0].view(2).mul_(2)
    y[1].zero_()
    return x.gather(0, y.long())


def test_inputs_written_before_a_call_that_may_fail_are_put_back() -> None:
    assert inputs_to_restore(record(step_then_look_up)) == (0,)
    assert inputs_to_restore(record(look_up_then_step)) == ()
    assert inputs_to_restore(record(step_through_views)) == (0, 1)
    assert inputs_to_restore(record(lambda x, y: x.add_(y))) == ()


def test_operations_of_a_program_are_counted() -> None:
    entry = CachedProgram(record(lambda x, y: (x + y + y).t() @ y))
    assert entry.op_counts == {"aten::add.Tensor": 2, "aten::t": 1, "aten::mm": 1}


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_programs_are_used_and_dropped_by_several_threads() -> None:
    executables, raised = ExecutableCache(), []
    entries = [compiled_entry() for _ in range(300)]

    def use() -> None:
        try:
            for _ in range(20):
                for entry in entries:
                    executables.touch(entry)
        except RuntimeError as error:
            raised.append(error)

    def drop() -> None:
        try:
            for _ in range(20):
                for entry in entries[::10]:
                    executables.remove(entry)
        except RuntimeError as error:
            raised.append(error)

    threads = [threading.Thread(target=work) for work in (use, drop, use, drop)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
