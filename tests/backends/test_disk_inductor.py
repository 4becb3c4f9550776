"""Inductor in another process, and its programs on disk."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ltc
from tests.support.backends import seen_events, used
from torch_ltc import events
from torch_ltc.backends.inductor import artifact
from torch_ltc.compile.compiler_client import compiler_client
from torch_ltc.config import settings
from torch_ltc.errors import BackendWarning
from torch_ltc.private_files import is_private_folder

LONG_S = 120.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Inductor, as by default, with files of its own."""
    torch_ltc.ir_cache.reset()
    with settings.scope(backend="inductor", tiers="background", cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"
        torch_ltc.wait_for_compiles()
        torch_ltc.sync(wait=True)
    torch_ltc.ir_cache.reset()


def made(seen: list[Any]) -> tuple[list[bool], int]:
    """For each compilation whether it was out of process, and the number of programs loaded."""
    compiled = [event.out_of_process for event in seen if isinstance(event, events.CompileEvent)]
    return compiled, sum(isinstance(event, events.LoadEvent) for event in seen)


def train(device: str, steps: int = 4) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2))
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, target = torch.randn(5, 6).to(device), torch.tensor([0, 1, 1, 0, 1]).to(device)
    losses: list[float] = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if device == "ltc" and step == 2:
            torch_ltc.wait_for_compiles()
    return losses, next(model.parameters()).detach().cpu()


