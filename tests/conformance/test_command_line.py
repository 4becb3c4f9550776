"""`python -m torch_ltc`: what it prints, what it takes for a backend, and its exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_ltc.cli.main import main
from torch_ltc.lowering.registry import registry
from torch_ltc.testing import State, What
from torch_ltc.testing.semantics.table import table
from torch_ltc.testing.suite import QUICK_OPERATORS
from torch_ltc.testing.workers import supported

Printed = pytest.CaptureFixture[str]

BACKEND_FILE = """
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.registry import registry


class Mine(Backend):
    name = "mine"

    def compile(self, program):
        return registry.reference.compile(program)


class Another:
    pass
"""


@pytest.fixture(autouse=True)
def forget_backends() -> Iterator[None]:
    before = set(registry.names())
    yield
    for name in set(registry.names()) - before:
        registry.unregister(name)


@pytest.fixture
def backend_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(BACKEND_FILE)
    return path


def run_python(*arguments: str, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, source]))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("backend", ["interpreter", "torchscript"])
def test_the_quick_form_passes_on_the_built_in_backends(backend: str, capsys: Printed) -> None:
    status = main(["conformance", backend, "--quick", "--strict"])
    text = capsys.readouterr().out
    assert status == 0, text
    assert text.startswith(f"backend {backend} on cpu, torch ")
    assert f"passed: backend {backend}" in text
    header, *rows = text.split("operators taken")[1].splitlines()
    assert header.split() == ["float32", "int64"]
    groups = {row.rsplit(maxsplit=2)[0].strip() for row in rows[: rows.index("")]}
    assert {"binary", "linear algebra", "nn.functional", "all"} <= groups


def test_quick_operators_are_in_the_database() -> None:
    assert {each.name for each in supported()} >= QUICK_OPERATORS


def test_without_arguments_it_says_what_there_is(capsys: Printed) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "conformance" in text
    assert "backends" in text


def test_backends_are_listed_with_the_current_one_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process of its own: it loads every backend, and with them packages that are large.
    monkeypatch.setenv("LTC_BACKEND", "interpreter")
    done = run_python("-m", "torch_ltc", "backends", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["*", "interpreter", "-", "recorded", "CPU0", "built-in"] in rows
    assert ["torchscript", "equal", "recorded", "CPU0", "built-in"] in rows


def test_an_unknown_name_lists_the_known_ones(capsys: Printed) -> None:
    assert main(["conformance", "nope"]) == 2
    error = capsys.readouterr().err
    assert "there is no backend named 'nope'" in error
    assert "interpreter" in error
    assert "torchscript" in error


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_such_package.module:Mine", "there is no module 'no_such_package.module'"),
        ("no/such/file.py:Mine", "there is no file"),
        ("torch_ltc.backends.interpreter:Nothing", "the backends there are: InterpreterBackend"),
        ("{file}:Another", "the backends there are: Mine"),
    ],
)
def test_a_reference_that_leads_nowhere_says_where_it_ends(
    reference: str, words: str, backend_file: Path, capsys: Printed
) -> None:
    assert main(["conformance", reference.format(file=backend_file), "--semantics-only"]) == 2
    assert words in capsys.readouterr().err


def test_a_backend_in_a_file_is_tested_in_worker_processes(backend_file: Path, tmp_path: Path, capsys: Printed) -> None:
    found = tmp_path / "found.json"
    only = ["--only", "semantics/view_chain", "--only", "neg", "--dtype", "float32", "--json", str(found)]
    assert main(["conformance", f"{backend_file}:Mine", *only]) == 0
    assert "passed: backend mine, 2 run" in capsys.readouterr().out
    report = json.loads(found.read_text())
    assert report["passed"]
    assert [each["state"] for each in report["results"]] == ["taken", "taken"]


def test_wrong_options_end_with_status_2(capsys: Printed) -> None:
    assert main(["conformance", "interpreter", "--only", "no such operator"]) == 2
    assert "nothing matches" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_status:
        main(["conformance", "interpreter", "--dtype", "float31"])
    assert exit_status.value.code == 2


def test_all_prints_every_case(capsys: Printed) -> None:
    assert main(["conformance", "interpreter", "--only", "semantics/*view*", "--all"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("semantics/")]
    assert shown == [f"semantics/{case.name}" for case in table if "view" in case.name]
    assert len(shown) > 3


def test_every_case_says_what_it_shows_and_the_documentation_repeats_it() -> None:
    assert len(table) > 50
    assert all(case.description.endswith(".") and len(case.description) < 120 for case in table)
    page = (Path(__file__).resolve().parents[2] / "docs" / "conformance.md").read_text()
    rows = [line for line in page.split("## The semantics cases")[1].splitlines() if line.startswith("| `")]
    assert rows == [f"| `{case.name}` | {case.description} |" for case in table]


def test_the_documentation_names_everything_that_can_differ() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "conformance.md").read_text()
    assert [what.value for what in What if f"`{what.value}`" not in page and what is not What.HARNESS] == []
    assert [state.value for state in State if f"| {state.value} |" not in page] == []


def test_a_missing_package_names_the_extra_and_semantics_do_without(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'expecttest'\", name='expecttest')"
    (tmp_path / "expecttest.py").write_text(missing)
    command = ("-m", "torch_ltc", "conformance", "interpreter")
    done = run_python(*command, "--quick", cwd=tmp_path, path=str(tmp_path))
    assert done.returncode == 2
    assert "pip install 'torch-ltc[test]'" in done.stderr
    done = run_python(*command, "--only", "semantics/view_chain", cwd=tmp_path, path=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_backend_that_loads_only_once_is_refused_with_the_reason(tmp_path: Path, capsys: Printed) -> None:
    spoiled = tmp_path / "spoiled.py"
    first = tmp_path / "first"
    spoiled.write_text(f"import pathlib\npathlib.Path({str(first)!r}).touch(exist_ok=False)\n" + BACKEND_FILE)
    assert main(["conformance", f"{spoiled}:Mine", "--only", "semantics/view_chain"]) == 2
    error = capsys.readouterr().err
    assert "a worker process ended with status 1 before it could begin" in error
    assert "FileExistsError" in error


def test_a_script_can_test_its_own_backend(tmp_path: Path) -> None:
    body = """
        import torch_ltc.testing

        report = torch_ltc.testing.conformance(Mine, only=["semantics/view_chain"])
        print(report.text())
    """
    guarded = BACKEND_FILE + 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(body), "    ")
    (tmp_path / "guarded.py").write_text(guarded)
    (tmp_path / "bare.py").write_text(BACKEND_FILE + textwrap.dedent(body))
    named = body.replace("(Mine,", "('interpreter',")
    (tmp_path / "named.py").write_text(textwrap.dedent(named))
    done = run_python("named.py", cwd=tmp_path)
    assert "passed: backend interpreter, 1 run" in done.stdout, done.stderr
    done = run_python("guarded.py", cwd=tmp_path)
    assert "passed: backend mine, 1 run" in done.stdout, done.stderr
    done = run_python("bare.py", cwd=tmp_path)
    assert done.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr, done.stdout + done.stderr
