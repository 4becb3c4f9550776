"""The examples of the page on debugging print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts import run_examples

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "debugging.md"


def test_examples_print_what_the_page_shows() -> None:
    command = [sys.executable, "scripts/run_examples.py", "--check"]
    # A process of its own, with the settings that a user has.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LTC_")}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), variables.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def test_each_example_prints_something() -> None:
    found = run_examples.examples(PAGE)
    assert len(found) >= 20
    assert [code for code, text in found if not text.strip()] == []


def test_figures_that_differ_from_run_to_run_are_equal() -> None:
    assert run_examples.same("it took 1.5 ms, 3 %", "it took 27 s, 12.5 %")
    assert not run_examples.same("2 compilations", "3 compilations")


def test_digits_that_differ_from_processor_to_processor_are_equal() -> None:
    assert run_examples.same("1.44742608 (allowed: 3.5e-05)", "1.44742596 (allowed: 3.7e-05)")
    assert not run_examples.same("1.4474", "1.4484")
    assert not run_examples.same("1.44742608", "1.44842608")


def test_every_message_of_the_page_is_known() -> None:
    text = (ROOT / "docs" / "messages.md").read_text()
    for code in set(re.findall(r"LTC\d{3}", PAGE.read_text())):
        assert f"## {code}\n" in text, code
