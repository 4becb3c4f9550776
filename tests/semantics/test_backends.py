"""Choosing backends, changing them between steps, and what becomes of a backend's mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import lazy
from tests.support.backends import (
    ArrayBackend,
    ArrayData,
    FunctionalBackend,
    Misbehaving,
    RecordedBackend,
    registered,
    run_functional,
    run_recorded,
)
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.errors import (
    BackendError,
    BackendWarning,
    CompileError,
    ExecutionError,
    LtcError,
    UnknownBackendError,
    UnsupportedCallError,
)
from torch_ltc.lowering.interface import Backend, Form
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program

DEFAULT = settings.backend


@pytest.fixture(autouse=True)
def same_backend_afterwards() -> Iterator[None]:
    torch_ltc.ir_cache.reset()
    yield
    torch_ltc.sync(wait=True)
    assert settings.backend == DEFAULT


@contextmanager
def seen_events() -> Iterator[list[Any]]:
    """Compile, execute and refusal events of the block."""
    torch_ltc.wait_device_ops()
    seen: list[Any] = []
    stop = events.subscribe(seen.append, events.CompileEvent, events.ExecuteEvent, events.RefusalEvent)
    try:
        yield seen
        torch_ltc.wait_device_ops()
    finally:
        stop()


def used(seen: list[Any]) -> list[str]:
    """The backend of each run."""
    return [event.backend for event in seen if isinstance(event, events.ExecuteEvent)]


# ---- choosing


def test_use_backend_takes_a_name_a_class_or_an_object() -> None:
    backend = FunctionalBackend()
    with registered(backend):
        with torch_ltc.use_backend("functional") as chosen:
            assert chosen is backend
            assert settings.backend == "functional"
        with torch_ltc.use_backend(FunctionalBackend) as chosen:
            assert chosen is backend
        with torch_ltc.use_backend(backend) as chosen:
            assert chosen is backend


def test_use_backend_registers_a_class_that_is_not_known_yet() -> None:
    try:
        with torch_ltc.use_backend(RecordedBackend) as chosen:
            assert isinstance(chosen, RecordedBackend)
            assert registry.get("recorded") is chosen
    finally:
        registry.unregister("recorded")


def test_use_backend_refuses_another_object_of_a_known_name() -> None:
    with registered(FunctionalBackend()), pytest.raises(BackendError, match="'functional' is registered already"):
        torch_ltc.use_backend(FunctionalBackend())


def test_use_backend_lasts_until_the_next_when_it_is_no_block() -> None:
    try:
        chosen = torch_ltc.use_backend("interpreter")
        assert settings.backend == "interpreter"
        assert repr(chosen) == "use_backend('interpreter')"
    finally:
        torch_ltc.use_backend(DEFAULT)


def test_blocks_nest_and_end_with_an_exception() -> None:
    with registered(FunctionalBackend(), RecordedBackend()):
        with torch_ltc.use_backend("functional"):
            with pytest.raises(ValueError, match="inside"), torch_ltc.use_backend("recorded"):
                assert settings.backend == "recorded"
                raise ValueError("inside")
            assert settings.backend == "functional"
            with torch_ltc.use_backend("functional"):
                assert settings.backend == "functional"
            assert settings.backend == "functional"
        assert settings.backend == DEFAULT


def test_an_unknown_name_changes_nothing_and_lists_the_known() -> None:
    with pytest.raises(
        UnknownBackendError, match=r"no backend named 'nope'\n  try: one of: .*interpreter.*torchscript"
    ):
        torch_ltc.use_backend("nope")
    assert settings.backend == DEFAULT
    with pytest.raises(UnknownBackendError):
        settings.backend = "nope"
    assert settings.backend == DEFAULT


def test_programs_keep_the_backend_they_were_recorded_under() -> None:
    functional, recorded = FunctionalBackend(), RecordedBackend()
    with registered(functional, recorded):
        x = lazy(torch.ones(2))
        torch_ltc.sync(wait=True)
        for _ in range(3):
            with seen_events() as seen:
                with torch_ltc.use_backend("functional"):
                    y = x.sin() + 1
                with torch_ltc.use_backend("recorded"):
                    z = y.cos()
                assert torch.allclose(z.cpu(), (torch.ones(2).sin() + 1).cos())
        assert used(seen) == ["functional", "recorded"]


@pytest.mark.parametrize("name", ["interpreter", "torchscript", "null"])
def test_the_environment_chooses(name: str) -> None:
    script = """
