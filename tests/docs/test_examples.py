"""Every Python block of the README and of the documentation runs, and examples print what the pages show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts import run_examples
from torch_ltc.debug.messages import MESSAGES

ROOT = Path(__file__).resolve().parents[2]
DEBUGGING = ROOT / "docs" / "debugging.md"


def test_every_block_runs_and_examples_print_what_the_pages_show() -> None:
    command = [sys.executable, "scripts/run_examples.py", "--check"]
    # A process of its own, with the settings that a user has.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LTC_")}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), variables.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_block_is_found() -> None:
    """A block that the pattern does not match would never run."""
    for page in run_examples.PAGES:
        fences = re.findall(r"^ *```(?:python|\{code-cell\})", page.read_text(), re.MULTILINE)
        assert len(list(run_examples.blocks(page))) == len(fences), page
    assert len(list(run_examples.blocks(ROOT / "README.md"))) >= 3


def test_each_example_prints_something() -> None:
    found = run_examples.examples(DEBUGGING)
    assert len(found) >= 20
    assert [code for code, text in found if not text.strip()] == []


def test_figures_that_differ_from_run_to_run_are_equal() -> None:
    assert run_examples.same("it took 1.5 ms, 3 %", "it took 27 s, 12.5 %")
    assert run_examples.same("0.548359394 (allowed: 3.5e-05)", "0.548359412 (allowed: 3.7e-05)")
    assert not run_examples.same("2 compilations", "3 compilations")
    assert not run_examples.same("a loss of 0.25", "a loss of 0.26")


def test_a_block_that_fails_or_prints_another_text_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_examples, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nprint(2)\n```\n\n```text\n3\n```\n\n"
        "```python\n1 / 0\n```\n\n```{code-cell}\n:tags: [a]\n\nx = 1\n```\n\n```{code-cell}\nx + 1\n```\n"
    )
    first, second = run_examples.problems(page)
    assert first.startswith("page.md:9: prints another text now:\n2")
    assert second.startswith("page.md:17: ")
    assert "ZeroDivisionError" in second


def test_every_message_of_the_page_is_known() -> None:
    assert set(re.findall(r"LTC\d{3}", DEBUGGING.read_text())) <= set(MESSAGES)
