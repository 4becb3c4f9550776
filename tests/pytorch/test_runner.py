"""The runner of PyTorch's tests: it blames the right test for a crash or a hang, goes on, and keeps what it has."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pytorch import on_purpose, report, run, stand_ins
from tests.pytorch.known_failures import Kind, Known
from tests.pytorch.records import LATE, LATE_WARNING, Outcome, Record, chosen

TESTS = """
import os, time, unittest
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCPU, dtypes
from torch.testing._internal.common_utils import TestCase

class TestThings(TestCase):
    @dtypes(torch.float32, torch.int64)
    def test_right(self, device, dtype):
        self.assertEqual(torch.ones(2, dtype=dtype, device=device).sum().item(), 2)

    def test_crash(self, device):
        if self.device_type != "cpu":
            os.abort()

    def test_hang(self, device):
        if self.device_type != "cpu":
            time.sleep(60)

    def test_wrong(self, device):
        self.assertEqual(device, "cpu", "said by the test")

    def test_wrong_on_cpu(self, device):
        self.assertNotEqual(device, "cpu")

    def test_late_error(self, device):
        index = torch.tensor([7], device=device)
        if self.device_type != "cpu":
            torch.zeros(2, device=device).index_select(0, index)

    def test_late_error_of_data(self, device):
        with self.assertRaisesRegex(IndexError, "out of"):
            torch.zeros(2, device=device)[torch.tensor([7], device=device)]

    def test_late_warning(self, device):
        x = torch.zeros(1, device=device).expand(3)
        with self.assertWarnsRegex(UserWarning, "expanded tensors"):
            x.index_fill_(0, torch.tensor([0], device=device), 1.0)

    def test_warning_that_never_comes(self, device):
        x = torch.zeros(1, device=device).expand(3)
        with self.assertWarnsRegex(UserWarning, "expanded tensors"):
            (x if self.device_type == "cpu" else x.clone()).index_fill_(0, torch.tensor([0], device=device), 1.0)

    def test_error_that_never_comes(self, device):
        with self.assertRaises(RuntimeError):
            torch.zeros(2, device=device) + torch.zeros(3 if self.device_type == "cpu" else 2, device=device)

    def test_after_late_error(self, device):
        self.assertEqual(torch.zeros(2, device=device).sum().item(), 0)

    @onlyCPU
    def test_of_the_cpu(self, device):
        pass

    @unittest.skip("always")
    def test_skipped(self, device):
        pass

class TestListed(TestCase):
    def test_listed(self, device):
        pass

instantiate_device_type_tests(TestThings, globals())
instantiate_device_type_tests(TestListed, globals(), only_for=("cpu", "cuda"))
"""

LAZY_TESTS = """
import torch
import torch._lazy.metrics as metrics
import torch._lazy.ts_backend
torch._lazy.ts_backend.init()

def test_step():
    x = torch.ones(2).to("lazy") + 1
    assert x.device.type != "cpu"
    torch._lazy.mark_step()
    assert metrics.counter_value("MarkStep") == 1
"""


SLOW_TESTS = """
import os, subprocess, sys, time
from pathlib import Path
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase

class TestSlow(TestCase):
    def test_a(self, device):
        pass

    def test_b(self, device):
        if self.device_type != "cpu" and (folder := os.environ.get("TEST_FOLDER")):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
            (Path(folder) / "pids").write_text(f"{os.getpid()} {child.pid}\\n")
            time.sleep(120)

instantiate_device_type_tests(TestSlow, globals())
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> run.Runner:
    source, results = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("results")
    (source / "test" / "lazy").mkdir(parents=True)
    (source / "test" / "test_things.py").write_text(TESTS)
    (source / "test" / "lazy" / "test_small.py").write_text(LAZY_TESTS)
    return run.Runner(source, results, sample=500, seeds=(1,), time_limit_s=8.0, again=frozenset())


@pytest.fixture(scope="module")
def records(runner: run.Runner) -> dict[str, Record]:
    return {record.name.removeprefix("TestThingsCPU."): record for record in runner.run("test_things", whole=True)}


