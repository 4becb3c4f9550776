"""The command line as a whole: help, exit statuses, errors, pipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torch_ltc
from torch_ltc.cli import recordings
from torch_ltc.cli.main import COMMANDS, build_parser, load_command, main
from torch_ltc.errors import LtcError

Printed = pytest.CaptureFixture[str]


def test_without_arguments_every_command_is_named(capsys: Printed) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n    {name}" not in text] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_what_it_does(name: str, capsys: Printed) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: ltc {name} [-h]")
    assert load_command(name).name == name
    assert load_command(name).description.split(":")[0] in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["dump"],
        ["run"],
        ["cache", "prune", "--max-bytes", "much"],
        ["cache", "prune", "--older-than", "-4"],
        ["cache", "prune", "--older-than", "nan"],
        ["cache", "ls", "--most", "-1"],
        ["dump", "diff", "1", "2", "--context", "-1"],
    ],
)
def test_wrong_arguments_end_with_status_2_and_the_usage(arguments: list[str], capsys: Printed) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "usage: ltc" in printed.err
    assert printed.out == ""


def test_the_version_is_said(capsys: Printed) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"torch_ltc {torch_ltc.__version__}\n"


def test_only_the_command_that_is_asked_for_is_loaded() -> None:
    assert "report" not in build_parser("doctor").format_help()
    assert "report" in build_parser("").format_help()


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (LtcError("it is so", hint="another way"), 2, "error: it is so\n  try: another way\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_messages(
    error: BaseException, status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    def fail(path: Path | None) -> None:
        raise error

    monkeypatch.setattr(recordings, "read_recording", fail)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == text


def test_a_reader_that_has_seen_enough_is_no_error(saved: str) -> None:
    command = (
        f"{sys.executable} -m torch_ltc dump show {saved} --all --json | head -c 1; echo status ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "[status 0\n", done.stderr
    assert done.stderr == ""
