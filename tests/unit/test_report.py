"""The report's file: what is in it, and how it is written. What it shows is tested in tests/browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.made_recordings import made_findings, made_recording
from torch_ltc.debug.recording import from_json
from torch_ltc.debug.report import Report, report_html, write_report

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_of(page: str) -> dict:
    found = DATA.search(page)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_the_recording_with_each_line_once() -> None:
    recording = made_recording(10)
    data = data_of(report_html(recording, made_findings()))
    assert data["steps"] == 10
    assert len(data["texts"]) == len(set(data["texts"])) < sum(len(row.lines) for row in recording.programs)
    first = data["programs"][0]
    assert [data["texts"][at] for at in first["lines"]["texts"]] == [line.text for line in recording.programs[0].lines]
    backward = data["sources"][first["lines"]["sources"][5]]
    assert backward[:5] == ["/home/user/train.py", 30, "train", True, "Net.hidden"]
    assert data["sources"][backward[5]][:3] == ["/home/user/train.py", 12, "forward"]
    spans = data["spans"]
    assert [spans["names"][spans[name][3]] for name in ("kind", "lane", "label")] == ["wait", "user", "train.py"]
    assert (spans["begin"][3], spans["duration"][3]) == (2200.0, 1400.0)


def test_no_data_can_end_its_element() -> None:
    hostile = "</script><!--<script>"
    page = report_html(made_recording(2, file=hostile, name=hostile), made_findings(hostile, hostile))
    assert page.count("</script>") == page.count("<script") == 4
    assert "<!--" not in page
    assert data_of(page)["command"] == ["python", hostile]


def test_placeholders_in_data_stay_as_they_are() -> None:
    page = report_html(made_recording(2, name="{{style}} {{nothing}} \\1"), [])
    assert data_of(page)["command"] == ["python", "{{style}} {{nothing}} \\1"]


def test_numbers_that_json_cannot_hold_become_words() -> None:
    assert data_of(report_html(made_recording(2), []))["metrics"]["times"]["bad"] == "nan"


def test_the_page_names_no_other_address() -> None:
    page = report_html(made_recording(2), [])
    assert not re.search(r"""(?:src|href)=["']?(?!#)\w""", DATA.sub("", page).split("<body>")[0])
    assert "default-src 'none'" in page


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, made_recording(2), [])
    assert path.read_text().startswith("<!doctype html>")
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_report(path, made_recording(2), [])
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]


def test_a_name_that_ends_in_json_gets_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    recording = made_recording(2)
    Report(recording, ()).save(path)
    assert from_json(path.read_text()).programs == recording.programs


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "report.html"
    with pytest.raises(FileNotFoundError) as caught:
        write_report(path, made_recording(2), [])
    assert str(caught.value) == (
        f"the report {str(path)!r} cannot be written: there is no folder {str(path.parent)!r}\n"
        "  try: make the folder first, or name another one"
    )


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        write_report(tmp_path, made_recording(2), [])
    assert str(caught.value) == (
        f"the report {str(tmp_path)!r} cannot be written: that is a folder\n"
        f"  try: a file in it, as {str(tmp_path / 'report.html')!r}"
    )


def test_a_report_in_a_terminal_is_a_line() -> None:
    report = Report(made_recording(2), tuple(made_findings()))
    assert repr(report) == "<Report of 2 steps, 5 programs, 3 findings; save(path) writes the page>"


def test_a_notebook_gets_a_frame_that_cannot_reach_it() -> None:
    shown = Report(made_recording(2), ())._repr_html_()
    assert shown.startswith('<iframe title="torch_ltc report" sandbox="allow-scripts" ')
    assert shown.count("<") == 2
