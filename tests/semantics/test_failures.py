"""A call that fails when its program runs: raised once, named, and only what depends on it is lost."""

from __future__ import annotations

import gc
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import assert_same, counted, lazy, observe, probe
from torch_ltc.backends import interpreter
from torch_ltc.config import settings
from torch_ltc.device import uploads
from torch_ltc.errors import DeviceLostError, ExecutionError, LtcError, PoisonedTensorError
from torch_ltc.execute.device_loss import device_loss
from torch_ltc.execute.executor import executor
from torch_ltc.lowering.interface import Arguments
from torch_ltc.program.instruction import Call

pytestmark = pytest.mark.usefixtures("no_fallback")


def table() -> Tensor:
    """An embedding table of three rows."""
    return lazy(torch.arange(6.0).view(3, 2))


def line_number() -> int:
    """The caller's line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


@pytest.mark.usefixtures("backend")
def test_failing_call_is_named_with_its_shapes_and_the_users_line() -> None:
    torch_ltc.ir_cache.reset()
    for _ in range(3):
        index = lazy(torch.tensor([1, 9]))
        rows = F.embedding(index, table())
        line = line_number() - 1
        with pytest.raises(ExecutionError) as caught:
            torch_ltc.sync(wait=True)
        error = caught.value
        assert error.op == "aten::embedding"
        assert error.input_shapes == ("float32[3,2]", "int64[2]")
        assert "aten::embedding failed when its program ran: index out of range in self" in str(error)
        assert "float32[3,2], int64[2]" in str(error)
        assert f"{__file__}:{line}" in str(error)
        assert isinstance(error.__cause__, (IndexError, RuntimeError))
        del rows


def test_failing_call_is_named_with_its_own_line_when_another_line_records_the_same_program() -> None:
    # The two lines share their place in the tree of programs.
    rows, good, bad = lazy(torch.ones(5, 3), torch.tensor([1]), torch.tensor([9]))
    torch_ltc.sync(wait=True)
    first = F.embedding(good, rows)
    torch_ltc.sync(wait=True)
    second = F.embedding(bad, rows)
    line = line_number() - 1
    with pytest.raises(ExecutionError) as caught:
        torch_ltc.sync(wait=True)
    assert f"test_failures.py:{line} " in str(caught.value)
    assert first.numel() == second.numel()


@pytest.mark.usefixtures("backend")
def test_error_is_raised_once_and_the_lost_tensor_says_so_for_ever() -> None:
    for _ in range(3):
        rows = F.embedding(lazy(torch.tensor([9])), table())
        with pytest.raises(ExecutionError) as first:
            rows.cpu()
        assert not isinstance(first.value, PoisonedTensorError)
        torch_ltc.sync(wait=True)
        for _again in range(2):
            with pytest.raises(PoisonedTensorError, match="aten::embedding") as later:
                rows.cpu()
            assert later.value.__cause__ is not None
        torch_ltc.sync(wait=True)


@pytest.mark.usefixtures("backend")
def test_independent_tensors_of_the_same_program_still_read() -> None:
    for _ in range(3):
        before = torch.ones(2, device="ltc") * 3
        rows = F.embedding(lazy(torch.tensor([9])), table())
        depends = rows.sum() + before
        after = before * 2
        drawn = torch.arange(3, device="ltc").flip(0)
        with pytest.raises(ExecutionError):
            torch_ltc.sync(wait=True)
        assert before.tolist() == [3.0, 3.0]
        assert after.tolist() == [6.0, 6.0]
        assert drawn.tolist() == [2, 1, 0]
        with pytest.raises(PoisonedTensorError):
            depends.cpu()
        with pytest.raises(PoisonedTensorError):
            (rows + 1).cpu()
        torch_ltc.sync(wait=True)


def test_using_a_lost_tensor_in_a_later_program_loses_that_result_only() -> None:
    rows = F.embedding(lazy(torch.tensor([9])), table())
    with pytest.raises(ExecutionError):
        torch_ltc.sync(wait=True)
    lost, sound = rows * 2, torch.ones(2, device="ltc") * 5
    assert sound.tolist() == [5.0, 5.0]
    with pytest.raises(PoisonedTensorError, match="index out of range"):
        lost.tolist()
    rows.data = torch.zeros(1, 2, device="ltc")
    assert (rows + 1).tolist() == [[1.0, 1.0]]


class Model(nn.Module):
    """Two parameters that are updated in place around an embedding that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((2,), 1.0))
        self.last = nn.Parameter(torch.full((2,), 10.0))
        self.rows = nn.Parameter(torch.arange(6.0).view(3, 2))

    def step(self, index: Tensor) -> Tensor:
        """In-place updates before and after the look-up, one of them of what was looked up."""
        with torch.no_grad():
            self.first.add_(1)
            self.first[:1].mul_(2)
            found = F.embedding(index, self.rows)
            self.last.sub_(1)
            self.rows[0].add_(found[0])
            self.first.add_(0.5)
            return found.sum()


