"""Commands that read a recording: `doctor`, `explain`, `dump`, `report`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from torch_ltc.cli import recordings
from torch_ltc.cli.main import main
from torch_ltc.cli.recordings import last_run, read_recording, write_recording
from torch_ltc.config import settings
from torch_ltc.debug.doctor import examine, findings_text
from torch_ltc.debug.explain import explain_recording
from torch_ltc.debug.recording import Finding, Recording
from torch_ltc.source import UNKNOWN

Printed = pytest.CaptureFixture[str]

LISTING = """\
program 1: 2 calls, synced at train.py:12 train
%0: float32[32] = input(buffer=0)     # net.py:7 forward [Net.layers.0]
%1: float32[32] = aten::relu(%0)      # net.py:7 forward [Net.layers.0]
%2: float32[] ROOT=0 = aten::sum(%1)  # train.py:12 train
"""
OVERVIEW = """\
program  calls  inputs  outputs  syncs  compiles  run time  backend      synced at
      1      2       1        1      3         1   12.5 ms  torchscript  train.py:12 train
      2      2       1        1      3         1   12.5 ms  torchscript  train.py:12 train
"""
GRAPH = """\
digraph program_1 {
  node [shape=box, fontname="monospace"];
  n0 [label="%0: float32[32] = input(buffer=0)\\nnet.py:7 forward [Net.layers.0]"];
  n1 [label="%1: float32[32] = aten::relu(%0)\\nnet.py:7 forward [Net.layers.0]"];
  n0 -> n1;
  n2 [label="%2: float32[] ROOT=0 = aten::sum(%1)\\ntrain.py:12 train"];
  n1 -> n2;
}
"""


def found(severity: str) -> Finding:
    return Finding("rule", "LTC299", severity, "something", "a figure", UNKNOWN, "do it")


# ---- files ----------------------------------------------------------------------------------------------------------


def test_the_last_run_is_the_default(recording: Recording, tmp_path: Path, capsys: Printed) -> None:
    with settings.scope(cache_dir=str(tmp_path / "cache")):
        path = last_run()
        assert path is not None
        write_recording(path, recording)
        assert read_recording(None) == recording
        assert main(["dump", "show"]) == 0
    assert capsys.readouterr().out == OVERVIEW
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(path.parent) == ["last_run.json"]


@pytest.mark.parametrize("command", [["doctor"], ["explain"], ["report"], ["dump", "show"]])
def test_without_a_run_the_message_says_how_to_make_one(command: list[str], tmp_path: Path, capsys: Printed) -> None:
    with settings.scope(cache_dir=str(tmp_path)):
        assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: no run is kept in {tmp_path}\n  try: run something first: ltc run SCRIPT")
    assert main(command) == 2
    assert "because the setting 'cache_dir' is 'off'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"), [(None, "there is no file"), ("{", "is not JSON"), ("{}", "is no recording of torch_ltc")]
)
def test_a_file_that_is_no_recording_ends_with_status_2(
    text: str | None, words: str, tmp_path: Path, capsys: Printed
) -> None:
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    assert main(["doctor", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert str(path) in error


def _damaged(value: Any, wrong: Any) -> Iterator[Any]:
    """`value` with each of its parts in turn replaced by a value of another type; of equal rows, the first."""
    yield wrong
    if isinstance(value, dict):
        for name, part in value.items():
            yield from ({**value, name: other} for other in _damaged(part, wrong))
    elif isinstance(value, list) and value:
        yield from ([other, *value[1:]] for other in _damaged(value[0], wrong))


@pytest.mark.parametrize("wrong", ["x", 7, None, [], {}, [[1]], True, -1], ids=repr)
def test_a_recording_with_wrong_types_is_damaged_or_read(
    wrong: Any, recording: Recording, tmp_path: Path, capsys: Printed
) -> None:
    path, page = tmp_path / "run.json", str(tmp_path / "page.html")
    whole = json.loads(recording.to_json())
    for number, data in enumerate(_damaged(whole, wrong)):
        path.write_text(json.dumps(data))
        commands = [["doctor", str(path)], ["explain", str(path)], ["dump", "show", str(path), "--all"]]
        for command in [*commands, ["report", str(path), "-o", page]][: 4 if number % 10 == 0 else 3]:
            assert main(command) in (0, 1, 2), data
        assert "Traceback" not in capsys.readouterr().err


# ---- doctor ---------------------------------------------------------------------------------------------------------


def test_the_doctor_prints_its_findings(saved: str, recording: Recording, capsys: Printed) -> None:
    findings = examine(recording)
    assert findings
    main(["doctor", saved])
    run = "The run of train.py --epochs 3, 2026-01-02 03:04:05, 2.50 s.\n"
    assert capsys.readouterr().out == run + findings_text(findings).rstrip() + "\n"
    main(["doctor", saved, "--json"])
    assert json.loads(capsys.readouterr().out) == [asdict(finding) for finding in findings]


@pytest.mark.parametrize(
    ("severities", "status", "strict"),
    [([], 0, 0), (["hint"], 0, 1), (["hint", "warning"], 1, 1), (["error"], 1, 1)],
)
def test_the_doctors_status_is_what_it_found(
    severities: list[str], status: int, strict: int, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "examine", lambda recording: [found(severity) for severity in severities])
    assert main(["doctor", saved]) == status
    assert main(["doctor", saved, "--strict"]) == strict


# ---- explain --------------------------------------------------------------------------------------------------------


def test_explain_prints_all_one_or_the_last(saved: str, recording: Recording, capsys: Printed) -> None:
    chosen = [([], {}), (["--program", "2"], {"program": 2}), (["--last", "compile"], {"last": "compile"})]
    texts = []
    for options, arguments in chosen:
        assert main(["explain", saved, *options]) == 0
        texts.append(capsys.readouterr().out)
        assert texts[-1] == explain_recording(recording, **arguments).rstrip() + "\n"  # type: ignore[arg-type]
    assert len(set(texts)) == 3


def test_explain_as_data_has_compilations_and_no_loads(saved: str, capsys: Printed) -> None:
    assert main(["explain", saved, "--json"]) == 0
    assert [row["program"] for row in json.loads(capsys.readouterr().out)["compiles"]] == [1, 2]
    assert main(["explain", saved, "--json", "--last", "compile"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["compiles"]] == [4]
    assert main(["explain", saved, "--json", "--program", "1"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["compiles"]] == [1]


# ---- dump -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"), [([], OVERVIEW), (["1"], LISTING), (["1", "--dot"], GRAPH)], ids=["overview", "text", "dot"]
)
def test_dump_show(options: list[str], text: str, saved: str, capsys: Printed) -> None:
    assert main(["dump", "show", saved, *options]) == 0
    assert capsys.readouterr().out == text


def test_dump_show_of_all_programs_and_as_data(saved: str, recording: Recording, capsys: Printed) -> None:
    assert main(["dump", "show", saved, "--all"]) == 0
    text = capsys.readouterr().out
    assert text == LISTING + "\n" + LISTING.replace("program 1", "program 2").replace("[32]", "[17]")
    assert main(["dump", "show", saved, "2", "--json"]) == 0
    assert [row["identity"] for row in json.loads(capsys.readouterr().out)] == [2]


def test_a_text_that_was_not_kept_is_said_so(recording: Recording, tmp_path: Path, capsys: Printed) -> None:
    path = tmp_path / "run.json"
    rows = tuple(replace(row, lines=()) for row in recording.programs)
    path.write_text(replace(recording, programs=rows).to_json())
    assert main(["dump", "show", str(path), "1"]) == 0
    assert capsys.readouterr().out == "program 1: 2 calls, synced at train.py:12 train\nits text was not kept\n"
    assert main(["dump", "diff", str(path), "1", "2"]) == 2
    assert "the text of program 1 was not kept" in capsys.readouterr().err


def test_dump_diff_marks_what_differs(saved: str, capsys: Printed) -> None:
    assert main(["dump", "diff", saved, "1", "2", "--context", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["--- program 1", "+++ program 2"]
    assert "- %0: float32[32] = input(buffer=0)  # net.py:7 forward [Net.layers.0]" in lines
    assert "+ %0: float32[17] = input(buffer=0)  # net.py:7 forward [Net.layers.0]" in lines
    assert main(["dump", "diff", saved, "1", "2", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["same"] is False
    assert data["changed"] == ["input", "aten::relu"]


def test_a_program_does_not_differ_from_itself(saved: str, capsys: Printed) -> None:
    assert main(["dump", "diff", saved, "2", "2"]) == 0
    assert capsys.readouterr().out == "no difference in 3 lines\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "{}", "9"], "the recording has no program 9\n  try: one of: 1, 2"),
        (["diff", "{}", "1"], "expected a file and 2 numbers of programs"),
        (["show", "{}", "another", "1"], "expected a file and up to 1 numbers of programs"),
    ],
)
def test_dump_says_what_it_cannot_find(arguments: list[str], words: str, saved: str, capsys: Printed) -> None:
    assert main(["dump", *(argument.format(saved) for argument in arguments)]) == 2
    assert words in capsys.readouterr().err


# ---- report ---------------------------------------------------------------------------------------------------------


def test_report_writes_the_page_and_prints_its_name(
    saved: str, recording: Recording, tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    page = tmp_path / "page.html"
    assert main(["report", saved, "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert shown == []
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert main(["report", saved, "-o", str(page), "--json", "--open"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["report"] == str(page)
    assert sum(data["findings"].values()) == len(examine(recording))
    assert shown == [page.as_uri()]


def test_a_page_that_cannot_be_written_ends_with_status_2(saved: str, tmp_path: Path, capsys: Printed) -> None:
    assert main(["report", saved, "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_recordings_of_ranks_become_one_page(recording: Recording, tmp_path: Path, capsys: Printed) -> None:
    files = []
    for rank, steps in enumerate((recording.steps, recording.steps + 1)):
        files.append(tmp_path / f"run.rank{rank}.json")
        files[-1].write_text(replace(recording, steps=steps).to_json(), encoding="utf-8")
    output = tmp_path / "merged.html"
    assert main(["report", "--merge", *map(str, files), "-o", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    page = output.read_text(encoding="utf-8")
    assert page.count("<iframe") == 2
    assert "<td>run.rank0</td>" in page
    # Of figures that ranks should have in common, one that differs stands out.
    assert f"<td class=differs>{recording.steps + 1:,}</td>" in page
    assert page.count("class=differs") == 1
