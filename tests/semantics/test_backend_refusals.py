"""What becomes of programs that a backend cannot compile, and of calls that it has no rule for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_ltc
from tests.semantics.support import lazy
from tests.support.backends import (
    FunctionalBackend,
    registered,
    seen_events,
    steps,
    used,
)
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.errors import (
    BackendWarning,
    CompileError,
    LtcError,
    UnsupportedCallError,
)
from torch_ltc.lowering.interface import Backend, Form
from torch_ltc.program.instruction import Program

pytestmark = [pytest.mark.blocking_tiers, pytest.mark.usefixtures("same_backend_afterwards")]


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
