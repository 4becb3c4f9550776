"""Code that runs when a module of another library is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from torch_ltc.libraries import imports
from torch_ltc.libraries.imports import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that is not loaded."""
    (tmp_path / "a_library_of_the_test.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_library_of_the_test", raising=False)
    return "a_library_of_the_test"


def test_a_module_is_adapted_once_when_it_is_imported(module: str) -> None:
    seen: list[ModuleType] = []
    when_imported(module, seen.append)
    assert seen == []
    made = importlib.import_module(module)
    assert seen == [made]
    assert made.value == 1
    assert importlib.reload(made) is made
    assert seen == [made]


def test_a_module_that_is_loaded_is_adapted_at_once(module: str) -> None:
    seen: list[ModuleType] = []
    made = importlib.import_module(module)
    when_imported(module, seen.append)
    assert seen == [made]


def test_the_module_looks_as_if_nobody_had_waited(module: str) -> None:
    when_imported(module, lambda made: None)
    made = importlib.import_module(module)
    assert type(made.__loader__).__module__ != imports.__name__
    assert made.__spec__ is not None
    assert made.__spec__.loader is made.__loader__


def test_a_module_that_is_not_there_is_an_import_error() -> None:
    when_imported("a_library_that_is_not_there", lambda made: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("a_library_that_is_not_there")