def test_training_is_compiled_out_of_process_and_loaded_the_next_time(folder: Path) -> None:
    losses, weight = train("cpu", 6)
    for again in (False, True):
        with seen_events() as seen:
            ours, our_weight = train("ltc", 6)
        compiled, loaded = made(seen)
        assert set(compiled) == (set() if again else {True})
        assert (loaded > 0) is again
        assert "inductor" in used(seen)
        torch.testing.assert_close(ours, losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(our_weight, weight, rtol=1e-4, atol=1e-5)
        torch_ltc.ir_cache.reset()
    assert list(folder.iterdir())


def twice(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).exp().sum(0)


def run(x: torch.Tensor, count: int = 3) -> torch.Tensor:
    for _ in range(count):
        result = twice(x).cpu()
    torch_ltc.wait_for_compiles()
    return result


@pytest.mark.parametrize("mode", ["blocking", "off"])
def test_whoever_waits_has_it_compiled_here(mode: str) -> None:
    x = torch.randn(3, 4)
    held = x.to("ltc")
    with settings.scope(tiers=mode), seen_events() as seen:
        torch.testing.assert_close(run(held), twice(x))
    assert made(seen) == ([False], 0)
    torch_ltc.ir_cache.reset()
    with settings.scope(tiers=mode), seen_events() as seen:
        torch.testing.assert_close(run(held), twice(x))
    assert made(seen) == ([], 1)


def begin_to_compile(held: torch.Tensor) -> None:
    """Return when the other process is there."""
    for _ in range(2):
        twice(held).cpu()
    began = time.monotonic()
    while compiler_client.pid is None and time.monotonic() < began + LONG_S:
        time.sleep(0.001)
    assert compiler_client.pid is not None


_SHORT = """
import os, sys, time
import torch, torch_ltc
from torch_ltc.compile import artifacts
from torch_ltc.compile.compiler_client import compiler_client
from torch_ltc.config import settings
settings.backend, settings.cache_dir, artifacts.EXIT_COMPILE_S = "inductor", sys.argv[1], int(sys.argv[2])
settings.tiers = "background"
x = torch.ones(8, 8).to("ltc")
while compiler_client.pid is None:
    (x @ x + 1).relu().sum().item()
time.sleep(0.5)
print(compiler_client.pid)
"""


def short_run(folder: Path, exit_compile_s: int) -> int:
    """The compiler process of a run that has ended before its program was compiled."""
    command = [sys.executable, "-W", "ignore", "-c", _SHORT, str(folder), str(exit_compile_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    return int(done.stdout)


def is_alive(pid: int) -> bool:
    try:
        # One that has ended and that nobody has waited for is in state Z.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_a_program_that_is_being_compiled_when_the_run_ends_is_there_for_the_next(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    pid = short_run(kept, 100)
    assert wait_until(lambda: not is_alive(pid))
    assert [path.suffix for path in kept.iterdir()] == [".ltc"]


@pytest.mark.parametrize("limit_s", [0, 1])
def test_a_compiler_ends_when_the_time_after_the_run_is_over(limit_s: int, tmp_path: Path) -> None:
    pid = short_run(tmp_path / "kept", limit_s)
    assert wait_until(lambda: not is_alive(pid))
    assert not (tmp_path / "kept").exists()


def test_a_compiler_that_is_killed_is_started_again() -> None:
    held = torch.randn(3, 5).to("ltc")
    with seen_events() as seen:
        begin_to_compile(held)
        assert compiler_client.pid is not None
        os.kill(compiler_client.pid, signal.SIGKILL)
        torch_ltc.wait_for_compiles()
    assert made(seen) == ([True], 0)


# JAX, where another test has loaded it, warns of every fork.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_process_that_is_forked_meanwhile_goes_its_own_way() -> None:
    held = torch.randn(3, 9).to("ltc")
    with seen_events() as seen:
        begin_to_compile(held)
        began = time.monotonic()
        forked = os.fork()
        if forked == 0:
            os._exit(0 if compiler_client.pid is None else 1)
        while os.waitpid(forked, os.WNOHANG) == (0, 0):
            if time.monotonic() > began + LONG_S:
                os.kill(forked, signal.SIGKILL)
            time.sleep(0.01)
        torch_ltc.wait_for_compiles()
    assert made(seen) == ([True], 0)


def test_a_program_that_ends_every_compiler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_ltc.compile.compiler_client._BOOT", "import os; os._exit(7)  # {niceness} {path!r}")
    compiler_client.end()
    held = torch.randn(3, 6).to("ltc")
    with seen_events() as seen, pytest.warns(BackendWarning, match="died with status 7, 2 times"):
        run(held)
        torch_ltc.sync()
        run(held)
    assert set(used(seen)) == {"interpreter"}


def test_an_operator_that_the_other_process_lacks_is_compiled_here() -> None:
    with torch.library._scoped_library("torch_ltc_disk_tests", "DEF") as library:
        library.define("plus_one(Tensor x) -> Tensor")
        library.impl("plus_one", lambda x: x + 1, "CPU")
        library._register_fake("plus_one", lambda x: torch.empty_like(x))
        held = torch.randn(3, 7).to("ltc")
        with seen_events() as seen:
            for _ in range(3):
                result = torch.ops.torch_ltc_disk_tests.plus_one(held.sin()).cos().cpu()
            torch_ltc.wait_for_compiles()
            again = torch.ops.torch_ltc_disk_tests.plus_one(held.sin()).cos().cpu()
        assert made(seen) == ([False], 0)
        torch.testing.assert_close(result, again)
        torch_ltc.ir_cache.reset()


def test_other_options_are_a_miss() -> None:
    held = torch.randn(3, 8).to("ltc")
    run(held)
    backend: Any = torch_ltc.lowering.registry.registry.get("inductor")
    torch_ltc.ir_cache.reset()
    backend.options = {"max_fusion_size": 3}
    try:
        with seen_events() as seen:
            run(held)
    finally:
        backend.options = {}
    assert made(seen) == ([True], 0)


def test_kernels_that_are_loaded_are_those_of_their_program() -> None:
    """Several kernels in one program, each in a library of its own."""

    def several(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.mm(x.sin() + x.sum(0), x.cos())
        return x.softmax(0)

    torch.manual_seed(0)
    x = torch.randn(6, 6, dtype=torch.float64)
    held = x.to("ltc")
    for _ in range(2):
        for _ in range(3):
            several(held).cpu()
        torch_ltc.wait_for_compiles()
        with seen_events() as seen:
            torch.testing.assert_close(several(held).cpu(), several(x), rtol=1e-4, atol=1e-4)
        assert used(seen) == ["inductor"]
        torch_ltc.ir_cache.reset()


def test_forms_of_one_program_with_other_guards_are_kept_beside_each_other() -> None:
    for again in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(256, 256)
        on_device = copy.deepcopy(layer).to("ltc")
        with seen_events() as seen:
            # Inductor's code for few elements is another one than for many.
            for rows in (20, 24, 28, 5, 6, 7):
                x = torch.randn(rows, 256)
                loss = on_device(x.to("ltc")).relu().square().mean()
                loss.backward()
                torch.testing.assert_close(loss.cpu(), layer(x).relu().square().mean())
                torch_ltc.wait_for_compiles()
        compiled, loaded = made(seen)
        assert len(compiled) == (0 if again else 2)
        assert loaded >= 2 or not again
        torch_ltc.ir_cache.reset()


def test_a_folder_of_inductors_that_another_user_may_write_to_is_not_loaded_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(artifact, "cache_dir", lambda: str(shared))
    for mode, ours in ((0o755, True), (0o777, False)):
        shared.chmod(mode)
        with artifact._file(b"library") as path:
            assert (Path(path).parent == shared) is ours
            assert Path(path).read_bytes() == b"library"
            assert is_private_folder(os.path.dirname(path))
        assert not os.path.exists(path)


def test_an_artifact_with_another_class_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"an artifact of Inductor has no posix\.system"):
        artifact.load(pickle.dumps(os.system))
