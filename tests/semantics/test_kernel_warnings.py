"""A kernel's warning on the worker is shown to the user as eager shows it, and the program goes on."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch

import torch_ltc
from tests.semantics.support import LONG_S
from tests.support.graphs import graphs_on_the_cpu
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.execute import kernel_warnings
from torch_ltc.execute.executor import executor

VALUES = torch.tensor([1 + 2j, 3 + 1j])
EXPECTED = [2.0, 4.0]


@pytest.fixture(autouse=True)
def repeated() -> Iterator[None]:
    """Warnings that PyTorch shows once a process are shown each time."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)
    torch.set_warn_always(before)


def cast(device: str) -> torch.Tensor:
    return VALUES.to(device).to(torch.float32) + 1


def run_compiled() -> torch.Tensor:
    """The result of a run by TorchScript, not yet read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            cast("ltc").cpu()
    return cast("ltc")


def run_interpreted() -> torch.Tensor:
    return cast("ltc")


RUNS = pytest.mark.parametrize("run", [run_compiled, run_interpreted])


@RUNS
def test_a_warning_as_an_error_is_raised_by_the_read_and_the_value_stays(run) -> None:
    with settings.scope(hot_after=2):
        result = run()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="discards the imaginary part"):
                result.cpu()
            assert result.tolist() == EXPECTED


@RUNS
def test_a_warning_is_shown_once_for_a_run_at_a_line_of_the_user(run, monkeypatch) -> None:
    # Other tests may have shown the same warning at a line of theirs.
    monkeypatch.setattr(kernel_warnings._state, "places", {})
    with settings.scope(hot_after=2):
        result = run()
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            assert result.tolist() == EXPECTED
            result.tolist()
    assert [(one.category, one.filename) for one in shown] == [(UserWarning, __file__)]
    assert "discards the imaginary part" in str(shown[0].message)


def test_the_line_is_that_of_the_call() -> None:
    result = run_interpreted()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        result.cpu()
    assert [one.lineno for one in shown] == [cast.__code__.co_firstlineno + 1]


def test_a_warning_of_a_call_that_runs_eagerly_reaches_python(capfd: pytest.CaptureFixture[str]) -> None:
    images = torch.randn(5, 7, device="ltc")
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.uint8, device="ltc")
    with settings.scope(fallback="allow"):
        for _ in range(3):
            capfd.readouterr()
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                assert images[mask].shape == (3, 7)
            assert ["torch.uint8 is now deprecated" in str(one.message) for one in shown] == [True]
            assert {one.filename for one in shown} == {__file__}
            assert "Warning" not in capfd.readouterr().err


def test_the_inference_of_shapes_warns_of_nothing() -> None:
    def count(device: str) -> int:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            # Sizes that no other test has.
            x = torch.ones(3, 2, 5, dtype=torch.complex64, device=device)
            x.to(torch.float32).sum().item()
        return len(shown)

    assert [count("ltc"), count("ltc")] == [count("cpu")] * 2 == [1, 1]


def test_a_line_warns_once_where_eager_warns_once() -> None:
    def count(device: str) -> int:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            for _ in range(4):
                cast(device).cpu()
        return len(shown)

    with settings.scope(hot_after=2):
        assert count("ltc") == count("cpu") == 1


def test_each_category_is_kept() -> None:
    def warn() -> None:
        for category in (UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning, ResourceWarning):
            warnings.warn(category.__name__, category, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        executor.call(warn)
        assert shown == []
        warnings.simplefilter("always")
        executor.show_warnings()
    kinds = [(str(one.message), one.category.__name__) for one in shown]
    assert kinds[:4] == [(name, name) for name, _ in kinds[:4]]
    assert kinds[4] == ("ResourceWarning", "Warning")


def test_warnings_of_other_threads_go_their_way() -> None:
    executor.call(lambda: None)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        executor.call(lambda: None)
        warnings.warn("here", UserWarning, stacklevel=1)
        other = threading.Thread(target=lambda: warnings.warn("there", UserWarning, stacklevel=1))
        other.start()
        other.join()
    assert [str(one.message) for one in shown] == ["here", "there"]


def test_the_filters_can_be_sent_to_another_process() -> None:
    with warnings.catch_warnings():
        executor.call(lambda: None)
        sent = pickle.loads(pickle.dumps(warnings.filters))
        assert len(sent) == len(warnings.filters)
        assert sent[0][1].match("anything") is None


def test_a_listener_that_reads_on_the_worker_leaves_the_warning_to_the_users_thread() -> None:
    x = torch.ones(3).to("ltc")
    seen: list[list[float]] = []

    def listen(event: events.ExecuteEvent) -> None:
        if not seen:
            seen.append([])
            warnings.warn("of the worker", UserWarning, stacklevel=1)
            seen.append(x.tolist())

    stop = events.subscribe(listen, events.ExecuteEvent)
    try:
        y = x + 1
        torch_ltc.sync()
        future = executor.submit(lambda: None)
        future.result(LONG_S)
    finally:
        stop()
    assert seen[1:] == [[1.0] * 3]
    with pytest.warns(UserWarning, match="of the worker"):
        y.tolist()


def test_a_call_that_is_refused_does_not_warn_before() -> None:
    larger = torch.ones(2, 3, 4)
    for device in ("cpu", "ltc"):
        target, other = torch.ones(3, 4, device=device), larger.to(device)
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
                torch.mul(target, other, out=target)
        assert not shown


@pytest.mark.parametrize("backend", ["interpreter", "torchscript"])
def test_a_kernel_warns_as_often_as_in_eager(backend: str) -> None:
    def seen(device: str) -> list[tuple[type[Warning], int]]:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            for _ in range(4):
                torch.ones(1, device=device).std().item()
                torch.add(torch.ones(2, device=device), 1, out=torch.empty(3, device=device)).tolist()
        return [(one.category, one.lineno) for one in shown]

    with torch_ltc.use_backend(backend):
        assert seen("ltc") == seen("cpu")


def test_a_kernel_in_a_graph_warns_at_each_replay_at_the_line_of_its_call() -> None:
    def seen(device: str) -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            for _ in range(5):
                x = torch.ones(1, device=device)
                cast(device).add_(x.std()).tolist()
        return sorted((str(one.message)[:20], one.lineno) for one in shown)

    with settings.scope(cuda_graphs="always"), torch_ltc.use_backend("interpreter"), graphs_on_the_cpu() as graphs:
        assert seen("ltc") == seen("cpu")
        assert graphs.captures


def test_a_warning_before_an_error_is_shown_by_the_sync_that_raises_it() -> None:
    values, index = torch.ones(3, dtype=torch.complex64).to("ltc"), torch.tensor([7]).to("ltc")
    cast("ltc")
    lost = values.index_select(0, index)
    with (
        warnings.catch_warnings(record=True) as shown,
        pytest.raises(IndexError, match="index_select"),
    ):
        warnings.simplefilter("always")
        torch_ltc.sync(wait=True)
    assert ["discards the imaginary part" in str(each.message) for each in shown] == [True]
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="index_select"):
        warnings.simplefilter("error")
        lost.cpu()