import torch, torch_ltc
used = []
torch_ltc.events.subscribe(lambda event: used.append(event.backend), torch_ltc.events.ExecuteEvent)
for _ in range(3):
    torch.ones(2, device="ltc").add_(1)
    torch_ltc.sync(wait=True)
print(torch_ltc.config.settings.backend, used[-1])
"""
    environment = {**os.environ, "LTC_BACKEND": name}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name, name]


def test_backends_compile_for_themselves_and_are_not_asked_twice() -> None:
    functional, recorded = FunctionalBackend(), RecordedBackend()
    with registered(functional, recorded), seen_events() as seen:
        x = lazy(torch.ones(2))
        for name in ("functional", "recorded", "functional", "recorded", DEFAULT, "functional"):
            with torch_ltc.use_backend(name):
                for _ in range(2):
                    torch_ltc.sync(wait=True)
                    x.mul_(2)
                torch_ltc.sync(wait=True)
        assert x.tolist() == [2.0**12] * 2
    compiled = [event.backend for event in seen if isinstance(event, events.CompileEvent)]
    assert sorted(compiled) == sorted(["functional", "recorded", DEFAULT])


def test_another_backend_of_a_name_compiles_anew() -> None:
    x = lazy(torch.ones(2))
    for number in (2.0, 3.0):

        def scaled(program: Program, attempt: int, given: Sequence[Any], number: float = number) -> Any:
            return [given[0] * number]

        with registered(Misbehaving("again", Form.RECORDED, scaled)), torch_ltc.use_backend("again"):
            for _ in range(3):
                y = x.sin()
                torch_ltc.sync(wait=True)
            assert y.tolist() == [number, number]


class Learner(nn.Module):
    """Parameters, buffers and optimizer state of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before the norm: its gradient would be rounding alone, which the optimizer would blow up.
        first = nn.Linear(4, 6, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.25), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train(device: str, schedule: Sequence[str]) -> tuple[list[float], list[Tensor]]:
    """Losses and final state of a training whose backend changes from step to step."""
    torch.manual_seed(0)
    model = Learner().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    x, y = torch.rand(8, 4).to(device), torch.randint(0, 3, (8,)).to(device)
    torch.manual_seed(1)
    losses = []
    for name in schedule:
        with torch_ltc.use_backend(name):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    state = [value.detach().cpu() for value in model.state_dict().values()]
    return torch.stack(losses).tolist(), state


