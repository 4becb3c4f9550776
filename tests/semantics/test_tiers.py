"""Tiers: the interpreter first, the backend once it has compiled in the background; files of earlier processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ltc
from tests.semantics.support import LONG_S, lazy
from tests.support.backends import registered, run_recorded, seen_events
from torch_ltc import debug, events, metrics
from torch_ltc.compile import jobs
from torch_ltc.config import settings
from torch_ltc.errors import BackendWarning, CompileError
from torch_ltc.lowering.interface import Backend
from torch_ltc.program.instruction import Program


@pytest.fixture(autouse=True)
def background() -> Iterator[None]:
    """Nothing is known from before, and programs are compiled as by default."""
    torch_ltc.ir_cache.reset()
    with settings.scope(tiers="background"):
        yield
        torch_ltc.wait_for_compiles()
        torch_ltc.sync(wait=True)


class Slow(Backend):
    """Runs programs call by call, and compiles one when the gate is open."""

    name = "slow"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: list[str] = []
        self.compiled = 0

    def compile(self, program: Program) -> Any:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(LONG_S)
        self.compiled += 1
        return lambda *given: run_recorded(program, given)


@pytest.fixture
def slow() -> Iterator[Slow]:
    backend = Slow()
    with registered(backend), torch_ltc.use_backend("slow"):
        yield backend
        backend.gate.set()
        torch_ltc.wait_for_compiles()


def step(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).cos()


def backends_of(seen: Any) -> list[str]:
    return [event.backend for event in seen if isinstance(event, events.ExecuteEvent)]


def test_neither_recording_nor_running_waits_for_a_compilation(slow: Slow) -> None:
    x = torch.randn(4)
    held = lazy(x)
    with seen_events() as seen:
        for _ in range(5):
            torch.testing.assert_close(step(held).cpu(), step(x))
        assert backends_of(seen) == ["interpreter"] * 5
        assert slow.compiled == 0
        assert [title.split()[0] for title in jobs.compiling_now()] == ["compile"]
        assert "being compiled" in debug.compilations()
        slow.gate.set()
        torch_ltc.wait_for_compiles()
        assert jobs.compiling_now() == []
        torch.testing.assert_close(step(held).cpu(), step(x))
    assert backends_of(seen)[-1] == "slow"
    assert slow.compiled == 1
    assert "torch_ltc" in slow.threads[0]
    assert slow.threads[0] != threading.current_thread().name


def test_a_program_that_is_seen_once_is_never_compiled(slow: Slow) -> None:
    slow.gate.set()
    x = lazy(torch.randn(3))
    for n in range(4):
        y = x
        for _ in range(n + 1):
            y = y.exp()
        y.sum().item()
    torch_ltc.wait_for_compiles()
    assert slow.threads == []


def test_blocking_compiles_when_a_program_is_due(slow: Slow) -> None:
    slow.gate.set()
    held = lazy(torch.randn(3))
    with settings.scope(tiers="blocking"), seen_events() as seen:
        for _ in range(3):
            step(held).cpu()
    assert backends_of(seen) == ["interpreter", "slow", "slow"]


def test_without_tiers_every_program_is_compiled_before_it_runs(slow: Slow) -> None:
    slow.gate.set()
    held = lazy(torch.randn(3))
    with settings.scope(tiers="off"), seen_events() as seen:
        step(held).cpu()
        held.exp().cos().cpu()
    assert backends_of(seen) == ["slow", "slow"]
    assert slow.compiled == 2


def test_a_failure_in_the_background_warns_once_at_a_later_sync(slow: Slow) -> None:
    held = lazy(torch.randn(3))
    slow.compile = lambda program: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    with seen_events() as seen, pytest.warns(BackendWarning, match="slow cannot compile") as caught:
        for _ in range(3):
            step(held).cpu()
        torch_ltc.wait_for_compiles()
        for _ in range(3):
            torch_ltc.sync()
            step(held).cpu()
    assert len(caught) == 1
    assert backends_of(seen) == ["interpreter"] * 6
    assert len([event for event in seen if isinstance(event, events.RefusalEvent)]) == 1


def test_a_failure_in_the_background_is_raised_at_the_next_sync_if_it_is_an_error(slow: Slow) -> None:
    held = lazy(torch.randn(3))
    slow.compile = lambda program: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    with settings.scope(backend_failure="error"), pytest.raises(CompileError, match="ZeroDivisionError"):
        for _ in range(2):
            step(held).cpu()
        torch_ltc.wait_for_compiles()
        torch_ltc.sync()
    torch_ltc.sync()


def test_a_backend_that_would_end_the_process_does_not_end_the_thread(slow: Slow) -> None:
    held = lazy(torch.randn(3))
    slow.compile = lambda program: sys.exit(3)  # type: ignore[method-assign,assignment]
    with pytest.raises(CompileError, match="SystemExit"):
        for _ in range(2):
            step(held).cpu()
        torch_ltc.wait_for_compiles()
        torch_ltc.sync()
    slow.compile = lambda program: lambda *given: run_recorded(program, given)  # type: ignore[method-assign,assignment]
    for _ in range(2):
        held.exp().cos().cpu()
    torch_ltc.wait_for_compiles()
    with seen_events() as seen:
        held.exp().cos().cpu()
    assert backends_of(seen) == ["slow"]


def test_settings_of_a_scope_count_for_what_is_compiled_after_it(slow: Slow) -> None:
    held = lazy(torch.randn(3))
    for _ in range(2):
        step(held).cpu()
    with torch_ltc.use_backend("torchscript"):
        for _ in range(2):
            step(held).cpu()
        slow.gate.set()
        torch_ltc.wait_for_compiles()
        with seen_events() as seen:
            step(held).cpu()
        assert backends_of(seen) == ["torchscript"]
    with seen_events() as seen:
        step(held).cpu()
    assert backends_of(seen) == ["slow"]


# ---- disk -----------------------------------------------------------------------------------------------------------


def train(steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(7, 1))
    model = model.to("ltc")
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(6, 5).to("ltc")
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch_ltc.wait_for_compiles()
    return losses


def kinds(seen: Any) -> tuple[int, int]:
    """Programs compiled, and loaded."""
    made = [type(event) for event in seen]
    return made.count(events.CompileEvent), made.count(events.LoadEvent)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with settings.scope(cache_dir=str(tmp_path / "cache"), backend="torchscript"):
        yield tmp_path / "cache"


@pytest.mark.parametrize("mode", ["background", "blocking", "off"])
def test_what_was_compiled_once_is_loaded_the_next_time(folder: Path, mode: str) -> None:
    with settings.scope(tiers=mode):
        with seen_events() as seen:
            first = train()
        compiled, loaded = kinds(seen)
        assert compiled > 0
        assert loaded == 0
        torch_ltc.ir_cache.reset()
        metrics.reset()
        with seen_events() as seen:
            assert train() == first
        assert kinds(seen) == (0, compiled)
        assert metrics.counter_value("CompileLoaded") == compiled
        assert f"0 programs compiled, {compiled} loaded from {folder}" in debug.compilations()


def test_a_known_program_is_loaded_at_its_first_execution(folder: Path) -> None:
    held = lazy(torch.randn(3))
    for _ in range(3):
        step(held).cpu()
    torch_ltc.wait_for_compiles()
    torch_ltc.ir_cache.reset()
    with seen_events() as seen:
        step(held).cpu()
        torch_ltc.wait_for_compiles()
        step(held).cpu()
    assert kinds(seen) == (0, 1)
    assert backends_of(seen) == ["interpreter", "torchscript"]


def test_a_program_with_a_layout_is_loaded_the_next_time(folder: Path) -> None:
    def run() -> torch.Tensor:
        for _ in range(3):
            made = torch.zeros(3, device="ltc", layout=torch.strided) + torch.full((3,), 2.0, device="ltc")
            result = made.cpu()
        torch_ltc.wait_for_compiles()
        return result

    first = run()
    torch_ltc.ir_cache.reset()
    with seen_events() as seen:
        assert torch.equal(run(), first)
    assert kinds(seen) == (0, 1)


def test_damaged_files_are_compiled_again_and_replaced(folder: Path) -> None:
    first = train()
    files = sorted(folder.iterdir())
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-20])
    torch_ltc.ir_cache.reset()
    with seen_events() as seen:
        assert train() == first
    assert kinds(seen)[1] == 0
    torch_ltc.ir_cache.reset()
    with seen_events() as seen:
        assert train() == first
    assert kinds(seen)[0] == 0


def test_a_file_that_cannot_be_loaded_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train()
    torch_ltc.ir_cache.reset()
    # Older than anything that is written from now on.
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    count = len(list(folder.iterdir()))

    def broken(*given: object) -> None:
        raise RuntimeError("bad code")

    monkeypatch.setattr("torch_ltc.backends.torchscript.load_function", broken)
    removed: list[str] = []
    remove = os.remove
    monkeypatch.setattr(os, "remove", lambda path: (removed.append(str(path)), remove(path)))
    with seen_events() as seen:
        train()
    assert kinds(seen) == (count, 0)
    assert len(removed) == count


@pytest.mark.parametrize("change", ["threads", "dtype", "strict"])
def test_other_surroundings_are_a_miss(folder: Path, change: str) -> None:
    held = lazy(torch.randn(3))

    def run() -> None:
        for _ in range(3):
            step(held).cpu()
        torch_ltc.wait_for_compiles()

    run()
    torch_ltc.ir_cache.reset()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        if change == "threads":
            torch.set_num_threads(threads + 1)
        elif change == "dtype":
            torch.set_default_dtype(torch.float64)
        else:
            settings.backend_failure = "error"
        with seen_events() as seen:
            run()
        assert kinds(seen) == (1, 0)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        settings.backend_failure = "warn"


def test_programs_that_differ_are_told_apart_on_disk(folder: Path) -> None:
    x = torch.randn(4)
    held = lazy(x)
    functions = [lambda t: t + 1, lambda t: t + 1.0, lambda t: t.sum(0), lambda t: t.sum(0, keepdim=True)]
    for _ in range(2):
        for function in functions:
            for _ in range(3):
                torch.testing.assert_close(function(held).cpu(), function(x), rtol=0, atol=0)
        torch_ltc.wait_for_compiles()
        torch_ltc.ir_cache.reset()


def test_numbers_that_change_are_right_after_loading(folder: Path) -> None:
    x = torch.randn(4)
    held = lazy(x)
    for start in (0.25, 7.0):
        for n in range(4):
            scale = start + n
            torch.testing.assert_close((held * scale).sin().cpu(), (x * scale).sin(), rtol=0, atol=0)
        torch_ltc.wait_for_compiles()
        torch_ltc.ir_cache.reset()


def test_an_unwritable_folder_changes_nothing_else(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with settings.scope(cache_dir=str(blocked / "cache"), backend="torchscript"), seen_events() as seen:
        train()
    assert kinds(seen)[0] > 0


# ---- processes ------------------------------------------------------------------------------------------------------

SCRIPT = """
    import sys, threading, time, torch, torch_ltc
    from torch_ltc import debug
    from torch_ltc.lowering.interface import Backend

    class Endless(Backend):
        name = "endless"
        def compile(self, program):
            while True:
                time.sleep(0.01)

    if sys.argv[1] == "endless":
        torch_ltc.use_backend(Endless())
    x = torch.ones(3).to("ltc")
    for _ in range(4):
        (x.sin() + 1).cpu()
    if sys.argv[1] == "wait":
        torch_ltc.wait_for_compiles()
        print(debug.compilations())
    print("done", flush=True)
"""


def run_script(*words: str, **variables: str) -> tuple[str, str, float]:
    environment = {**os.environ, "LTC_TIERS": "background", "LTC_BACKEND": "torchscript", **variables}
    began = time.monotonic()
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, time.monotonic() - began


def test_a_second_process_compiles_nothing_and_says_so(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    first, _, _ = run_script("wait", LTC_CACHE_DIR=folder)
    assert f"1 program compiled, 0 loaded from {folder}" in first
    second, _, _ = run_script("wait", LTC_CACHE_DIR=folder)
    assert f"0 programs compiled, 1 loaded from {folder}" in second


def test_the_end_of_a_process_does_not_wait_for_a_compilation() -> None:
    quick = run_script("plain", LTC_CACHE_DIR="off")[2]
    out, err, took = run_script("endless", LTC_CACHE_DIR="off")
    assert out == "done\n"
    assert err == ""
    assert took < quick + 15.0