@pytest.mark.slow
def test_each_test_has_its_own_outcome(records: dict[str, Record]) -> None:
    assert {name: record.outcome for name, record in records.items()} == {
        "TestListedCPU.test_listed_cpu": Outcome.PASS,
        "test_after_late_error_cpu": Outcome.PASS,
        "test_crash_cpu": Outcome.CRASH,
        "test_error_that_never_comes_cpu": Outcome.FAIL,
        "test_hang_cpu": Outcome.TIMEOUT,
        "test_late_error_cpu": Outcome.FAIL,
        "test_late_error_of_data_cpu": Outcome.PASS,
        "test_late_warning_cpu": Outcome.PASS,
        "test_of_the_cpu_cpu": Outcome.CPU_ONLY,
        "test_right_cpu_float32": Outcome.PASS,
        "test_right_cpu_int64": Outcome.PASS,
        "test_skipped_cpu": Outcome.SKIPPED,
        "test_warning_that_never_comes_cpu": Outcome.FAIL,
        "test_wrong_cpu": Outcome.FAIL,
        "test_wrong_on_cpu_cpu": Outcome.CPU_FAILS,
    }
    assert "said by the test" in records["test_wrong_cpu"].message
    assert records["test_late_error_of_data_cpu"].message == f"{LATE}: aten::index.Tensor"
    assert records["test_late_warning_cpu"].message == LATE_WARNING
    assert "Aborted" in records["test_crash_cpu"].trace


@pytest.mark.slow
def test_results_of_an_earlier_run_are_kept(runner: run.Runner, records: dict[str, Record]) -> None:
    broken = run.Runner(Path("gone"), runner.results, sample=500, seeds=(1,), time_limit_s=8.0, again=frozenset())
    assert len(broken.run("test_things", whole=True)) == len(records)
    # Half a line, and a test that had begun: what a run that was killed leaves behind.
    with (runner.results / "test_things.jsonl").open("a") as journal:
        journal.write('begin TestThingsCPU.test_wrong_cpu\n{"name": "TestThin')
    assert len(broken.run("test_things", whole=True)) == len(records)


@pytest.mark.slow
def test_sample_follows_the_seed(runner: run.Runner, records: dict[str, Record]) -> None:
    def sample(*seeds: int) -> list[str]:
        few = run.Runner(Path("gone"), runner.results, sample=4, seeds=seeds, time_limit_s=8.0, again=frozenset())
        return [record.name for record in few.run("test_things", whole=False)]

    assert len(sample(1)) == 4
    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert len(set(sample(1, 2))) == 8
    assert set(sample(1)) < set(sample(1, 2))
    assert len(sample(1, 2, 3, 4)) == len(records)


