"""What becomes of programs that a backend runs wrongly: it raises, or returns what was not recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import lazy
from tests.support.backends import (
    FunctionalBackend,
    Misbehaving,
    RecordedBackend,
    registered,
    run_functional,
    run_recorded,
    seen_events,
    steps,
)
from torch_ltc import events
from torch_ltc.backends.torchscript import ScriptComputation
from torch_ltc.config import settings
from torch_ltc.errors import (
    BackendError,
    BackendWarning,
    ExecutionError,
    LtcError,
)
from torch_ltc.lowering.interface import Arguments, Form, Outcome
from torch_ltc.lowering.out_of_memory import memory_needed
from torch_ltc.program.instruction import Program

pytestmark = [pytest.mark.blocking_tiers, pytest.mark.usefixtures("same_backend_afterwards")]


# ---- failures while running


Behaviour = Callable[[Program, int, Sequence[Any]], Any]
RUNS: dict[Form, Callable[[Program, Sequence[Any]], list[Any]]] = {
    Form.RECORDED: run_recorded,
    Form.FUNCTIONAL: run_functional,
}


def spoiled(form: Form, spoil: Callable[[list[Any]], Any], at: int = 1) -> Behaviour:
    """Right until run `at`, whose results are spoiled."""

    def run(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        results = RUNS[form](program, given)
        return spoil(results) if attempt == at else results

    return run


def raising(error: BaseException) -> Callable[[list[Any]], Any]:
    def spoil(results: list[Any]) -> Any:
        raise error

    return spoil


SPOILED: dict[str, Callable[[list[Any]], Any]] = {
    "too few": lambda results: results[:-1],
    "too many": lambda results: [*results, torch.zeros(1)],
    "none at all": lambda results: [],
    "None": lambda results: None,
    "a tensor": lambda results: results[0],
    "a dict": lambda results: dict(enumerate(results)),
    "None inside": lambda results: [None, *results[1:]],
    "a number inside": lambda results: [3.0, *results[1:]],
    "another dtype": lambda results: [results[0].double(), *results[1:]],
    "another shape": lambda results: [results[0].unsqueeze(0), *results[1:]],
    "a scalar for a vector": lambda results: [results[0].sum(), *results[1:]],
    "another device": lambda results: [results[0].to("meta"), *results[1:]],
    "last of another shape": lambda results: [*results[:-1], results[-1].flatten()[:1]],
    "raises": raising(RuntimeError("it broke")),
    "raises an error of the package": raising(BackendError("it broke")),
    "raises KeyError": raising(KeyError("it broke")),
    "raises AssertionError": raising(AssertionError()),
    "raises StopIteration": raising(StopIteration()),
}
FORMS = pytest.mark.parametrize("form", [Form.RECORDED, Form.FUNCTIONAL], ids=["recorded", "functional"])


class State:
    """A little training state on one device: whole tensors, a part of a larger one, two views of one."""

    def __init__(self, device: str) -> None:
        self.whole = torch.zeros(2, 2).to(device)
        self.large = torch.zeros(6).to(device)
        self.shared = torch.zeros(4).to(device)
        self.part, self.low, self.high = self.large[1:3], self.shared[:3], self.shared[1:]
        torch_ltc.sync(wait=True)

    def step(self) -> tuple[Tensor, Tensor]:
        """Updates of everything, and two outputs."""
        loss = (self.whole + 1).exp() @ self.whole.t()
        self.whole.add_(1)
        self.part.sub_(self.whole[0])
        self.low.add_(2)
        self.high.mul_(3)
        made = self.part * 2
        torch_ltc.sync(wait=True)
        return loss, made

    def values(self) -> list[list[float]]:
        return [tensor.cpu().flatten().tolist() for tensor in (self.whole, self.large, self.shared)]


@FORMS
@pytest.mark.parametrize("how", SPOILED)
def test_a_wrong_first_run_warns_once_and_results_are_right(how: str, form: Form) -> None:
    backend = Misbehaving("wrong", form, spoiled(form, SPOILED[how]))
    ours, theirs = State("ltc"), State("cpu")
    with registered(backend), torch_ltc.use_backend("wrong"), seen_events() as seen:
        with pytest.warns(BackendWarning) as caught:
            for _ in range(4):
                results = ours.step()
                expected = theirs.step()
                assert ours.values() == theirs.values()
        assert [value.tolist() for value in results] == [value.tolist() for value in expected]
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "wrong" in message
    assert "aten::" in message
    assert f"recorded at {__file__}:" in message
    assert "the program runs in the interpreter instead" in message
    assert backend.attempts == 1
    (refusal,) = (event for event in seen if isinstance(event, events.RefusalEvent))
    assert (refusal.backend, refusal.stage) == ("wrong", "run")


@FORMS
@pytest.mark.parametrize("how", SPOILED)
def test_a_wrong_first_run_is_an_error_when_the_policy_says_so(how: str, form: Form) -> None:
    backend = Misbehaving("wrong", form, spoiled(form, SPOILED[how]))
    ours, theirs = State("ltc"), State("cpu")
    with registered(backend), settings.scope(backend_failure="error"), torch_ltc.use_backend("wrong"):
        ours.step()
        theirs.step()
        before = theirs.values()
        with pytest.raises(LtcError, match="wrong") as caught:
            ours.step()
        assert f"recorded at {__file__}:" in str(caught.value)
        torch_ltc.sync(wait=True)
        assert ours.values() == before
    results, expected = ours.step(), theirs.step()
    assert ours.values() == theirs.values()
    assert [value.tolist() for value in results] == [value.tolist() for value in expected]


@FORMS
@pytest.mark.parametrize("how", SPOILED)
def test_a_wrong_fifth_run_spoils_no_tensor(how: str, form: Form) -> None:
    """It is repeated in the interpreter, with a warning; or it is an error, and has happened in full or not at all."""
    backend = Misbehaving("wrong", form, spoiled(form, SPOILED[how], at=5))
    ours, theirs = State("ltc"), State("cpu")
    with registered(backend), torch_ltc.use_backend("wrong"):
        for _ in range(5):
            ours.step()
            theirs.step()
        before, expected = theirs.values(), theirs.step()
        error: LtcError | None = None
        with shown_warnings() as messages:
            try:
                results = ours.step()
            except LtcError as raised:
                error = raised
        after = ours.values()
        if error is None:
            (message,) = messages
            assert message.startswith("wrong ")
            assert after == theirs.values()
            assert [value.tolist() for value in results] == [value.tolist() for value in expected]
        else:
            assert "wrong" in str(error)
            assert after == before if form is Form.FUNCTIONAL else after in (before, theirs.values())
        torch_ltc.sync(wait=True)
        with shown_warnings():
            ours.step()
    assert (ours.whole * 0 + 1).tolist() == [[1.0, 1.0], [1.0, 1.0]]


@contextmanager
def shown_warnings() -> Iterator[list[str]]:
    """The backend warnings of the block, none of them an error."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BackendWarning)
        yield messages
    messages.extend(str(warning.message) for warning in caught)


