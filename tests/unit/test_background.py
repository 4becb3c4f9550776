"""Threads that compile in the background, their manners, and the process that compiles for this one."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.backends import record
from torch_ltc.compile.artifacts import Destination
from torch_ltc.compile.background import Background
from torch_ltc.compile.compiler_client import CompilerClient, CompilerDied
from torch_ltc.compile.compiler_process import answer, read_message, write_message
from torch_ltc.compile.disk_cache import Key
from torch_ltc.lowering.gil import CompileCancelled, cooperative, yield_gil
from torch_ltc.lowering.lower import Executable, lower
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.serialize import (
    NotSerializableError,
    dump_data,
    dump_executable,
    load_data,
    load_executable,
)
from torch_ltc.program.instruction import Call
from torch_ltc.program.spec import make_spec
from torch_ltc.source import UNKNOWN

LONG_S = 60.0


def test_work_of_a_lane_runs_in_order_and_is_waited_for() -> None:
    background = Background()
    done: list[int] = []
    for n in range(20):
        background.submit("lane", f"work {n}", lambda n=n: done.append(n))  # type: ignore[misc]
    assert background.wait(LONG_S)
    assert done == list(range(20))
    assert background.titles() == []


def test_lanes_do_not_wait_for_each_other_and_say_what_they_do() -> None:
    background = Background()
    gate, reached = threading.Event(), threading.Event()
    background.submit("slow", "a long one", lambda: gate.wait(LONG_S) and None)
    background.submit("quick", "a short one", reached.set)
    assert reached.wait(LONG_S)
    assert background.titles()[0] == "a long one"
    assert not background.wait(0.01)
    gate.set()
    assert background.wait(LONG_S)


def test_a_mistake_in_the_work_is_shown_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(kind))
    background = Background()
    done = threading.Event()
    background.submit("lane", "wrong", lambda: 1 // 0 and None)
    background.submit("lane", "right", done.set)
    assert done.wait(LONG_S)
    assert shown == [ZeroDivisionError]


def test_stopping_abandons_work_that_gives_way_and_finishes_one_lane() -> None:
    background = Background()
    began, kept = threading.Event(), threading.Event()
    seen: list[str] = []

    def endless() -> None:
        began.set()
        try:
            while True:
                yield_gil()
        except CompileCancelled:
            seen.append("abandoned")
            raise

    def write() -> None:
        time.sleep(0.05)
        kept.set()

    background.submit("here", "endless", endless)
    background.submit("here", "never", lambda: seen.append("never"))
    background.submit("disk", "write", write)
    assert began.wait(LONG_S)
    background.stop(finish="disk")
    assert kept.is_set()
    assert seen == ["abandoned"]
    background.submit("here", "too late", lambda: seen.append("late"))
    assert "too late" not in background.titles()


def test_a_cooperative_thread_rests_and_others_never_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    yield_gil()
    assert rests == []
    with cooperative():
        yield_gil()
        yield_gil()
    yield_gil()
    assert len(rests) == 2


def test_the_switch_interval_is_short_while_a_thread_is_cooperative() -> None:
    before = sys.getswitchinterval()
    with cooperative():
        with cooperative():
            assert sys.getswitchinterval() < before
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_switch_interval_that_the_user_sets_meanwhile_stays() -> None:
    before = sys.getswitchinterval()
    try:
        with cooperative():
            sys.setswitchinterval(0.02)
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(before)


def test_nobody_waits_for_work_that_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    background, done = Background(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            background.submit("lane", "work", done.set)
    assert background.wait(LONG_S)
    background.submit("lane", "work", done.set)
    assert done.wait(LONG_S)


def test_messages_keep_their_bounds() -> None:
    pipe = io.BytesIO()
    for message in (b"", b"one", b"x" * 100_000):
        write_message(pipe, message)
    pipe.seek(0)
    assert [read_message(pipe) for _ in range(4)] == [b"", b"one", b"x" * 100_000, None]
    pipe.truncate(pipe.seek(0) + 9)
    assert read_message(io.BytesIO(b"\x05\0\0\0\0\0\0\0abc")) is None


def test_operators_and_shapes_are_the_same_objects_after_the_way() -> None:
    spec = make_spec(torch.float32, (2, 3), (3, 1))
    call = Call(torch.ops.aten.add.Tensor, (1, 2.5, torch.float16), {}, (), (), 0, UNKNOWN)
    read_spec, read_call = load_data(dump_data((spec, call)))
    assert read_spec is spec
    assert read_call.op is torch.ops.aten.add.Tensor
    assert read_call.args == call.args


def test_an_unknown_operator_is_told() -> None:
    data = dump_data(torch.ops.aten.add.Tensor).replace(b"aten::add", b"aten::adx")
    with pytest.raises(NotSerializableError, match="aten::adx"):
        load_data(data)


def test_what_cannot_be_written_down_is_told() -> None:
    with pytest.raises(NotSerializableError):
        dump_data(lambda: 1)


class _Runs:
    """Stands for something that takes long to write: meanwhile another thread runs the executable."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        self._executable.proven = True
        self._executable.computation.settled = True
        return list, ()


