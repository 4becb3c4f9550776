"""Workers: they measure, they are ended, and what one does wrong stays with it."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

import pytest

from benchmarks.children import EXACT_ALLOCATOR, Child, WorkerError, environment
from benchmarks.results import summarise
from benchmarks.schedule import Options, Session, rotated, steps_of_sample

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


@pytest.fixture
def fake(tmp_path):
    """Makes an interpreter that is no interpreter: a script that speaks the workers' language."""

    def make(body):
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def gone(pid):
    """Whether the process ends within some seconds; a zombie has ended."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_request_that_takes_too_long_ends_the_worker_and_what_it_started(fake, tmp_path):
    python = fake(
        'print("{}", flush=True)\n'
        "child = os.fork()\n"
        f'open("{tmp_path}/pids", "a").write(f"{{os.getpid()}} ")\n'
        "time.sleep(600)"
    )
    child = Child("eager", "c", tmp_path, python=python)
    with pytest.raises(WorkerError, match="no answer within 1 s"):
        child.ask("build", timeout_s=1)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert all(gone(int(pid)) for pid in pids)


def test_worker_that_dies_is_an_error_with_its_last_words(fake, tmp_path):
    python = fake('print("{}", flush=True)\nsys.stdin.readline()\nsys.exit("out of luck")')
    child = Child("eager", "c", tmp_path, python=python)
    with pytest.raises(WorkerError, match="status 1: out of luck"):
        child.ask("build", timeout_s=30)


def test_unavailable_system_is_an_error_with_the_reason(fake, tmp_path):
    python = fake("""print('{"unavailable": "no such package"}', flush=True)""")
    with pytest.raises(WorkerError, match="no such package"):
        Child("torch_xla", "c", tmp_path, python=python)


def test_failing_system_is_left_out_and_the_others_go_on(fake):
    # It answers to everything but the first steps.
    python = fake('print("{}", flush=True)\nsys.stdin.readline()\nprint(\'{"build_s": 0}\', flush=True)')
    said = []
    options = Options(
        rounds=2, first_steps=3, starts=2, sample_s=0.01, memory=False, second=False, pythons={"original": python}
    )
    figures = Session("rate", ["eager", "original", "ltc-torchscript"], options, said.append).measure()
    summarise(figures)
    assert figures["original"]["status"] == "failed"
    assert any("rate original: failed" in line for line in said)
    for name in ("eager", "ltc-torchscript"):
        found = figures[name]
        assert found["status"] == "ok"
        assert found["settled"]
        assert len(found["starts_s"]) == 2
        assert [sample["round"] for sample in found["rounds"]] == [0, 1]
        assert found["agrees"]
    assert figures["eager"]["ratio"]["median"] == 1.0
    assert figures["eager"]["record_s"] is None
    assert 0 < figures["ltc-torchscript"]["record_s"]["median"] <= figures["ltc-torchscript"]["step_s"]["median"]
    assert figures["ltc-torchscript"]["compiles"] >= 1


def test_memory_counts_what_the_steps_need(tmp_path):
    with Child("eager", "b", tmp_path, allocator=EXACT_ALLOCATOR) as child:
        base = child.ask("load", timeout_s=60, limit_s=30)["resident_bytes"]
        child.ask("build", timeout_s=60)
        memory = child.ask("memory", timeout_s=60, steps=1)
        pid = child._process.pid
    assert gone(pid)
    # The input, the value of the last turn and two of this one: 16 MB each, and little else.
    assert 60 < (memory["steady_peak_bytes"] - base) / 2**20 < 80


def test_worker_on_cpu_does_not_find_the_variable_for_cuda(monkeypatch, tmp_path):
    # The original takes any value of it, also 0, for a wish to use CUDA.
    monkeypatch.setenv("LTC_TS_CUDA", "0")
    assert "LTC_TS_CUDA" not in environment(tmp_path)
    assert environment(tmp_path, "cuda")["LTC_TS_CUDA"] == "1"
    assert environment(tmp_path)["OMP_NUM_THREADS"] == "1"


def test_worker_has_the_number_of_threads_that_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(tmp_path, threads=3)["MKL_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment(tmp_path, threads=0)


def test_worker_with_fresh_caches_finds_the_extension_that_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "usual"))
    library = tmp_path / "usual" / "torch_ltc" / "native" / "library.so"
    library.parent.mkdir(parents=True)
    library.touch()
    for _ in range(2):
        caches = Path(environment(tmp_path / "fresh")["XDG_CACHE_HOME"])
    assert (caches / "torch_ltc" / "native" / "library.so").samefile(library)


def test_nothing_begins_after_the_deadline():
    options = Options(deadline=time.monotonic() - 1)
    figures = Session("a", ["eager"], options, lambda text: None).measure()
    assert figures["eager"] == {"status": "left out", "reason": "the time was over"}


def test_order_rotates():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 3) == []


def test_samples_are_whole_periods():
    assert steps_of_sample(0.1, 0.3, 1) == 3
    assert steps_of_sample(5.0, 0.3, 1) == 1
    assert steps_of_sample(0.01, 0.3, 4) == 32
    assert steps_of_sample(1.0, 0.3, 50) == 50
    assert steps_of_sample(0.0, 0.3, 1) == 1000


def test_processes_of_this_test_file_leave_nothing_behind():
    mine = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _parent(entry) == os.getpid() and b"benchmarks.worker" in _command(entry)
    ]
    assert mine == []


def _parent(entry):
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _command(entry):
    try:
        return (entry / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