@pytest.mark.parametrize("every", [1, 3])
def test_backends_change_between_steps_with_tensors_intact(every: int) -> None:
    names = ["interpreter", "torchscript", "functional", "recorded", "arrays"]
    schedule = [name for name in (names + names[::-1]) * 2 for _ in range(every)]
    functional, recorded, arrays = FunctionalBackend(), RecordedBackend(), ArrayBackend()
    with registered(functional, recorded, arrays):
        losses, state = train("ltc", schedule)
    expected_losses, expected_state = train("cpu", schedule=[DEFAULT] * len(schedule))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(state, expected_state, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert min(functional.runs, recorded.runs, arrays.runs) >= 2


def test_tensors_of_outside_the_program_outlive_a_backend_that_computes_nothing() -> None:
    x, weight = lazy(torch.arange(3.0)), lazy(torch.ones(3))
    with torch_ltc.use_backend("null"):
        for _ in range(3):
            y = x * weight
            torch_ltc.sync(wait=True)
        assert y.shape == (3,)
    assert x.tolist() == [0.0, 1.0, 2.0]
    assert (x * weight).tolist() == [0.0, 1.0, 2.0]


# ---- handles of a backend's own


@pytest.fixture
def arrays() -> Iterator[ArrayBackend]:
    backend = ArrayBackend()
    with registered(backend), torch_ltc.use_backend("arrays"):
        yield backend
        torch_ltc.sync(wait=True)


def steps(count: int, step: Callable[[], Any]) -> None:
    for _ in range(count):
        step()
        torch_ltc.sync(wait=True)


def test_a_backend_gets_its_own_handles_back(arrays: ArrayBackend) -> None:
    x = lazy(torch.ones(3))
    made = ArrayData.made
    steps(4, lambda: x.add_(1))
    assert arrays.given == [["Tensor"], ["ArrayData"], ["ArrayData"]]
    # The backend itself asks for a tensor once per run; saving the input before the first run asks once more.
    assert ArrayData.made - made <= 3
    assert x.tolist() == [5.0, 5.0, 5.0]
    assert x[1:].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("name", ["interpreter", "torchscript", "functional", "recorded"])
def test_another_backend_reads_and_writes_what_a_handle_holds(name: str, arrays: ArrayBackend) -> None:
    with registered(FunctionalBackend(), RecordedBackend()):
        x = lazy(torch.ones(3))
        steps(4, lambda: x.add_(1))
        assert "ArrayData" in arrays.given[-1]
        with torch_ltc.use_backend(name):
            steps(4, lambda: x.mul_(2))
            assert (x + 1).tolist() == [81.0, 81.0, 81.0]
            steps(1, lambda: x[0].zero_())
        steps(4, lambda: x.add_(1))
        assert x.tolist() == [4.0, 84.0, 84.0]


def test_a_backend_without_handles_gets_tensors(arrays: ArrayBackend) -> None:
    kinds: list[str] = []

    def noted(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        kinds.extend(type(held).__name__ for held in given)
        return run_functional(program, given)

    x = lazy(torch.ones(3))
    steps(4, lambda: x.add_(1))
    with registered(Misbehaving("noting", Form.FUNCTIONAL, noted)), torch_ltc.use_backend("noting"):
        steps(3, lambda: x.mul_(2))
    assert set(kinds) == {"Tensor"}
    assert x.tolist() == [40.0, 40.0, 40.0]


def test_views_and_copies_of_what_a_handle_holds(arrays: ArrayBackend) -> None:
    def values(device: str) -> list[Any]:
        x = torch.arange(6.0).view(2, 3).to(device)
        rows = []
        for _ in range(4):
            x.mul_(1.5)
            row = x[1]
            row.add_(1)
            torch_ltc.sync(wait=True)
            rows.append(row.clone())
            x.t()[0].sub_(row[0])
            torch_ltc.sync(wait=True)
        return [x.tolist(), [row.tolist() for row in rows]]

    assert values("ltc") == values("cpu")
    assert arrays.runs >= 4


# ---- failures while compiling


def compile_fails(error: Callable[[], BaseException], name: str = "failing") -> Backend:
    class Failing(Backend):
        def __init__(self) -> None:
            self.name = name
            self.asked = 0

        def compile(self, program: Program) -> Any:
            self.asked += 1
            for call in program.calls:
                if call.name == "aten::cos":
                    raise error()
            raise error()

    return Failing()


ERRORS: list[Callable[[], BaseException]] = [
    lambda: ValueError("too hard"),
    lambda: CompileError("too hard"),
    lambda: RuntimeError("too hard\nwith a second line"),
    lambda: NotImplementedError("too hard"),
    lambda: KeyError("too hard"),
    lambda: AssertionError("too hard"),
]


@pytest.mark.parametrize("form", [Form.RECORDED, Form.FUNCTIONAL])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error()).__name__)
def test_a_failing_compile_warns_once_and_the_interpreter_runs(error: Any, form: Form) -> None:
    backend: Any = compile_fails(error)
    backend.form = form
    x = lazy(torch.ones(2))
    with registered(backend), torch_ltc.use_backend("failing"), seen_events() as seen:
        with pytest.warns(BackendWarning) as caught:
            for _ in range(4):
                y = x.sin().cos()
                torch_ltc.sync(wait=True)
        assert torch.allclose(y.cpu(), torch.ones(2).sin().cos())
        torch_ltc.sync(wait=True)
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith("failing cannot compile program")
    assert "too hard" in message
    assert "second line" not in message
    assert "aten::cos" in message
    assert f"recorded at {__file__}:" in message
    assert "the program runs in the interpreter instead" in message
    assert warning.filename == __file__
    assert backend.asked == 1
    assert set(used(seen)) == {"interpreter"}
    (refusal,) = (event for event in seen if isinstance(event, events.RefusalEvent))
    assert (refusal.backend, refusal.stage) == ("failing", "compile")


def test_a_warning_of_a_read_points_at_the_line_that_reads() -> None:
    x = lazy(torch.ones(2))
    with (
        registered(compile_fails(ERRORS[0])),
        torch_ltc.use_backend("failing"),
        pytest.warns(BackendWarning) as caught,
    ):
        for _ in range(3):
            x.sin().cos().tolist()
    assert [warning.filename for warning in caught] == [__file__]


def test_a_warning_that_is_an_error_loses_nothing() -> None:
    x = lazy(torch.ones(2))
    with registered(compile_fails(ERRORS[0])), torch_ltc.use_backend("failing"):
        x.add_(1)
        torch_ltc.sync(wait=True)
        with pytest.raises(BackendWarning, match="failing cannot compile"):
            x.add_(1)
            torch_ltc.sync(wait=True)
        assert x.tolist() == [3.0, 3.0]
        x.add_(1)
        assert x.tolist() == [4.0, 4.0]