def test_an_executable_that_runs_for_the_first_time_while_it_is_written_is_written_as_not_run() -> None:
    backend = registry.get("torchscript")
    program, _ = record(lambda x: x + 1, torch.ones(2))
    executable = lower(backend, program, [], frozenset(), strict=False)
    executable.computation.busy = _Runs(executable)  # type: ignore[attr-defined]
    data = dump_executable(backend, program, executable)
    assert data is not None
    assert executable.computation.settled
    read = load_executable(backend, program, data)
    assert not read.proven
    assert not read.computation.settled


def test_a_request_of_other_versions_is_not_answered() -> None:
    assert "have changed" in answer(pickle.dumps(("other versions", b""))).unable


def test_a_request_that_cannot_be_read_is_not_answered() -> None:
    assert answer(b"nonsense").unable


@pytest.fixture(scope="module")
def process() -> CompilerClient:
    return CompilerClient()


def test_the_process_answers_and_is_ended(process: CompilerClient) -> None:
    assert process.pid is None
    assert "have changed" in process.request(pickle.dumps(("other versions", b""))).unable
    pid = process.pid
    assert pid is not None
    assert os.getpgid(pid) == pid != os.getpgid(0)
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    large = process.request(pickle.dumps(("other versions", b"x" * 3_000_000)))
    assert "have changed" in large.unable
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CompilerDied, match="status -9"):
        process.request(b"nonsense")
    assert process.request(b"nonsense").unable
    process.close()
    assert process.pid is None
    with pytest.raises(CompilerDied):
        process.request(b"nonsense")


_SLOW_BOOT = (
    "import sys, time; time.sleep(1); sys.path[:] = {path!r}; from torch_ltc.compile import compiler_process; "
    "compiler_process.answer = lambda request: compiler_process.Answer(b'made'); "
    "compiler_process.main()  # {niceness}"
)


def test_a_request_of_a_run_that_ends_before_the_compiler_has_started_is_answered_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a pipe takes by itself, and the end of the pipe right behind it."""
    monkeypatch.setattr("torch_ltc.compile.compiler_client._BOOT", _SLOW_BOOT)
    place = Destination(str(tmp_path / "kept"), 1 << 20, Key("name", "text"), LONG_S)
    client, began = CompilerClient(), time.monotonic()
    message = pickle.dumps(("versions", b"x" * 300_000, place))

    def ask() -> None:
        with contextlib.suppress(CompilerDied, CompileCancelled):
            client.request(message, lasting=True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while client.pid is None:
        time.sleep(0.001)
    time.sleep(0.2)
    client.close()
    while not (tmp_path / "kept").exists() and time.monotonic() < began + LONG_S:
        time.sleep(0.05)
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".ltc"]


def test_no_process_without_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(CompilerDied, match="no Python"):
        CompilerClient().request(b"")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(CompilerDied, match="no process"):
        CompilerClient().request(b"")
