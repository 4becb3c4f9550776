"""`ltc run`: scripts run as Python runs them, on the device, and leave a recording."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_ltc.cli.main import main
from torch_ltc.cli.recordings import read_recording
from torch_ltc.cli.run import parse_setting, summary
from torch_ltc.config import settings
from torch_ltc.debug.recording import Finding, Recording, SettingRow
from torch_ltc.errors import SettingError
from torch_ltc.source import UNKNOWN

Printed = pytest.CaptureFixture[str]
Write = Callable[..., str]

TRAINING = """
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
    print(loss.device, loss.item() < 100)
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return make


def python(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).resolve().parents[2] / "src")
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": source, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=90)


def test_a_script_trains_on_the_device_and_leaves_a_recording(write: Write, tmp_path: Path, capsys: Printed) -> None:
    script = write(TRAINING)
    record, page = tmp_path / "run.json", tmp_path / "run.html"
    assert main(["run", "--record", str(record), "--report", str(page), script, "--epochs", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "ltc:0 True\n"
    recording = read_recording(record)
    assert recording.command == (script, "--epochs", "3")
    assert recording.steps == 4
    assert {row.source.file for row in recording.syncs} == {script}
    assert "torch_ltc: 4 steps, 1 program, " in printed.err
    assert printed.err.rstrip().endswith(f"; see: ltc doctor {record}")
    assert page.stat().st_size > 1000
    assert torch.get_default_device().type == "cpu"


def test_the_recording_of_the_last_run_is_in_the_cache_folder(write: Write, tmp_path: Path, capsys: Printed) -> None:
    cache = tmp_path / "cache"
    assert main(["run", "--set", f"cache_dir={cache}", write(TRAINING)]) == 0
    assert capsys.readouterr().err.rstrip().endswith("; see: ltc doctor")
    assert main(["explain"]) == 0
    assert read_recording(None).steps == 4


def test_without_a_cache_folder_nothing_is_kept(write: Write, capsys: Printed) -> None:
    assert main(["run", write("pass")]) == 0
    assert capsys.readouterr().err == "torch_ltc: 0 steps, 0 programs, 0 compiles, 0 syncs\n"
    assert main(["run", "--quiet", write("pass")]) == 0
    assert capsys.readouterr().err == ""


SHOW = """
    import json, sys

    main = sys.modules["__main__"]
    names = [__name__, __file__, __package__ or "", str(__spec__ and __spec__.name), sys.argv, sys.path[0]]
    print(json.dumps([*names, main.__dict__ is globals()]))
"""


def test_a_script_sees_what_it_sees_in_python(write: Write, tmp_path: Path) -> None:
    write(SHOW)
    options = ["script.py", "-h", "--record", "x", "--", "last"]
    plain = python(*options, cwd=tmp_path)
    ours = python("-m", "torch_ltc", "run", "--no-default-device", *options, cwd=tmp_path)
    assert json.loads(plain.stdout)[0] == "__main__"
    assert ours.stdout == plain.stdout, ours.stderr


def test_a_module_sees_what_it_sees_in_python(write: Write, tmp_path: Path) -> None:
    write(SHOW, "tool.py")
    plain = python("-m", "tool", "--flag", cwd=tmp_path)
    ours = python("-m", "torch_ltc", "run", "-m", "tool", "--flag", cwd=tmp_path)
    assert json.loads(plain.stdout)[3] == "tool"
    assert ours.stdout == plain.stdout, ours.stderr


def test_an_error_looks_as_in_python(write: Write, tmp_path: Path) -> None:
    write(
        """
        def fail():
            raise ValueError("of the script")

        fail()
        """
    )
    plain = python("script.py", cwd=tmp_path)
    ours = python("-m", "torch_ltc", "run", "--quiet", "--record", "run.json", "script.py", cwd=tmp_path)
    assert plain.returncode == ours.returncode == 1
    assert "ValueError: of the script" in plain.stderr
    assert ours.stderr == plain.stderr
    # What was recorded before the error is there all the same.
    assert read_recording(tmp_path / "run.json").command == ("script.py",)


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(False)", 0, ""),
        ("raise KeyboardInterrupt", 130, None),
        ("def f(:", 1, None),
    ],
)
def test_the_exit_status_is_the_scripts(
    text: str, status: int, error: str | None, write: Write, capsys: Printed
) -> None:
    assert main(["run", "--quiet", write(text)]) == status
    printed = capsys.readouterr().err
    if error is not None:
        assert printed == error
    else:
        assert "run.py" not in printed
        assert "/cli/" not in printed