def test_policy_error_raises_at_every_run_and_leaves_the_device_usable() -> None:
    x = lazy(torch.ones(2))
    failing = registered(compile_fails(ERRORS[0]))
    with failing, settings.scope(backend_failure="error"), torch_ltc.use_backend("failing"):
        x.add_(1).sin_()
        torch_ltc.sync(wait=True)
        before = x.tolist()
        for _ in range(3):
            with pytest.raises(CompileError, match="failing cannot compile program") as caught:
                x.add_(1).sin_()
                torch_ltc.sync(wait=True)
            assert f"recorded at {__file__}:" in str(caught.value)
            assert isinstance(caught.value.__cause__, ValueError)
            torch_ltc.sync(wait=True)
            assert x.tolist() == before
        y = x.sin()
        assert torch.allclose(y.cpu(), torch.tensor(before).sin())
    x.add_(1)
    assert x.tolist() == (torch.tensor(before) + 1).tolist()


def test_policy_error_raises_at_a_read_and_the_lost_tensor_stays_lost() -> None:
    x = lazy(torch.ones(2))
    with registered(compile_fails(ERRORS[0])), settings.scope(backend_failure="error"):
        with torch_ltc.use_backend("failing"):
            x.sin().tolist()
            y = x.sin()
            with pytest.raises(CompileError):
                y.tolist()
            with pytest.raises(LtcError, match="never computed"):
                y.tolist()
        assert x.tolist() == [1.0, 1.0]


def test_what_was_refused_with_a_warning_is_an_error_when_the_policy_says_so() -> None:
    x = lazy(torch.ones(2))
    with registered(compile_fails(ERRORS[0])), torch_ltc.use_backend("failing"):
        with pytest.warns(BackendWarning):
            steps(3, lambda: x.add_(1))
        with settings.scope(backend_failure="error"), pytest.raises(CompileError):
            steps(1, lambda: x.add_(1))
        assert x.tolist() == [4.0, 4.0]


def test_a_refusal_by_one_backend_is_none_by_another() -> None:
    functional = FunctionalBackend()
    x = lazy(torch.ones(2))
    with registered(compile_fails(ERRORS[0]), functional):
        with torch_ltc.use_backend("failing"), pytest.warns(BackendWarning):
            steps(3, lambda: x.add_(1))
        with torch_ltc.use_backend("functional"):
            steps(3, lambda: x.add_(1))
    assert functional.runs == 3
    assert x.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("built", [None, 3, "text", [], object()], ids=["None", "number", "text", "list", "object"])
def test_a_compile_that_gives_no_function_is_refused(built: object) -> None:
    class Odd(Backend):
        name = "odd"

        def compile(self, program: Program) -> Any:
            return built

    x = lazy(torch.ones(2))
    told = pytest.warns(BackendWarning, match=r"odd compiled program \d+ to \w+[\s\S]*try: return a function")
    with registered(Odd), torch_ltc.use_backend("odd"), told:
        steps(3, lambda: x.add_(1))
    assert x.tolist() == [4.0, 4.0]


# ---- calls without a rule


def test_calls_without_a_rule_run_with_pytorchs_kernels_and_one_warning() -> None:
    backend = FunctionalBackend()
    backend.refused_ops = {"aten::cos"}
    x = lazy(torch.ones(2))
    with registered(backend), torch_ltc.use_backend("functional"), seen_events() as seen:
        with pytest.warns(BackendWarning) as caught:
            for _ in range(4):
                y = x.sin().cos().exp()
                torch_ltc.sync(wait=True)
        assert torch.allclose(y.cpu(), torch.ones(2).sin().cos().exp())
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(f"functional has no rule for aten::cos ({__file__}:")
    assert message.endswith("PyTorch's kernels run them instead")
    assert used(seen).count("functional") == 3
    assert not any(isinstance(event, events.RefusalEvent) for event in seen)


def test_calls_without_a_rule_are_an_error_when_the_policy_says_so() -> None:
    backend = FunctionalBackend()
    backend.refused_ops = {"aten::cos"}
    x = lazy(torch.ones(2))
    with registered(backend), settings.scope(backend_failure="error"), torch_ltc.use_backend("functional"):
        x.sin().cos().tolist()
        with pytest.raises(UnsupportedCallError, match="functional has no rule for aten::cos") as caught:
            x.sin().cos().tolist()
        assert f"recorded at {__file__}:" in str(caught.value)
        assert x.sin().tolist() == torch.ones(2).sin().tolist()


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