@pytest.mark.slow
def test_tests_of_the_original_find_this_package(runner: run.Runner) -> None:
    assert [record.outcome for record in runner.run("lazy/test_small", whole=True)] == [Outcome.PASS]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_stopped_run_leaves_no_process_and_no_verdict(stop: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_slow.py").write_text(SLOW_TESTS)
    (tmp_path / "version.txt").write_text("2.6\n")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.pytorch.run",
            f"--source={tmp_path}",
            f"--results={tmp_path}",
            "--file=test_slow",
        ],
        env={**os.environ, "TEST_FOLDER": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    pids = tmp_path / "pids"
    try:
        _wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"))
        process.send_signal(stop)
        assert process.wait(30) == (-signal.SIGKILL if stop == signal.SIGKILL else 130)
    finally:
        process.kill()
        process.wait()
    for pid in pids.read_text().split():
        _wait_for(lambda pid=pid: not _runs(int(pid)))
    rest = run.Runner(tmp_path, tmp_path / "2.6", sample=500, seeds=(1,), time_limit_s=30.0, again=frozenset())
    assert '"TestSlowCPU.test_a_cpu"' in (tmp_path / "2.6" / "test_slow.jsonl").read_text()
    assert '"TestSlowCPU.test_b_cpu"' not in (tmp_path / "2.6" / "test_slow.jsonl").read_text()
    assert [record.outcome for record in rest.run("test_slow", whole=True)] == [Outcome.PASS, Outcome.PASS]


def _wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_run_that_is_stopped_before_it_repeats_failures_has_lost_none(
    runner: run.Runner, records: dict[str, Record]
) -> None:
    again = run.Runner(
        Path("gone"), runner.results, sample=2, seeds=(1,), time_limit_s=8.0, again=frozenset({"fail", "pass"})
    )
    with pytest.raises(RuntimeError, match="does not load"):
        again.run("test_things", whole=False)
    assert {record.name: record.outcome for record in again.results_of("test_things")[0]} == {
        record.name: record.outcome for record in records.values()
    }


def test_table_and_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = (Outcome.PASS, Outcome.CPU_ONLY, Outcome.FAIL, Outcome.CRASH, Outcome.SKIPPED, Outcome.CPU_FAILS)
    tables = {"test_things": [Record(f"T.test_{outcome.value}", outcome, "why") for outcome in outcomes]}
    known = Known("test_things", ("T.test_f*",), Kind.MISSING, "not there")
    gone = Known("test_things", ("T.test_pass",), Kind.DEFECT, "mended")
    monkeypatch.setattr(report, "KNOWN_FAILURES", (known, gone))
    assert report.table(tables).splitlines()[-1] == "| all | 1 | 1 | 1 | 0 | 1 | 1 | 1 | 0 | 50.0 % |"
    unknown, forgotten = report.judge(tables, complete=True)
    assert list(report.lines(unknown)) == ["crash: test_things T.test_crash: why"]
    assert forgotten == [gone]
    assert report.judge(tables, complete=False)[1] == []


def test_a_report_of_some_files_leaves_what_the_page_says_of_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    passed, late = Record("T.test_a", Outcome.PASS), Record("T.test_b", Outcome.PASS, f"{LATE}: aten::embedding")
    warned = Record("T.test_d", Outcome.PASS, LATE_WARNING)
    failed = Record("T.test_c", Outcome.FAIL, "why")
    report.write(page, {"test_nn": [failed, passed], "test_complex": [passed]}, "2.6", "every test")
    report.write(
        page, {"test_view_ops": [failed], "test_complex": [late, warned, passed], "test_masked": []}, "2.6", "some"
    )
    lines = page.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert "old" not in lines
    assert next(line for line in lines if "with torch" in line).endswith(": some. Of an earlier commit: `test_nn`.")
    assert [line for line in lines if line.startswith(("| `", "| all"))] == [
        "| `test_view_ops` | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0.0 % |",
        "| `test_nn` | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 50.0 % |",
        "| `test_complex` | 3 | 0 | 0 | 0 | 0 | 0 | 0 | 2 | 100.0 % |",
        "| `test_masked` | does not load with this PyTorch |",
        "| all | 4 | 2 | 0 | 0 | 0 | 0 | 0 | 2 | 66.7 % |",
        "| `test_view_ops` | 1 | not looked into | why |",
        "| `test_nn` | 1 | not looked into | why |",
    ]


def test_what_a_stopped_run_has_done_is_a_sample_by_the_first_seeds() -> None:
    names = [f"Case.test_{number:03}" for number in range(100)]
    drawn = chosen(names, 10, (1, 2))
    assert drawn[:10] == chosen(names, 10, (1,)) != sorted(drawn[:10])
    assert len(set(drawn)) == 20
    assert chosen(names, 100, (1,)) == chosen(names, 0, (1,)) == names


def test_files_of_an_older_pytorch_are_worded_anew() -> None:
    old = ("super(self.__class__, self)", "for sample, subtest_ctx in op.inputs():", "with subtest_ctx(self):")
    new = (
        "super()",
        "for sample, subtest_ctx, sample_ctx in op.inputs():",
        "with subtest_ctx(self), sample_ctx(self):",
    )
    assert stand_ins.reworded("\n".join(old)) == "\n".join(new)


def test_what_the_originals_tests_say_of_it_is_found_in_them_or_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = on_purpose.Difference("test_small", "counter == 2", "counter == 1", "counted otherwise")
    monkeypatch.setattr(on_purpose, "DIFFERENCES", (known,))
    assert on_purpose.reworded("test_small", "assert counter == 2") == "assert counter == 1"
    assert on_purpose.reworded("test_other", "assert counter == 2") == "assert counter == 2"
    with pytest.raises(ValueError, match="does not say"):
        on_purpose.reworded("test_small", "assert counter == 3")


def test_the_page_names_what_differs_from_the_original_on_purpose() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    for each in on_purpose.DIFFERENCES:
        assert f"| `{each.file}` | {each.reason} |" in page
