"""Tables, sizes, ages, colours and progress."""

from __future__ import annotations

import io
import sys

import pytest

from torch_ltc.cli import output
from torch_ltc.cli.output import age_text, coloured, pairs, parse_size, progress, table
from torch_ltc.formatting import count_text, size_text

Printed = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_is_aligned() -> None:
    assert table([("name", "size"), ("a", "10"), ("long", "5")], " r") == "name  size\na       10\nlong     5"
    assert table([]) == ""
    assert pairs({"a": "1", "long": ""}) == "a     1\nlong"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3_900_000, "3.7 MiB"), (2 << 40, "2.0 TiB")]
)
def test_sizes_are_for_people(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("500M", 500 << 20), ("1.5 GiB", 3 << 29), ("2kb", 2048), ("0", 0)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "nan", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(("age", "text"), [(-5, "0 s"), (59, "59 s"), (61, "1 min"), (7200, "2 h"), (200_000, "2 d")])
def test_ages(age: float, text: str) -> None:
    assert age_text(age) == text


def test_counts() -> None:
    assert [count_text(number, "step") for number in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured("x", "error", Terminal()) == "\x1b[31mx\x1b[0m"
    assert coloured("x", "error", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("x", "error", Terminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert coloured("x", "error", Terminal()) == "x"


def test_progress_is_a_line_now_and_then_without_a_terminal(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PROGRESS_EVERY_S", 0.0)
    assert list(progress([7, 8], "rounds")) == [7, 8]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "rounds: 1 of 2, 0 s\nrounds: 2 of 2, 0 s\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress([7, 8], "rounds")) == [7, 8]
    assert "rounds:" in terminal.getvalue()