def values(model: Model) -> list[list[float]]:
    """The parameters now."""
    return [parameter.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("good_steps", [0, 1, 2, 3])
def test_a_poisoned_step_leaves_parameters_right_and_the_device_usable(good_steps: int) -> None:
    # The failing step is interpreted or compiled, by how often its program has run before.
    model, expected = Model().to("ltc"), Model()
    good, bad = lazy(torch.tensor([1])), lazy(torch.tensor([7]))
    for _ in range(good_steps):
        model.step(good)
        expected.step(torch.tensor([1]))
        torch_ltc.sync(wait=True)
    lost = model.step(bad)
    with pytest.raises(ExecutionError, match="aten::embedding"):
        torch_ltc.sync(wait=True)
    # The calls that do not need what failed have happened; the one that does has not, and its target is as it was.
    with torch.no_grad():
        expected.first.add_(1)
        expected.first[:1].mul_(2)
        expected.last.sub_(1)
        expected.first.add_(0.5)
    assert values(model) == values(expected)
    with pytest.raises(PoisonedTensorError):
        lost.item()
    for _ in range(2):
        assert model.step(good).item() == expected.step(torch.tensor([1])).item()
        assert values(model) == values(expected)


def test_failing_compiled_program_gives_the_values_of_the_interpreter() -> None:
    # Random draws and in-place updates before the failure are not done twice.
    def run(backend: str) -> list[object]:
        with settings.scope(backend=backend):
            torch.manual_seed(0)
            state, rows = torch.zeros(4, device="ltc"), table()
            collected: list[object] = []
            for index in (0, 1, 2, 8, 1):
                state.add_(torch.randn(4, device="ltc"))
                kept = state * 2
                found = F.embedding(lazy(torch.tensor([index])), rows)
                noise = torch.rand(2, device="ltc")
                state.mul_(0.5)
                try:
                    torch_ltc.sync(wait=True)
                    collected.append(found.tolist())
                except ExecutionError as error:
                    collected.append(error.op)
                collected += [state.tolist(), kept.tolist(), noise.tolist()]
            return collected

    interpreted = run("interpreter")
    assert "aten::embedding" in interpreted
    assert run("torchscript") == interpreted


# Calls that are right in shape and fail on data, each after an in-place update.
DATA_FAILURES: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda bad: F.embedding(bad.long() * 9, torch.ones(3, 2, device="ltc")),
    "index_select": lambda bad: torch.ones(3, device="ltc").index_select(0, bad.long() * 9),
    "gather": lambda bad: torch.ones(3, device="ltc").gather(0, bad.long() * 9),
    "index": lambda bad: torch.ones(3, device="ltc")[bad.long() * 9],
    "scatter": lambda bad: torch.zeros(3, device="ltc").scatter(0, bad.long() * 9, 1.0),
    "integer division": lambda bad: torch.ones(1, dtype=torch.int64, device="ltc") // (1 - bad.long()),
    "remainder": lambda bad: torch.ones(1, dtype=torch.int64, device="ltc") % (1 - bad.long()),
    "integer floor division by mode": lambda bad: torch.div(
        torch.ones(1, dtype=torch.int64, device="ltc"), 1 - bad.long(), rounding_mode="trunc"
    ),
    "fmod": lambda bad: torch.fmod(torch.ones(1, dtype=torch.int64, device="ltc"), 1 - bad.long()),
    "cross_entropy": lambda bad: F.cross_entropy(torch.ones(1, 3, device="ltc"), bad.long() * 9),
    "inverse": lambda bad: torch.linalg.inv(torch.eye(2, device="ltc") * (1 - bad)),
    "cholesky": lambda bad: torch.linalg.cholesky(torch.eye(2, device="ltc") * (1 - 2 * bad)),
    "multinomial": lambda bad: torch.multinomial(torch.ones(3, device="ltc") * (1 - bad), 2),
    "bernoulli": lambda bad: torch.bernoulli(bad * 5),
    "one_hot": lambda bad: F.one_hot(bad.long() * 9, 3),
    "take": lambda bad: torch.ones(3, device="ltc").take(bad.long() * 9),
    "binary_cross_entropy": lambda bad: F.binary_cross_entropy(bad * 5, torch.ones(1, device="ltc")),
}


