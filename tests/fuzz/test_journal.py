"""The journal of random programs: what was run is counted once, whoever is stopped, and journals add up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz import journal
from tests.fuzz.__main__ import Turns
from tests.fuzz.check import eager
from tests.fuzz.generate import KINDS, generate
from tests.fuzz.journal import KIND_OFFSET, Journal, load, table, total
from tests.fuzz.modes import MODES
from tests.fuzz.program import Program
from tests.fuzz.runner import Seen
from tests.fuzz.worker import Worker
from tests.semantics.support import LONG_S


def test_seeds_go_on_where_the_last_run_ended(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal.json", 100)
    assert [first.take("auto", None, 50), first.take("auto", None, 50), first.take("off", None, 50)] == [100, 150, 100]
    assert first.take("auto", "jit", 50) == 100 + KIND_OFFSET
    first.save()
    again = Journal(tmp_path / "journal.json", 7)
    assert [again.take("auto", None, 50), again.take("auto", "jit", 50)] == [200, 150 + KIND_OFFSET]


def test_counts_are_on_the_disk_soon_after_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SAVED_EVERY_S", 0.0)
    made = Journal(tmp_path / "journal.json", 0)
    for outcome, kind in (("ok", "jit"), ("ok", "plain"), ("skip", "jit"), ("fail", "jit"), ("crash", "")):
        made.note("auto", "2.13.0", outcome, kind)
    _, counts = load(tmp_path / "journal.json")
    assert counts == {"auto": {"2.13.0": {"ok": 2, "skip": 1, "fail": 1, "crash": 1, "jit": 2, "plain": 1}}}
    assert made.failed()
    assert [path.name for path in tmp_path.iterdir()] == ["journal.json"]


def test_journals_add_up_in_a_table(tmp_path: Path) -> None:
    for name, version in (("a", "2.13.0"), ("b", "2.13.0"), ("c", "2.11.0")):
        made = Journal(tmp_path / name, 0)
        for _ in range(700):
            made.note("auto", version, "ok", "jit")
        made.note("auto", version, "skip", "plain")
        made.save()
    lines = table(total([load(tmp_path / name)[1] for name in "abc"])).splitlines()
    assert lines[2:] == [
        "| `auto` | 2.13.0 | 1,400 | 1,400 | 0 | 0 | 2 | 0 | 0 |",
        "| `auto` | 2.11.0 | 700 | 700 | 0 | 0 | 1 | 0 | 0 |",
        "| all |  | 2,100 | 2,100 | 0 | 0 | 3 | 0 | 0 |",
    ]


def test_workers_run_modes_that_share_a_process_together_and_change_their_environment_seldom() -> None:
    turns = Turns(["interpreter", "python", "auto"])
    environment = '{"LTC_NATIVE": "0"}'
    assert [turns.take(environment) for _ in range(4)] == [["python"]] * 4
    made = [turns.take(None) for _ in range(20)]
    assert [made.count(modes) for modes in (["interpreter", "auto"], ["python"])] == [12, 8]


def test_modes_with_the_same_seeds_share_the_programs_and_what_eager_shows(tmp_path: Path) -> None:
    asked: list[str] = []

    def oracle(program: Program) -> list[Seen]:
        asked.append(program.name)
        return eager(program)

    worker = Worker(oracle, tmp_path, 1)
    for mode in ("interpreter", "captured"):
        worker.block(MODES[mode], 0, 3, "jit")
    assert asked == ["jit-0", "jit-1", "jit-2"]
    worker.block(MODES["interpreter"], 3, 1, "jit")
    assert asked[3:] == ["jit-3"]


def test_programs_of_one_kind_are_made() -> None:
    for kind in KINDS:
        assert [generate(seed, 2, kind).kind for seed in range(3)] == [kind] * 3


def test_a_run_that_is_stopped_loses_no_counts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--folder", str(tmp_path), "--modes", "interpreter"]
    process = subprocess.Popen(
        [*command, "--seconds", "1000"], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "src:."}
    )
    deadline = time.monotonic() + LONG_S
    while not (tmp_path / "journal.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=LONG_S)
    _, counts = load(tmp_path / "journal.json")
    (counter,) = counts["interpreter"].values()
    assert counter["ok"] > 0
    assert not counter["crash"]
    assert table(counts) in printed
