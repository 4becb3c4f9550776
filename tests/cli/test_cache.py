"""`ltc cache` on folders with real files."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_ltc.cli.main import main
from torch_ltc.compile.disk_cache import Key, Store, read_key
from torch_ltc.config import settings
from torch_ltc.lowering.versions import versions_text

Printed = pytest.CaptureFixture[str]
DAY_S = 86400


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "cache"
    with settings.scope(cache_dir=str(path)):
        yield path


def keep(folder: Path, kind: str, backend: str, age_s: float, versions: str = "") -> Path:
    """A file of the cache, of 1,000 bytes and its key, that was used some time ago."""
    store = Store(str(folder), 1 << 20)
    before = set(folder.glob("*")) if folder.exists() else set()
    text = "\n".join([versions or versions_text(), "surroundings", f"backend {backend} 1", "cpu AVX2", "the program"])
    assert store.put(Key(kind, text), "", bytes(1000))
    (made,) = set(folder.glob("*")) - before
    os.utime(made, (time.time() - age_s,) * 2)
    return made


@pytest.fixture
def three(folder: Path) -> list[Path]:
    """The one that was used last first."""
    return [
        keep(folder, "s17.5", "torchscript", 90),
        keep(folder, "p3.1", "inductor", 2 * DAY_S, "torch 2.11.0 abc\npython 3.10"),
        keep(folder, "p4.1", "torchscript", 9 * DAY_S),
    ]


def test_ls_shows_what_was_used_last_first(three: list[Path], capsys: Printed) -> None:
    assert main(["cache", "ls"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["size", "last", "use", "backend", "torch", "usable", "program", "file"]
    shown = [[cell for cell in row.split("  ") if cell] for row in rows]
    assert [row[-1].strip() for row in shown] == [path.name for path in three]
    assert [row[1].strip() for row in shown] == ["2 min", "2 d", "9 d"]
    assert [row[2].strip() for row in shown] == ["torchscript", "inductor", "torchscript"]
    assert [row[4].strip() for row in shown] == ["yes", "no", "yes"]
    assert [row[5].strip() for row in shown] == [
        "17 instructions, 5 outputs, any sizes",
        "3 instructions, 1 output, fixed sizes",
        "4 instructions, 1 output, fixed sizes",
    ]


def test_ls_as_data_and_bounded(three: list[Path], capsys: Printed) -> None:
    assert main(["cache", "ls", "--json", "--most", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["file"] for row in rows] == [path.name for path in three[:2]]
    assert rows[1]["torch"] == "2.11.0"
    assert rows[1]["device"] == "cpu AVX2"
    assert rows[0]["size_bytes"] == three[0].stat().st_size
    assert main(["cache", "ls", "--most", "1"]) == 0
    assert "2 more; --most 0 prints all" in capsys.readouterr().err
    assert main(["cache", "ls", "--most", "0", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_stats_sum_up(folder: Path, three: list[Path], capsys: Printed) -> None:
    (folder / "p1.1-left.ltc.77.88").write_bytes(b"half")
    (folder / "last_run.json").write_bytes(b"not a program")
    total = sum(path.stat().st_size for path in three) + 4
    assert main(["cache", "stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(folder),
        "files": 3,
        "size_bytes": total,
        "bound_bytes": 2 << 30,
        "usable": 2,
        "unfinished": 1,
        "longest_unused_s": pytest.approx(9 * DAY_S, abs=60),
        "by_backend": {"torchscript": 2, "inductor": 1},
    }
    assert main(["cache", "stats"]) == 0
    text = capsys.readouterr().out
    assert f"folder                  {folder}\n" in text
    assert "longest unused          9 d\nof inductor             1\nof torchscript          2\n" in text


def test_an_empty_folder_and_none(folder: Path, capsys: Printed) -> None:
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == "nothing is kept\n"
    assert main(["cache", "stats"]) == 0
    assert main(["cache", "clear"]) == 0
    capsys.readouterr()
    with settings.scope(cache_dir="off"):
        assert main(["cache", "ls"]) == 2
    assert "the setting 'cache_dir' is 'off'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--older-than", "5"], [0, 1]),
        (["--older-than", "1"], [0]),
        (["--unusable"], [0, 2]),
        (["--max-bytes", "1M"], [0, 1, 2]),
        (["--max-bytes", "0"], []),
        (["--older-than", "5", "--unusable"], [0]),
    ],
)
def test_prune_removes_what_was_said(
    options: list[str], left: list[int], folder: Path, three: list[Path], capsys: Printed
) -> None:
    (folder / "last_run.json").write_bytes(b"not a program")
    assert main(["cache", "prune", "--dry-run", *options]) == 0
    assert capsys.readouterr().out.startswith(f"would remove {3 - len(left)} file")
    assert all(path.exists() for path in three)
    assert main(["cache", "prune", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 3 - len(left)
    assert [index for index, path in enumerate(three) if path.exists()] == left
    assert (folder / "last_run.json").exists()


def test_prune_to_a_size_keeps_what_was_used_last(three: list[Path], capsys: Printed) -> None:
    bound = three[0].stat().st_size + three[1].stat().st_size
    assert main(["cache", "prune", "--max-bytes", str(bound)]) == 0
    assert [path.exists() for path in three] == [True, True, False]
    assert main(["cache", "prune", "--max-bytes", str(bound - 1)]) == 0
    assert [path.exists() for path in three] == [True, False, False]


def test_prune_wants_to_be_told_what(three: list[Path], capsys: Printed) -> None:
    assert main(["cache", "prune"]) == 2
    assert "--max-bytes SIZE, --older-than DAYS or --unusable" in capsys.readouterr().err
    assert all(path.exists() for path in three)


class Answer(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_clear_asks_first(three: list[Path], capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["cache", "clear"]) == 2
    assert "there is no terminal to ask on\n  try: ltc cache clear --yes" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Answer("\n"))
    assert main(["cache", "clear"]) == 1
    assert "Remove 3 files (" in capsys.readouterr().err
    assert all(path.exists() for path in three)
    monkeypatch.setattr(sys, "stdin", Answer("y\n"))
    assert main(["cache", "clear"]) == 0
    assert not any(path.exists() for path in three)


def test_clear_without_asking(folder: Path, three: list[Path], capsys: Printed) -> None:
    (folder / "last_run.json").write_bytes(b"not a program")
    assert main(["cache", "clear", "--yes"]) == 0
    assert capsys.readouterr().out.startswith("removed 3 files (")
    assert os.listdir(folder) == ["last_run.json"]


def test_a_file_that_cannot_be_removed_is_a_failure(
    three: list[Path], capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "drop", lambda self, path: None)
    assert main(["cache", "clear", "--yes"]) == 1
    assert "3 files could not be removed" in capsys.readouterr().err


def test_a_file_that_another_process_removed_is_no_failure(
    three: list[Path], capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Store.files

    def files_that_go(self: Store) -> list[object]:
        found = files(self)
        os.remove(found[0].path)
        return found  # type: ignore[return-value]

    monkeypatch.setattr(Store, "files", files_that_go)
    assert main(["cache", "clear", "--yes"]) == 0
    assert capsys.readouterr().out.startswith("removed 3 files (")


@pytest.mark.parametrize("body", [b"", b"torch_ltc program 1\n", b"x" * 500, b"torch_ltc program 1\n" + b"\xff" * 100])
def test_a_damaged_file_is_listed_as_unknown(body: bytes, folder: Path, capsys: Printed) -> None:
    folder.mkdir()
    path = folder / "p3.1-damaged.ltc"
    path.write_bytes(body)
    assert read_key(str(path)) == ""
    assert main(["cache", "ls", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["backend"], row["torch"], row["usable"]) == ("unknown", "unknown", False)


def test_the_store_leaves_other_files_alone(folder: Path) -> None:
    """The recording of the last run is in the same folder."""
    folder.mkdir()
    other = folder / "last_run.json"
    other.write_bytes(bytes(5000))
    os.utime(other, (0, 0))
    store = Store(str(folder), 1500)
    for kind in ("p1.1", "p2.1"):
        assert store.put(Key(kind, "text"), "", bytes(1000))
    assert other.exists()
    assert [file.kind for file in store.files()] == ["p2.1"]