def test_memory_that_a_failing_program_has_resized_is_put_back() -> None:
    rows, wrong = lazy(torch.ones(5, 3)), lazy(torch.tensor([77]))
    for _ in range(3):
        small = lazy(torch.empty(0))
        torch_ltc.sync(wait=True)
        torch.add(rows, rows, out=small)
        lost = rows.index_select(0, wrong)
        with pytest.raises(ExecutionError, match="index out of range"):
            lost.tolist()
        assert small.tolist() == [[2.0] * 3] * 5


@pytest.mark.parametrize("name", DATA_FAILURES)
def test_in_place_update_before_a_failure_happens_once(name: str) -> None:
    # Compiled programs too, whichever call it is that fails.
    with settings.scope(backend="torchscript"):
        state = torch.zeros(2, device="ltc")
        for number, bad in enumerate([0.0, 0.0, 0.0, 1.0, 0.0], 1):
            flag = lazy(torch.tensor([bad]))
            torch_ltc.sync(wait=True)
            state.add_(1)
            result = DATA_FAILURES[name](flag)
            try:
                torch_ltc.sync(wait=True)
                assert bad == 0.0, "eager refuses this, and so must we"
            except ExecutionError:
                assert bad == 1.0
            assert state.tolist() == [number, number]
            del result


# Calls on 8-bit integers that refuse the number 1000.
NUMBER_FAILURES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "fill_": lambda x, number: x.clone().fill_(number),
    "clamp": lambda x, number: x.clamp(max=number),
    "masked_fill": lambda x, number: x.masked_fill(x > 0, number),
    "where": lambda x, number: torch.where(x > 0, x, number),
    "full": lambda x, number: torch.full((2,), number, dtype=torch.int8, device="ltc"),
    "pad": lambda x, number: F.pad(x, (1, 1), value=number),
    "normal_": lambda x, number: torch.zeros(3, device="ltc").normal_(0.0, 500.0 - number),
    "bernoulli_": lambda x, number: torch.zeros(3, device="ltc").bernoulli_(number / 500),
    "uniform_": lambda x, number: torch.zeros(3, device="ltc").uniform_(0.0, 500.0 - number),
}


@pytest.mark.parametrize("name", NUMBER_FAILURES)
def test_in_place_update_before_a_refused_number_happens_once(name: str) -> None:
    # Numbers are run-time inputs, and one that does not fit is refused when it is recorded or when it runs.
    with settings.scope(backend="torchscript"):
        state = torch.zeros(1, device="ltc")
        numbers = [1, 1, 1, *range(2, 12), 1000, 1]
        refused = 0
        for number in numbers:
            x = lazy(torch.zeros(3, dtype=torch.int8))
            torch_ltc.sync(wait=True)
            state.add_(1)
            try:
                result = NUMBER_FAILURES[name](x, number)
                torch_ltc.sync(wait=True)
                assert result.numel() > 0
            except RuntimeError:
                refused += 1
        assert state.item() == len(numbers)
        assert refused <= 1


def test_failure_in_backward_names_the_line_that_called_backward() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * F.embedding(torch.tensor([9]).to("ltc"), table()).sum()

    x = torch.ones(2, device="ltc", requires_grad=True)
    out = Fails.apply(x).sum()
    out.backward()
    with pytest.raises(ExecutionError, match=r"test_failures.py:\d+"):
        torch_ltc.sync(wait=True)
    assert out.item() == 4.0
    with pytest.raises(PoisonedTensorError):
        x.grad.cpu()


