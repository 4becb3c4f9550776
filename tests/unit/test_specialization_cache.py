"""The specialization cache: what is requested, when, and which programs an executable serves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.support.backends import FunctionalBackend, SymbolicBackend, record, seen_events
from torch_ltc.backends.torchscript import TorchScriptBackend
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.compile.specialization_cache import CacheMiss, CompileRequest, Lookup, Specializations
from torch_ltc.config import settings
from torch_ltc.errors import CompileError
from torch_ltc.events import CompileEvent, LoadEvent
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.lower import Executable, lower
from torch_ltc.program import symbolic_key

HOT_AFTER = 2


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def entry(*size: int, function: Callable[[Tensor], Any] = torch.exp) -> CachedProgram:
    """What is kept for a new program on an input of this size."""
    program, _ = record(function, torch.ones(*size))
    return CachedProgram(program)


class Runs:
    """Runs of programs, as far as specializations see them."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.specializations = Specializations()
        self.backend = backend or SymbolicBackend()
        # A cache lives as long as a program of it.
        self._kept: list[CachedProgram] = []

    def lookup(self, entry: CachedProgram, *numbers: object) -> Lookup:
        self._kept.append(entry)
        entry.runs += 1
        return self.specializations.lookup(entry, numbers, self.backend, HOT_AFTER)

    def request(self, entry: CachedProgram, *numbers: object) -> CompileRequest:
        found = self.lookup(entry, *numbers).request
        assert found is not None
        return found

    def make(self, request: CompileRequest) -> Executable:
        made = lower(self.backend, request.program, request.numbers, request.varying, True, request.specialization)
        self.specializations.install(request, made)
        return made


def test_a_program_is_asked_for_when_its_specialization_is_hot() -> None:
    runs = Runs()
    assert runs.lookup(entry(4, 3)) == Lookup()
    result = runs.lookup(entry(5, 3))
    assert result.request is not None
    assert result.request.symbolic
    assert result.request.miss == CacheMiss()


