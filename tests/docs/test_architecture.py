"""The architecture page names what is there: files, states, hooks, and a glossary that stays short."""

from __future__ import annotations

import re
from pathlib import Path

import torch_ltc
from torch_ltc.compile.state import State
from torch_ltc.hooks import HOOKS

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
PACKAGE = Path(torch_ltc.__file__).parent


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_file_that_it_names_is_there() -> None:
    named = set(re.findall(r"`([a-z_/]+\.py)`", PAGE))
    assert len(named) > 25
    assert [name for name in sorted(named) if not (PACKAGE / name).is_file()] == []


def test_every_folder_that_it_names_is_there() -> None:
    named = set(re.findall(r"`([a-z_]+/(?:[a-z_]+/)*)`", PAGE))
    assert len(named) > 8
    assert [name for name in sorted(named) if not (PACKAGE / name).is_dir()] == []


def test_every_package_is_named() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"`{name}/`" not in PAGE] == []


def test_a_stage_is_two_files_to_open_at_most() -> None:
    stages = rows("The stages")
    assert [row[0].partition(" ")[2] for row in stages] == [
        "call", "record", "cut", "look up", "lower", "compile", "run", "install",
    ]  # fmt: skip
    assert all(1 <= len(row[2].split(", ")) <= 2 for row in stages)


def test_the_compile_states_are_those_of_the_machine() -> None:
    assert [row[0] for row in rows("One compilation")] == [state.name.lower() for state in State]


def test_the_hooks_are_those_that_there_are() -> None:
    listed = {row[0]: row[2] for row in rows("Events and hooks")}
    assert listed.pop("setting *name*") == "when the setting is assigned"
    assert listed == {name: hook.called for name, hook in HOOKS.items()}


def test_the_glossary_is_short_and_sorted() -> None:
    words = [row[0] for row in rows("Glossary")]
    assert words == sorted(words)
    assert len(words) <= 20