@FORMS
def test_an_exit_or_interrupt_inside_a_backend_is_told(form: Form) -> None:
    backend = Misbehaving("leaving", form, spoiled(form, raising(SystemExit(3))))
    x = lazy(torch.ones(2))
    told: list[str] = []
    with registered(backend), torch_ltc.use_backend("leaving"), shown_warnings() as messages:
        for _ in range(3):
            y = x.sin()
            try:
                torch_ltc.sync(wait=True)
                assert y.tolist() == torch.ones(2).sin().tolist()
            except LtcError as error:
                told.append(str(error))
    assert told + messages
    assert x.tolist() == [1.0, 1.0]


@FORMS
def test_a_failing_call_gives_the_users_line_and_leaves_the_rest(form: Form) -> None:
    backend = FunctionalBackend() if form is Form.FUNCTIONAL else RecordedBackend()
    table = lazy(torch.arange(6.0).view(3, 2))
    counter = lazy(torch.zeros(2))
    good, bad = lazy(torch.tensor([1]), torch.tensor([7]))
    torch_ltc.sync(wait=True)

    def step(index: Tensor) -> tuple[Tensor, Tensor]:
        counter.add_(1)
        rows = F.embedding(index, table)
        counter.mul_(2)
        return rows + counter, counter * 10

    with registered(backend), torch_ltc.use_backend(backend.name):
        for _ in range(3):
            step(good)
            torch_ltc.sync(wait=True)
        assert backend.runs > 0
        assert counter.tolist() == [14.0, 14.0]
        lost, kept = step(bad)
        with pytest.raises(ExecutionError, match="index out of range") as caught:
            torch_ltc.sync(wait=True)
        assert f"recorded at {__file__}:" in str(caught.value)
        assert counter.tolist() == [30.0, 30.0]
        assert kept.tolist() == [300.0, 300.0]
        with pytest.raises(LtcError, match="never computed"):
            lost.tolist()
        again, _ = step(good)
        assert again.tolist() == [[64.0, 65.0]]
    assert table.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_a_recorded_backend_that_wrote_before_it_raised_has_not_written() -> None:
    def half(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        given[0].add_(100)
        raise RuntimeError("in the middle")

    x = lazy(torch.ones(2))
    told = pytest.warns(BackendWarning, match="half failed to run .* RuntimeError: in the middle")
    with registered(Misbehaving("half", Form.RECORDED, half)), torch_ltc.use_backend("half"), told:
        steps(4, lambda: x.add_(1))
    assert x.tolist() == [5.0, 5.0]


def test_random_numbers_of_a_failed_run_are_drawn_again() -> None:
    def draws(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        torch.rand(7, generator=given[-1])
        raise RuntimeError("after the draw")

    with registered(Misbehaving("draws", Form.RECORDED, draws)), torch_ltc.use_backend("draws"):
        torch.manual_seed(5)
        with pytest.warns(BackendWarning):
            ours = [torch.rand(3, device="ltc").tolist() for _ in range(4)]
    torch.manual_seed(5)
    assert ours == [torch.rand(3).tolist() for _ in range(4)]


@FORMS
def test_results_that_share_memory_are_made_apart(form: Form) -> None:
    def shared(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        if len(program.outputs) != 2:
            return RUNS[form](program, given)
        made = given[0] + 1
        return [made, made]

    x = lazy(torch.zeros(3))
    with registered(Misbehaving("sharing", form, shared)), torch_ltc.use_backend("sharing"):
        for _ in range(3):
            y, z = x + 1, x + 1
            torch_ltc.sync(wait=True)
            y.add_(5)
            torch_ltc.sync(wait=True)
            assert z.tolist() == [1.0, 1.0, 1.0]
            assert y.tolist() == [6.0, 6.0, 6.0]


@FORMS
def test_a_result_that_is_an_input_is_made_apart(form: Form) -> None:
    def same(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        return [given[0]] if program.calls[0].name == "aten::clone" else RUNS[form](program, given)

    x = lazy(torch.zeros(3))
    with registered(Misbehaving("same", form, same)), torch_ltc.use_backend("same"):
        for _ in range(3):
            y = x.clone()
            torch_ltc.sync(wait=True)
            y.add_(5)
            torch_ltc.sync(wait=True)
            assert x.tolist() == [0.0, 0.0, 0.0]


def test_other_strides_are_no_mistake() -> None:
    def turned(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        return [result.t().contiguous().t() for result in run_functional(program, given)]

    x = lazy(torch.arange(6.0).view(2, 3))
    with registered(Misbehaving("turned", Form.FUNCTIONAL, turned)), torch_ltc.use_backend("turned"):
        for _ in range(3):
            y = x.sin()
            torch_ltc.sync(wait=True)
            assert y.view(6).cpu().tolist() == torch.arange(6.0).sin().tolist()


def test_a_number_that_never_settles_goes_to_the_interpreter_with_one_warning() -> None:
    backend = FunctionalBackend()
    x = lazy(torch.tensor([-1.0, 2.0]))
    told = pytest.warns(BackendWarning, match="again for each value of its numbers")
    with registered(backend), torch_ltc.use_backend("functional"), told as caught:
        for number in range(9):
            slope = number / 8
            assert F.leaky_relu(x, slope).tolist() == [-slope, 2.0]
    assert len(caught) == 1
    assert 2 <= len(backend.programs) <= 5


# ---- compilations that end in an unusual way, and failures that no call explains


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tiers", ["blocking", "background"])
def test_nobody_waits_for_a_compilation_that_was_interrupted(error: type[BaseException], tiers: Any) -> None:
    class Interrupted(RecordedBackend):
        name = "interrupted"

        def compile(self, program: Program) -> Any:
            if not self.programs:
                self.programs.append(program)
                raise error
            return super().compile(program)

    x = torch.ones(3).to("ltc")
    with registered(Interrupted()), settings.scope(backend="interrupted", tiers=tiers, hot_after=2):
        raised: list[str] = []
        for _ in range(4):
            try:
                made = x * 2 + 1
                torch_ltc.sync(wait=True)
                torch_ltc.wait_for_compiles()
                assert made.tolist() == [3.0, 3.0, 3.0]
            except LtcError as found:
                raised.append(str(found))
        (message,) = raised
        assert error.__name__ in message
        assert tiers == "background" or f"recorded at {__file__}:" in message


def test_a_version_that_cannot_be_told_leaves_the_disk_cache_alone(tmp_path: Path) -> None:
    class Nameless(RecordedBackend):
        name = "nameless"

        def version(self) -> str:
            raise OSError("no version")

    x = torch.ones(3).to("ltc")
    (tmp_path / "p").mkdir()
    with (
        registered(Nameless()),
        settings.scope(backend="nameless", hot_after=2, cache_dir=str(tmp_path)),
        seen_events() as seen,
    ):
        for name in ("s2.1-0", "p2.1-0"):
            (tmp_path / name).touch()
        for _ in range(4):
            assert (x * 2).tolist() == [2.0, 2.0, 2.0]
            torch_ltc.wait_for_compiles()
    assert any(isinstance(event, events.CompileEvent) for event in seen)


def test_a_failure_that_no_call_explains_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has written in place by then: what it wrote must not be written again."""
    run, fails = ScriptComputation.run, [False]

    def late(self: ScriptComputation, arguments: Arguments) -> Outcome:
        outcome = run(self, arguments)
        if fails[0]:
            raise RuntimeError("out of the blue")
        return outcome

    monkeypatch.setattr(ScriptComputation, "run", late)
    x = torch.zeros(3).to("ltc")
    with settings.scope(backend="torchscript", hot_after=2):
        for _ in range(4):
            x.add_(1)
            torch_ltc.sync(wait=True)
        fails[0] = True
        x.add_(1)
        with pytest.raises(ExecutionError, match="out of the blue") as caught:
            torch_ltc.sync(wait=True)
        fails[0] = False
        assert f"recorded at {__file__}:" in str(caught.value)
        assert x.tolist() == [5.0, 5.0, 5.0]
        x.add_(1)
        assert x.tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("proven", [False, True], ids=["first run", "later run"])
def test_a_functional_program_without_memory_runs_again_when_some_was_given_back(proven: bool) -> None:
    def short(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        if attempt == (3 if proven else 1):
            raise MemoryError("no room")
        return run_functional(program, given)

    given_back: list[int] = []

    def give_back() -> bool:
        given_back.append(1)
        return True

    backend = Misbehaving("short", Form.FUNCTIONAL, short)
    backend.keeps_inputs = True
    remove = memory_needed.add(give_back)
    ours, theirs = State("ltc"), State("cpu")
    try:
        with registered(backend), torch_ltc.use_backend("short"):
            for _ in range(5):
                ours.step()
                theirs.step()
                assert ours.values() == theirs.values()
    finally:
        remove()
    assert given_back == [1]
