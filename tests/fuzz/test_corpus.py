"""A fixed selection of random programs, and those that once differed from eager, in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fuzz import runner, soak
from tests.fuzz.check import check, eager, failure_kind, shrink
from tests.fuzz.generate import generate
from tests.fuzz.modes import EVERYWHERE, MODES, entered
from tests.fuzz.program import Mode, Program, script
from tests.fuzz.worker import OtherProcess
from tests.semantics.support import run_script
from torch_ltc.config import settings

SEEDS_PER_MODE = 30
REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.txt"))


@pytest.fixture(autouse=True)
def as_in_the_workers() -> Iterator[None]:
    """Warnings each time, and one thread: results do not depend on the machine."""
    threads, always = torch.get_num_threads(), torch.is_warn_always_enabled()
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    yield
    torch.set_num_threads(threads)
    torch.set_warn_always(always)


def failure(program: Program, mode: Mode) -> str | None:
    """The difference with the program that shows it, made smaller; None when there is none."""
    try:
        found = check(program, mode)
    except runner.Skip:
        return None
    if not found:
        return None
    small, text = shrink(program, found, mode, most=60)
    return f"{program.name} in mode {mode.name}: {text}\n{small.lines()}\nwith {small.variants}"


@pytest.mark.parametrize("name", EVERYWHERE)
def test_random_programs_do_not_differ_from_eager(name: str) -> None:
    first = 1000 * EVERYWHERE.index(name)
    with entered(MODES[name]):
        failures = [failure(generate(seed), MODES[name]) for seed in range(first, first + SEEDS_PER_MODE)]
    assert not any(failures), "\n\n".join(filter(None, failures))


@pytest.mark.parametrize("name", EVERYWHERE)
def test_programs_that_once_differed_do_not_differ(name: str) -> None:
    for path in REGRESSIONS:
        with entered(MODES[name]):
            found = failure(Program.from_source(path.stem, path.read_text(encoding="utf-8")), MODES[name])
            assert not found, found


def test_a_seed_makes_the_same_program_each_time() -> None:
    assert [generate(seed) for seed in range(20)] == [generate(seed) for seed in range(20)]


@pytest.fixture
def wrong_sine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is wrong in a place."""
    sine = torch.sin
    monkeypatch.setattr(torch, "sin", lambda x: sine(x) + 1 if x.device.type == "ltc" else sine(x))


@pytest.mark.usefixtures("wrong_sine")
def test_a_difference_is_found_and_the_program_made_smaller() -> None:
    statements = ("t0 = torch.ones(3, device=D)", "t1 = t0 * 2", "t2 = torch.sin(t0)", "t3 = t1 + 1", "del t1")
    program = Program("wrong", 0, statements, ({}, {}))
    found = check(program, MODES["interpreter"])
    assert found is not None
    assert failure_kind(found) == "finals"
    small, _ = shrink(program, found, MODES["interpreter"])
    assert small.statements == ("t0 = torch.ones(3, device=D)", "t2 = torch.sin(t0)")
    assert small.variants == ({},)


