"""What is written when a process ends, and what the functions of the package give."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import torch_ltc
from torch_ltc.debug.recording import from_json

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    found = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    command = [sys.executable, str(file)]
    return subprocess.run(command, cwd=folder, env=found, capture_output=True, text=True, timeout=120)


def test_processes_that_the_script_starts_write_beside_its_report(tmp_path: Path) -> None:
    script = """
        import multiprocessing

        import torch
        import torch_ltc

        def work(use: bool) -> None:
            if use:
                (torch.ones(2).to("ltc") + 1).sum().item()

        if __name__ == "__main__":
            (torch.ones(3).to("ltc") * 2).sum().item()
            context = multiprocessing.get_context("spawn")
            for use in (False, True):
                child = context.Process(target=work, args=(use,))
                child.start()
                child.join()
    """
    done = run(script, tmp_path, LTC_REPORT="run.json")
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("run*.json"))
    assert len(files) == 2
    assert [len(from_json(file.read_text()).programs) for file in files] == [1, 1]
    assert "aten::mul" in (tmp_path / "run.json").read_text()
    assert all("aten::add" in file.read_text() for file in files if file.name != "run.json")


def test_each_rank_writes_a_report_of_its_own(tmp_path: Path) -> None:
    done = run("import torch, torch_ltc", tmp_path, LTC_REPORT="run.json", RANK="1", WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("run*")] == ["run.rank1.json"]


def test_a_report_that_cannot_be_written_is_a_warning_and_nothing_more(tmp_path: Path) -> None:
    done = run("import torch_ltc", tmp_path, LTC_REPORT=str(tmp_path / "nowhere" / "report.html"))
    assert done.returncode == 0
    assert "at exit: no report was written" in done.stderr
    assert "there is no folder" in done.stderr


def test_the_package_answers_for_the_running_process(tmp_path: Path) -> None:
    x = torch.ones(3).to("ltc")
    for _ in range(3):
        (x * 2).sum().item()
    assert torch_ltc.doctor() == "The doctor found nothing.\n"
    made = torch_ltc.report(tmp_path / "report.html")
    assert [row.syncs for row in made.recording.programs] == [3]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert made._repr_html_().startswith("<iframe")
