"""Step closures: order, threads, failures, draining."""

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from torch_ltc import closures
from torch_ltc.closures import AsyncClosureHandler, ClosureHandler
from torch_ltc.config import settings
from torch_ltc.errors import ClosureError

LONG_S = 10.0


@pytest.fixture(autouse=True)
def own_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test has its own device context, drained at its end."""
    monkeypatch.setattr(closures, "_contexts", {})
    yield
    closures.wait_step_closures(LONG_S)


def fail(message: str = "no") -> None:
    raise ValueError(message)


def test_closures_run_once_in_order_with_their_arguments() -> None:
    seen: list[object] = []
    closures.add_step_closure(lambda *args: seen.append(args), (1, 2))
    closures.add_step_closure(lambda: seen.append("second"))
    assert seen == []
    closures.run_step_closures()
    closures.run_step_closures()
    assert seen == [(1, 2), "second"]


def test_arguments_are_those_of_the_time_of_adding() -> None:
    seen: list[int] = []
    arguments = [1]
    closures.add_step_closure(seen.append, arguments)
    arguments[0] = 2
    closures.run_step_closures()
    assert seen == [1]


def test_closure_added_by_a_closure_runs_in_the_next_step() -> None:
    seen: list[int] = []
    closures.add_step_closure(lambda: closures.add_step_closure(seen.append, (1,)))
    closures.run_step_closures()
    assert seen == []
    closures.run_step_closures()
    assert seen == [1]


def test_one_failing_closure_raises_its_own_error_and_the_others_run() -> None:
    seen: list[int] = []
    closures.add_step_closure(fail)
    closures.add_step_closure(seen.append, (1,))
    with pytest.raises(ValueError, match=r"^no$"):
        closures.run_step_closures()
    assert seen == [1]
    closures.run_step_closures()


def test_several_failing_closures_are_all_named() -> None:
    with pytest.raises(ClosureError, match=r"ValueError: a\n  ValueError: b") as caught:
        ClosureHandler()([lambda: fail("a"), lambda: fail("b")])
    assert [str(error) for error in caught.value.exceptions] == ["a", "b"]
    assert caught.value.__cause__ is caught.value.exceptions[0]


def test_asynchronous_closure_runs_on_another_thread_beside_the_caller() -> None:
    go = threading.Event()
    seen: list[threading.Thread] = []

    def closure() -> None:
        assert go.wait(LONG_S)
        seen.append(threading.current_thread())

    closures.add_step_closure(closure, run_async=True)
    closures.run_step_closures()
    assert seen == []
    go.set()
    closures.wait_step_closures(LONG_S)
    assert seen[0] is not threading.current_thread()
    assert seen[0].daemon


def test_asynchronous_closures_run_in_order() -> None:
    seen: list[int] = []
    for number in range(50):
        closures.add_step_closure(seen.append, (number,), run_async=True)
        closures.run_step_closures()
    closures.wait_step_closures(LONG_S)
    assert seen == list(range(50))


def test_failure_is_raised_at_the_next_step_and_the_refused_closure_waits_for_the_one_after() -> None:
    done = threading.Event()
    seen: list[int] = []
    closures.add_step_closure(fail, run_async=True)
    closures.add_step_closure(done.set, run_async=True)
    closures.run_step_closures()
    assert done.wait(LONG_S), "a closure behind a failing one must run"
    closures.add_step_closure(seen.append, (1,), run_async=True)
    closures.add_step_closure(seen.append, (2,))
    message = "^Cannot run asynchronous closure due to previously raised exception"
    with pytest.raises(RuntimeError, match=message) as caught:
        closures.run_step_closures()
    assert isinstance(caught.value.__cause__, ValueError)
    assert seen == [2], "closures of the step itself run although the asynchronous ones are refused"
    closures.run_step_closures()
    closures.wait_step_closures(LONG_S)
    assert seen == [2, 1]


def test_wait_raises_every_failure_once() -> None:
    handler = AsyncClosureHandler()
    handler([lambda: fail("a"), lambda: fail("b")])
    expected = r"closures failed\n  ValueError: a\n  ValueError: b\n  the first at .*test_closures\.py:\d+ in <lambda>"
    with pytest.raises(ClosureError, match=expected):
        handler.wait(LONG_S)
    handler.wait(LONG_S)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def test_closure_that_ends_its_thread_is_a_failure_like_any_other(error: type[BaseException]) -> None:
    handler, ran = AsyncClosureHandler(), []

    def leave() -> None:
        raise error("left")

    handler([leave, lambda: ran.append(1)])
    with pytest.raises(ClosureError, match="left") as caught:
        handler.wait(LONG_S)
    assert isinstance(caught.value.__cause__, error)
    assert ran == [1]


def test_nobody_waits_for_a_closure_that_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    handler = AsyncClosureHandler()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            handler([lambda: None])
    handler.wait(LONG_S)


def test_wait_gives_up_after_its_timeout() -> None:
    go = threading.Event()
    handler = AsyncClosureHandler()
    handler.run(go.wait)
    with pytest.raises(ClosureError, match=r"1 asynchronous closures had not finished after 0.01 s"):
        handler.wait(0.01)
    go.set()
    handler.wait(LONG_S)


def test_submission_waits_while_the_queue_is_full() -> None:
    go, started, submitted = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        assert go.wait(LONG_S)

    def submit() -> None:
        with settings.scope(closure_queue_bound=1):
            handler([lambda: None, lambda: None])
        submitted.set()

    handler = AsyncClosureHandler()
    handler.run(first)
    assert started.wait(LONG_S)
    thread = threading.Thread(target=submit)
    thread.start()
    assert not submitted.wait(0.05)
    go.set()
    assert submitted.wait(LONG_S)
    thread.join()
    handler.wait(LONG_S)


def test_closure_may_submit_closures_when_the_queue_is_full() -> None:
    seen: list[int] = []
    handler = AsyncClosureHandler(max_queue_size=1)
    handler.run(lambda: handler([lambda: seen.append(1), lambda: seen.append(2), lambda: seen.append(3)]))
    handler.wait(LONG_S)
    assert seen == [1, 2, 3]


def test_closure_that_waits_for_closures_is_an_error_not_a_hang() -> None:
    handler = AsyncClosureHandler()
    handler.run(handler.wait)
    with pytest.raises(ClosureError, match="itself among them"):
        handler.wait(LONG_S)


def test_queue_of_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="max_queue_size is 0"):
        AsyncClosureHandler(max_queue_size=0)


def test_thread_ends_when_idle_and_a_new_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closures, "_IDLE_S", 0.01)
    threads: list[threading.Thread] = []
    handler = AsyncClosureHandler()
    for _ in range(2):
        handler.run(lambda: threads.append(threading.current_thread()))
        handler.wait(LONG_S)
        threads[-1].join(LONG_S)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]


def test_idle_thread_keeps_nothing_of_the_last_closure_alive() -> None:
    class Payload:
        pass

    payload = Payload()
    alive = weakref.ref(payload)
    handler = AsyncClosureHandler()
    handler.run(lambda held=payload: None)  # type: ignore[misc]
    handler.wait(LONG_S)
    del payload
    # Shorter than the time after which an idle thread ends, and with it all that it holds.
    deadline = time.monotonic() + closures._IDLE_S / 2
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None


def test_contexts_are_one_per_device() -> None:
    context = closures.get_device_context()
    assert context is closures.get_device_context("ltc") is closures.run_step_closures()
    assert context.device == "ltc"
    assert closures.get_device_context("ltc:1") is not context


def test_process_ends_after_the_queued_closures_and_shows_what_they_raised() -> None:
    code = (
        "import time; from torch_ltc.closures import AsyncClosureHandler; handler = AsyncClosureHandler();"
        "handler([lambda: time.sleep(0.1), lambda: print('ran'), lambda: 1 / 0])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (120, "ran\n")
    assert "at exit: asynchronous closures failed\n  ZeroDivisionError: division by zero" in result.stderr
