"""Reports and dumps: markup in any text that a recording holds, who may read the files, and what can be left out."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ltc
from tests.support.made_recordings import made_findings, made_recording
from torch_ltc.cli.main import main
from torch_ltc.cli.recordings import write_recording
from torch_ltc.config import settings
from torch_ltc.debug.recording import anonymous, from_json
from torch_ltc.debug.report import report_html, write_report
from torch_ltc.debug.report.ranks import RankReport, merged_html, write_merged

ATTACK = "</script></style><img src=x onerror=alert(1)>\"'{{data}}<!--"
FILE = "/home/somebody/secret_project/train.py"


@pytest.fixture(autouse=True)
def wide_umask() -> Iterator[None]:
    """The user lets everybody read and write new files."""
    before = os.umask(0)
    yield
    os.umask(before)


def attacked(value: Any) -> Any:
    """The value with markup in every text in it."""
    if isinstance(value, str):
        return value + ATTACK
    if isinstance(value, list):
        return [attacked(item) for item in value]
    if isinstance(value, dict):
        return {key: attacked(part) if key != "format" else part for key, part in value.items()}
    return value


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_markup_in_any_text_of_a_recording_stays_text() -> None:
    clean = made_recording()
    recording = from_json(json.dumps(attacked(json.loads(clean.to_json()))))
    page, before = report_html(recording, made_findings()), report_html(clean, made_findings())
    for markup in ("<img", "</script", "</style", "<!--"):
        assert page.count(markup) == before.count(markup)
    merged = merged_html([RankReport(ATTACK, recording, []), RankReport("rank1", recording, [])])
    assert "<img" not in merged
    assert "Content-Security-Policy" in page
    assert "Content-Security-Policy" in merged


def test_a_recording_that_names_classes_or_code_is_data() -> None:
    data = json.loads(made_recording().to_json())
    data["__class__"] = data["__reduce__"] = "os.system"
    assert from_json(json.dumps(data)).to_json() == made_recording().to_json()


def test_reports_recordings_and_dumps_are_for_the_user_alone(tmp_path: Path) -> None:
    recording = made_recording()
    write_report(tmp_path / "report.html", recording, [])
    write_report(tmp_path / "report.json", recording, [])
    write_recording(tmp_path / "made" / "recording.json", recording)
    write_merged(tmp_path / "ranks.html", [RankReport("rank0", recording, [])])
    with settings.scope(save_tensors_file=str(tmp_path / "programs.txt")):
        made = torch.ones(2).to("ltc") * 3
        torch_ltc.sync(wait=True)
    torch_ltc.debug.dump_repro(folder=tmp_path / "repro")
    assert made.tolist() == [3.0, 3.0]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 7
    assert {path.name: oct(mode_of(path)) for path in files} == {path.name: "0o600" for path in files}
    assert mode_of(tmp_path / "made") == 0o700


def test_a_link_in_the_place_of_a_report_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "report.html").symlink_to(precious)
    # The name under which it was written first could be guessed.
    (tmp_path / f"report.html.{os.getpid()}.partial").symlink_to(precious)
    write_report(tmp_path / "report.html", made_recording(), [])
    assert precious.read_text() == "as it was"
    assert "<html" in (tmp_path / "report.html").read_text()


def test_an_anonymous_report_names_nothing_of_the_user(tmp_path: Path) -> None:
    recording = made_recording(file=FILE, name="aten::mm")
    text = anonymous(recording).to_json()
    for word in ("somebody", "secret_project", "train.py"):
        assert word in recording.to_json()
        assert word not in text
    assert len(from_json(text).programs) == len(recording.programs)
    write_recording(tmp_path / "run.json", recording)
    assert main(["report", "--anonymous", str(tmp_path / "run.json"), "-o", str(tmp_path / "page.html")]) == 0
    assert "secret_project" not in (tmp_path / "page.html").read_text()


def test_a_repro_without_values_has_none(tmp_path: Path) -> None:
    secret = torch.full((3,), 12345.0).to("ltc")
    made = secret * 678.5 + 1
    path = Path(torch_ltc.debug.dump_repro(made, tmp_path, values=False))
    saved, _ = torch.load(path.with_suffix(".pt"), weights_only=True)
    assert all(item is None for item in saved)
    assert "678.5" not in path.read_text()
    torch_ltc.sync(wait=True)