def test_the_hook_of_the_script_sees_its_error(write: Write, capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert main(["run", "--quiet", write("import sys\nsys.excepthook = lambda *a: print('mine', a[1])\n1 / 0")]) == 1
    assert capsys.readouterr().out == "mine division by zero\n"


def test_an_error_that_nobody_read_fails_the_run(write: Write, capsys: Printed) -> None:
    script = write(
        """
        import torch, torch_ltc

        torch.nn.Embedding(2, 2)(torch.tensor([9]))
        torch_ltc.sync()
        """
    )
    assert main(["run", "--quiet", script]) == 1
    error = capsys.readouterr().err
    assert "aten::embedding" in error
    assert "script.py:4" in error


def test_an_error_of_what_was_never_synced_fails_the_run(write: Write, capsys: Printed) -> None:
    script = write(
        """
        import torch

        torch.nn.Embedding(2, 2)(torch.tensor([9]))
        """
    )
    assert main(["run", "--quiet", script]) == 1
    error = capsys.readouterr().err
    assert "aten::embedding" in error
    assert "script.py:4" in error


def test_a_shape_error_shows_the_lines_of_the_script_alone(write: Write, capsys: Printed) -> None:
    script = write(
        """
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 3)

            def forward(self, x):
                return torch.nn.functional.softmax(self.layer(x) @ torch.ones(2, 2), 1)

        Net()(torch.ones(2, 3))
        """
    )
    assert main(["run", "--quiet", script]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ", 1)[1] for line in lines if line.startswith("  File ")] == [
        "line 12, in <module>",
        "line 10, in forward",
    ]
    # PyTorch 2.15 names the operator first.
    assert lines[-1].removeprefix("RuntimeError: ").removeprefix("mm: ") == (
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x2)"
    )


def test_a_terminated_run_leaves_a_recording(write: Write, tmp_path: Path) -> None:
    write(
        """
        import os, signal, torch

        print(torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().item() < 100, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    ended = python("-m", "torch_ltc", "run", "--record", "run.json", "script.py", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (143, "True\n"), ended.stderr
    assert len(read_recording(tmp_path / "run.json").programs) == 1


def test_the_recording_of_the_last_run_that_cannot_be_written_fails_nothing(
    write: Write, tmp_path: Path, capsys: Printed
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["run", "--set", f"cache_dir={tmp_path / 'file' / 'cache'}", write("pass")]) == 0
    error = capsys.readouterr().err
    assert "cannot write what was recorded" in error
    assert "see: ltc doctor" not in error


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("LTC_BACKEND", "nope", "there is no backend named 'nope'"), ("LTC_TIERS", "x", "LTC_TIERS holds 'x'")],
)
def test_a_wrong_variable_is_a_message(name: str, value: str, message: str, tmp_path: Path) -> None:
    ended = python("-m", "torch_ltc", "env", cwd=tmp_path, **{name: value})
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Traceback" in python("-c", "import torch_ltc", cwd=tmp_path, **{name: value}).stderr


def test_what_cannot_be_run_ends_with_status_2(write: Write, capsys: Printed) -> None:
    assert main(["run", "no_such_script.py"]) == 2
    assert "there is no file 'no_such_script.py'" in capsys.readouterr().err
    assert main(["run", "--backend", "nope", write("pass")]) == 2
    assert "there is no backend named 'nope'" in capsys.readouterr().err


def test_a_recording_that_cannot_be_written_is_said_so(write: Write, tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "file").write_text("")
    record = tmp_path / "file" / "run.json"
    assert main(["run", "--record", str(record), write("pass")]) == 1
    assert "cannot write what was recorded" in capsys.readouterr().err
    assert main(["run", "--record", str(record), write("raise SystemExit(5)")]) == 5


def test_settings_and_the_backend_are_those_of_the_command_line(write: Write, capsys: Printed) -> None:
    script = write("from torch_ltc.config import settings as s\nprint(s.backend, s.hot_after, s.promotion)")
    arguments = ["--backend", "interpreter", "--set", "hot_after=5", "--set", "promotion=off"]
    assert main(["run", *arguments, script]) == 0
    assert capsys.readouterr().out == "interpreter 5 False\n"
    # For what happens when the process ends.
    assert settings.hot_after == 5


@pytest.mark.parametrize("text", ["hot_after", "hot_after=1", "hot_after=many", "nothing=1", "tiers=later"])
def test_settings_that_cannot_be_are_refused(text: str, write: Write, capsys: Printed) -> None:
    with pytest.raises(SettingError, match=r"one of|give it"):
        parse_setting(text)
    assert main(["run", "--set", text, write("print('not run')")]) == 2
    assert capsys.readouterr().out == ""


def test_a_setting_that_is_not_there_is_said_so() -> None:
    with pytest.raises(SettingError, match=r"there is no setting 'nosuch'\n  try: one of backend"):
        parse_setting("nosuch=1")
    with pytest.raises(SettingError, match=r"there is no setting 'tier'\n  try: --set tiers=off"):
        parse_setting("tier=off")


def test_the_summary_counts(recording: Recording) -> None:
    findings = [Finding("r", "LTC2", word, "", "", UNKNOWN, "") for word in ("hint", "error", "hint")]
    text = "6 steps, 2 programs, 2 compiles, 1 load, 6 syncs, 4 of 6 runs in compiled code"
    assert summary(recording, []) == text
    chosen = replace(recording, settings=(SettingRow("backend", "'torchscript'", "env"),))
    assert summary(chosen, []).endswith("4 of 6 runs on torchscript")
    assert summary(recording, findings) == f"{text}, 1 error, 2 hints"