DIFFERENT = {
    "value": ("t0 = torch.full((2,), 1.0 if D == 'cpu' else 2.0, device=D)", "finals t0 value"),
    "the sign of zero": ("t0 = torch.full((2,), 0.0 if D == 'cpu' else -0.0, device=D)", "finals t0 value"),
    "dtype": ("t0 = torch.zeros(2, dtype=torch.int32 if D == 'cpu' else torch.int64, device=D)", "finals t0 dtype"),
    "strides": ("t0 = torch.zeros(2, 2, device=D)\nt0 = t0 if D == 'cpu' else t0.t()", "finals t0 stride"),
    "aliasing": ("t0 = torch.zeros(2, device=D)\nt1 = t0[:] if D == 'cpu' else t0.clone()", "aliases"),
    "gradient": (
        "t0 = torch.ones(2, device=D, requires_grad=True)\n(t0 * (1 if D == 'cpu' else 2)).sum().backward()",
        "finals t0 grad value",
    ),
    "random state": ("t0 = torch.randn(2, device=D)\nt0.zero_()\ntorch.randn(1, device='cpu')", "random state"),
    "a read": ("read(1 if D == 'cpu' else 2)", "reads"),
    "no error": ("if D == 'cpu': raise ValueError('here')", "errors"),
    "an error": ("if D != 'cpu': raise ValueError('here')", "errors"),
    "another error": ("raise (ValueError if D == 'cpu' else TypeError)('here')", "errors"),
    "a warning": ("if D != 'cpu': __import__('warnings').warn('here')", "warnings"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_kind_of_difference_is_seen(name: str) -> None:
    statement, expected = DIFFERENT[name]
    found = check(Program("different", 0, (statement,)), MODES["interpreter"])
    assert found is not None
    assert found.split(": ", 1)[1].startswith(expected)


def test_a_write_that_autograd_is_not_told_of_is_seen() -> None:
    write = "t0.add_(1) if D == 'cpu' else t0.data.add_(1)"
    found = check(Program("different", 0, ("t0 = torch.zeros(2, device=D)", write)), MODES["interpreter"])
    assert found == "execution 0: finals t0 writes: 0 instead of 1"


def test_an_error_that_depends_on_data_may_come_later_and_must_come() -> None:
    bad = "t1 = t0[torch.tensor([99], device=D)]"
    program = Program("late", 0, ("t0 = torch.ones(3, device=D)", bad, "t2 = t0 * 2", "read(t2)"))
    assert check(program, MODES["interpreter"]) is None
    quiet = Program("late", 0, (program.statements[0], f"if D == 'cpu': {bad}", *program.statements[2:]))
    assert "does not raise IndexError" in str(check(quiet, MODES["interpreter"]))


def test_an_oracle_in_another_process_sees_what_eager_does(request: pytest.FixtureRequest) -> None:
    oracle = OtherProcess("cpu")
    request.addfinalizer(oracle.close)
    for seed in (3, 4):
        theirs, ours = oracle(generate(seed)), eager(generate(seed))
        found = [runner.compare(left, right, generate(seed).statements) for left, right in zip(ours, theirs)]
        assert not any(found)


_RUN = """
import runpy

try:
    runpy.run_path({path!r}, run_name="__main__")
except SystemExit as end:
    print("status", end.code)
"""


def test_a_failing_program_is_a_script_of_its_own(tmp_path: Path) -> None:
    program = Program("wrong", 0, ("t0 = torch.full((2,), 1.0 if D == 'cpu' else 2.0, device=D)",))
    text = script(program, MODES["interpreter"], "it differs")
    (tmp_path / "wrong.py").write_text(text + "\n")
    printed = run_script(_RUN.format(path=str(tmp_path / "wrong.py")))
    assert "finals t0 value: torch.float32 (2,) [2.0, 2.0] instead of torch.float32 (2,) [1.0, 1.0]" in printed
    assert "status 1" in printed


@pytest.mark.parametrize("name", soak.WORKLOADS)
def test_short_soaks_find_nothing_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is still growing after so few steps is not looked at.
    monkeypatch.setattr(soak.Figures, "judge", lambda figures: figures.wrong)
    assert not soak.soak(name, 30)


def test_a_soak_sees_what_grows() -> None:
    figures = soak.Figures(memory=[1 << 30] * 6 + [1 << 31] * 3, objects=[10] * 9, buffers=[5] * 8 + [600])
    assert figures.judge() == [
        "bytes of memory grow from 1,073,741,824 to 2,147,483,648",
        "bytes of live buffers grow from 5 to 600",
    ]


def test_a_soak_sees_graphs_beyond_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak.graph_cache, "figures", lambda: {"graphs.count": 2, "graphs.bytes": 2_001})
    figures = soak.Figures()
    with settings.scope(graph_bytes=2_000):
        figures.look()
    assert figures.wrong == ["graphs hold 2001 bytes, more than 2000"]