def test_what_has_become_symbolic_is_said_in_a_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass for each of thousands of places would hold the GIL for minutes."""
    passes = []
    places = symbolic_key._places
    monkeypatch.setattr(symbolic_key, "_places", lambda program: [passes.append(program), *places(program)][1:])

    def rows(first: int) -> Callable[[Tensor], Any]:
        return lambda x: [x[first + row] for row in range(50)]

    runs = Runs(TorchScriptBackend())
    runs.lookup(entry(60, function=rows(0)))
    request = runs.request(entry(60, function=rows(3)))
    passes.clear()
    assert request.promoted.startswith("index of aten::select.int at ")
    assert len(request.specialization.places) == 50
    assert len(passes) <= 2


def test_the_same_program_twice_is_compiled_with_its_sizes() -> None:
    runs, first = Runs(), entry(4, 3)
    runs.lookup(first)
    request = runs.request(first)
    assert not request.symbolic
    runs.make(request)
    assert runs.lookup(first).executable is not None
    assert runs.lookup(entry(5, 3)).executable is None


def test_one_request_is_under_way_at_a_time() -> None:
    runs = Runs()
    runs.lookup(entry(4, 3))
    request = runs.request(entry(5, 3))
    assert runs.lookup(entry(6, 3)) == Lookup(under_way=request)
    runs.specializations.cancel(request)
    assert runs.request(entry(6, 3)) is not request


def test_new_programs_are_served_at_their_first_execution() -> None:
    runs = Runs()
    runs.lookup(entry(4, 3))
    executable = runs.make(runs.request(entry(5, 3)))
    fresh = entry(9, 3)
    result = runs.lookup(fresh)
    assert result.executable is not None
    assert result.executable.origin is executable
    assert result.executable.computation.program is fresh.program
    assert runs.lookup(fresh).executable is result.executable


def test_what_serves_is_found_by_the_whole_skeleton() -> None:
    runs = Runs()
    runs.lookup(entry(4, 3))
    runs.make(runs.request(entry(5, 3)))
    assert runs.lookup(entry(6, 3, function=torch.sin)).executable is None
    assert runs.lookup(entry(6, 3, 2)).executable is None
    assert runs.lookup(entry(6, 4)).executable is None


def test_programs_that_look_at_the_memory_of_a_result_are_not_shared() -> None:
    def looks(x: Tensor) -> Tensor:
        return (x * 2).as_strided((2,), (1,))

    runs = Runs()
    for size in (4, 5, 6):
        assert runs.lookup(entry(size, 3, function=looks), 2) == Lookup()


def test_a_symbolic_compilation_that_fails_leaves_programs_to_themselves() -> None:
    runs = Runs()
    first, second = entry(4, 3), entry(5, 3)
    runs.lookup(first)
    assert runs.specializations.fail(runs.request(second), CompileError("no symbols today"))
    assert runs.lookup(entry(6, 3)) == Lookup()
    request = runs.request(second)
    assert request.specialization is None
    assert request.miss.text == "sizes stay constants, because no symbols today"


def test_what_fails_for_two_programs_is_not_tried_for_a_third() -> None:
    runs = Runs()
    entries = [entry(4, 3), entry(5, 3), entry(6, 3)]
    for one in entries[:2]:
        result = runs.lookup(one)
        # Their common key is hot when the second program comes.
        if result.request is None:
            result = runs.lookup(one)
        assert result.request is not None
        while runs.specializations.fail(result.request, CompileError("never")):
            result = runs.lookup(one)
            assert result.request is not None
    last = runs.lookup(entries[2])
    assert last.announced
    assert str(last.refusal) == "never"


def test_backends_without_symbols_get_programs_that_are_hot_by_themselves() -> None:
    runs = Runs(FunctionalBackend())
    for size in range(3, 9):
        assert runs.lookup(entry(size, 3)) == Lookup()
    again = entry(4, 3)
    runs.lookup(again)
    assert runs.request(again).specialization is None


def test_without_promotion_every_program_is_for_itself() -> None:
    runs = Runs()
    with settings.scope(promotion=False):
        assert runs.lookup(entry(4, 3)) == Lookup()
        assert runs.lookup(entry(5, 3)) == Lookup()
        assert len(runs.specializations) == 0


def scaled(x: Tensor) -> Tensor:
    return x * 1.5


def test_numbers_that_vary_across_programs_are_inputs() -> None:
    runs = Runs()
    runs.lookup(entry(4, 3, function=scaled), 1.5)
    request = runs.request(entry(5, 3, function=scaled), 2.5)
    assert request.varying == {0}
    runs.make(request)
    assert runs.lookup(entry(6, 3, function=scaled), 3.5).executable is not None


def test_a_number_that_was_constant_is_named_when_it_changes() -> None:
    runs, first = Runs(), entry(4, 3, function=scaled)
    runs.lookup(first, 1.5)
    runs.make(runs.request(first, 1.5))
    assert runs.lookup(first, 1.5).executable is not None
    request = runs.request(first, 2.5)
    assert request.miss.cause == "number"
    assert re.fullmatch(r"the number 'other' of aten::\S+ at \S+ in \w+ was 1\.5 and is now 2\.5", request.miss.text)
    assert request.varying == {0}


def test_a_flag_is_an_input_of_shared_programs_before_it_changes() -> None:
    def flagged(x: Tensor) -> Tensor:
        return torch.full((x.size(0),), True, device=x.device)

    runs = Runs()
    runs.lookup(entry(4, 3, function=flagged), True)
    assert runs.request(entry(5, 3, function=flagged), True).varying == {0}


def test_what_fails_to_run_for_two_programs_is_dropped() -> None:
    runs = Runs()
    runs.lookup(entry(4, 3))
    runs.make(runs.request(entry(5, 3)))
    for size in (6, 7):
        used = entry(size, 3)
        assert runs.lookup(used).executable is not None
        runs.specializations.fail_run(used, runs.backend)
    last = entry(8, 3)
    assert runs.lookup(last).executable is None
    assert runs.request(last).specialization is None


def test_a_failing_run_of_what_no_other_program_shares_drops_nothing() -> None:
    runs = Runs()
    with settings.scope(promotion=False):
        alone = entry(4, 3)
        runs.lookup(alone)
        runs.make(runs.request(alone))
        for _ in range(3):
            assert runs.lookup(alone).executable is not None
            runs.specializations.fail_run(alone, runs.backend)
    interpreted = entry(5, 3)
    assert runs.lookup(interpreted).executable is None
    runs.specializations.fail_run(interpreted, runs.backend)


def test_sizes_of_one_are_left_to_programs_that_are_hot_by_themselves() -> None:
    runs = Runs()
    runs.lookup(entry(4, 3))
    runs.make(runs.request(entry(5, 3)))
    one = entry(1, 3)
    assert runs.lookup(one) == Lookup()
    assert runs.request(one).specialization is None
    assert runs.lookup(entry(6, 3)).executable is not None


# ---- calls that look at memory --------------------------------------------------------------------------------------


def looking(x: Tensor) -> Tensor:
    return torch.as_strided(x.t() * 2, (2, x.size(1)), (1, 2)) + 1


def looking_entry(size: int, copied: tuple[int, ...] | None) -> CachedProgram:
    """A program that looks at memory, as its first run leaves it, or with None before that."""
    made = entry(2, size, function=looking)
    for call in made.program.calls:
        call.layout.copied = copied
    return made


def test_programs_that_look_at_memory_wait_for_their_run_in_the_interpreter() -> None:
    runs = Runs(TorchScriptBackend())
    for size in (4, 5, 6):
        assert runs.lookup(looking_entry(size, None)) == Lookup()
    # Counted once it has run.
    assert runs.lookup(looking_entry(4, ())) == Lookup()
    runs.make(runs.request(looking_entry(5, ())))
    assert runs.lookup(looking_entry(6, None)) == Lookup()
    assert runs.lookup(looking_entry(6, ())).executable is not None


def test_a_program_whose_results_lie_otherwise_looks_after_itself() -> None:
    runs = Runs(TorchScriptBackend())
    runs.lookup(looking_entry(4, ()))
    runs.make(runs.request(looking_entry(5, ())))
    other = looking_entry(6, (0,))
    assert runs.lookup(other).executable is None
    assert runs.request(other).specialization is None


def test_what_is_loaded_from_disk_serves_all_programs_that_it_was_compiled_for(tmp_path: Path) -> None:
    def run(*sizes: int) -> list[type]:
        torch_ltc.ir_cache.reset()
        with seen_events() as seen:
            for size in (*sizes, *sizes):
                assert (torch.ones(size, 3).to("ltc") * 2).sum().item() == 6 * size
            torch_ltc.wait_for_compiles()
        return [type(event) for event in seen if isinstance(event, (CompileEvent, LoadEvent))]

    with settings.scope(cache_dir=str(tmp_path / "shared"), tiers="blocking", backend="torchscript"):
        assert run(3, 4, 5) == [CompileEvent]
        assert run(6, 7, 8) == [LoadEvent]
    with settings.scope(cache_dir=str(tmp_path / "own"), tiers="blocking", backend="torchscript", promotion=False):
        assert run(3, 4) == [CompileEvent, CompileEvent]
        assert run(3, 4) == [LoadEvent, LoadEvent]