def test_an_error_when_recording_is_eagers_own_and_changes_nothing() -> None:
    x = torch.ones(2, 3, device="ltc")
    for wrong in (
        lambda: x @ x,
        lambda: x.view(7),
        lambda: x + torch.ones(4, device="ltc"),
        lambda: torch.cat([x, torch.ones(2, 2, device="ltc")]),
        lambda: x.sum(5),
        lambda: F.conv2d(x, x),
        lambda: x.add_(torch.ones(3, 2, 3, device="ltc")),
    ):
        with pytest.raises((RuntimeError, IndexError, NotImplementedError)) as caught:
            wrong()
        assert not isinstance(caught.value, LtcError)
    assert (x * 2).sum().item() == 12.0


@pytest.mark.parametrize(
    "call", [lambda x: x.long().softmax(0), lambda x: x.bool().cumsum_(0)], ids=["softmax", "cumsum"]
)
def test_a_dtype_that_eager_refuses_is_refused_at_the_latest_when_the_program_runs(
    call: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(RuntimeError) as eager:
        call(torch.ones(2))
    x = torch.ones(2, device="ltc")
    with pytest.raises(RuntimeError) as ours:
        call(x).cpu()
    assert str(eager.value) in str(ours.value)
    assert "test_failures.py" in str(ours.value) or ours.type is eager.type


def test_a_dtype_that_eager_refuses_is_not_taken_for_a_call_that_cannot_be_recorded() -> None:
    with pytest.raises(NotImplementedError, match="not implemented for"):
        torch.ones(2, dtype=torch.int64, device="ltc") << 1.5


def test_failed_runs_are_told_by_events_and_counters() -> None:
    torch_ltc.metrics.reset()
    with observe() as seen:
        rows = F.embedding(lazy(torch.tensor([9])), table())
        with pytest.raises(ExecutionError):
            rows.cpu()
    assert [run.failed for run in seen.runs] == [True]
    assert torch_ltc.metrics.counter_value("ExecuteFailed") == 1


def test_every_lost_tensor_names_the_failure_that_lost_it() -> None:
    first = F.embedding(lazy(torch.tensor([9])), table())
    second = torch.ones(3, device="ltc").index_select(0, lazy(torch.tensor([5])))
    with pytest.raises(ExecutionError):
        first.cpu()
    with pytest.raises(ExecutionError, match="aten::index_select"):
        second.cpu()
    with pytest.raises(PoisonedTensorError, match="aten::embedding"):
        first.cpu()


def test_no_failure_of_a_program_is_swallowed() -> None:
    # A check without a result loses no tensor: nobody would ever hear of it again.
    rows = F.embedding(lazy(torch.tensor([9])), table())
    inverse = torch.linalg.inv(torch.zeros(2, 2, device="ltc"))
    told = ""
    for _ in range(3):
        try:
            torch_ltc.sync(wait=True)
        except ExecutionError as error:
            told += str(error) + "".join(getattr(error, "__notes__", []))
    assert "aten::embedding" in told
    assert "linalg" in told
    assert (rows.numel(), inverse.numel()) == (2, 4)


def test_custom_operator_that_raises_is_a_failure_like_any_other() -> None:
    @torch.library.custom_op("torch_ltc_tests::refuses", mutates_args=(), device_types="cpu")
    def refuses(tensor: Tensor) -> Tensor:
        raise ValueError("no such thing")

    @refuses.register_fake
    def _(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    x = counted(torch.ones(2, device="ltc"))
    lost = refuses(x)
    with pytest.raises(ExecutionError, match=r"torch_ltc_tests::refuses.*no such thing"):
        torch_ltc.sync(wait=True)
    assert x.tolist() == [2.0, 2.0]
    assert probe.runs == 1
    with pytest.raises(PoisonedTensorError):
        lost.cpu()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_a_poisoned_step(name: str) -> None:
    # A whole step with its optimizer; the parameters stay where they were.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).to("ltc")
    optimizer = OPTIMIZERS[name](list(model.parameters()))

    def step(index: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([index]).to("ltc")).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        step(1).item()
    before = [parameter.detach().cpu() for parameter in model.parameters()]
    with pytest.raises(ExecutionError, match="aten::embedding"):
        step(11).item()
    assert_same([parameter.detach() for parameter in model.parameters()], before)
    assert all(0 <= step(1).item() < 10 for _ in range(3))
    assert not torch.equal(model[0].weight.detach().cpu(), before[0])


@pytest.mark.usefixtures("backend")
def test_a_failed_step_keeps_nothing_alive() -> None:
    def step() -> None:
        weight = lazy(torch.ones(50, 50))
        product = weight * 2
        rows = F.embedding(lazy(torch.tensor([1, 9])), table())
        with pytest.raises(ExecutionError):
            (rows.sum() + product.sum()).item()
        with pytest.raises(PoisonedTensorError):
            rows.cpu()

    torch_ltc.sync(wait=True)
    gc.collect()
    before = torch.ltc.memory_allocated()
    for _ in range(3):
        step()
    torch_ltc.sync(wait=True)
    gc.collect()
    assert torch.ltc.memory_allocated() == before


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("call", "eager"),
    [
        (lambda on: torch.zeros(2, 3, device=on)[torch.tensor([5], device=on)], IndexError),
        (lambda on: F.embedding(torch.tensor([9], device=on), torch.ones(2, 2, device=on)), IndexError),
        (lambda on: torch.linalg.inv(torch.zeros(2, 2, device=on)), torch.linalg.LinAlgError),
        (lambda on: torch.normal(torch.zeros(2, device=on), -torch.ones(2, device=on)), RuntimeError),
    ],
)
def test_late_error_is_of_the_class_that_eager_raises(call: Callable[[str], torch.Tensor], eager: type) -> None:
    with pytest.raises(eager) as wanted:
        call("cpu")
    with pytest.raises(eager) as caught:
        call("ltc").cpu()
    assert isinstance(caught.value, ExecutionError)
    assert type(wanted.value) in type(caught.value).__mro__
    assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_results_of_a_program_that_could_not_be_queued_say_so(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be memory that nobody has written to."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    parameter = torch.ones(3).to("ltc")
    other = torch.full((3,), 2.0).to("ltc")
    made = parameter * 3
    parameter.add_(1)
    with monkeypatch.context() as patched:
        patched.setattr(executor, "submit", refuse)
        with pytest.raises(type(error)):
            torch_ltc.sync()
    with pytest.raises(LtcError, match=f"recorded at {__file__}:"):
        made.tolist()
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert (other * parameter).tolist() == [2.0, 2.0, 2.0]


@pytest.fixture
def lost_device() -> Iterator[None]:
    """The device is there again after the test."""
    yield
    device_loss.forget()
    torch_ltc.sync(wait=True)


@pytest.mark.usefixtures("lost_device")
def test_after_the_loss_of_the_device_every_call_names_the_line_that_caused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a failed assertion on a GPU: a kernel that comes later is the one that fails."""
    run = interpreter.run_recorded_call

    def noticed_later(call: Call, values: list[Any], arguments: Arguments) -> None:
        if call.name.startswith("aten::mul"):
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")
        run(call, values, arguments)

    table, other = torch.ones(3, 2).to("ltc"), torch.ones(2).to("ltc")
    rows = torch.tensor([0, 1]).to("ltc")
    with settings.scope(backend="interpreter"), monkeypatch.context() as patched:
        patched.setattr(interpreter, "run_recorded_call", noticed_later)
        taken = table.index_select(0, rows)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        made = taken * 2
        with pytest.raises(DeviceLostError, match=f"{__file__}:{line} ") as first:
            made.tolist()
        assert "device-side assert" in str(first.value)
        assert "aten::index_select" in str(first.value)
        for _ in range(2):
            with pytest.raises(DeviceLostError, match=f"{__file__}:{line} "):
                (other + 1).tolist()


@pytest.mark.usefixtures("lost_device")
def test_work_that_notices_the_loss_of_the_device_says_so() -> None:
    def notice() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(DeviceLostError, match="unspecified launch failure"):
        executor.call(notice)


@pytest.mark.usefixtures("lost_device")
def test_uploads_are_never_freed_after_the_loss_of_the_device() -> None:
    data = torch.ones(2)
    uploads._note(data)
    before = sys.getrefcount(data)
    assert device_loss.told(RuntimeError("CUDA error: an illegal memory access was encountered")) is not None
    assert sys.getrefcount(data) == before + 1
    assert device_loss.told(RuntimeError("another error")) is None
