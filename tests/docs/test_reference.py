"""The generated parts of the documentation: they are complete, and links to messages lead to their anchors."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from torch_ltc import errors
from torch_ltc.config import SETTINGS
from torch_ltc.debug.messages import MESSAGES
from torch_ltc.metrics import COUNTERS, METRICS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The extension of the site that makes them; it does without Sphinx."""
    spec = importlib.util.spec_from_file_location("reference_tables", ROOT / "docs" / "_ext" / "reference_tables.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_pages_ask_for_every_part_once(tables: ModuleType) -> None:
    asked = [name for page in sorted(ROOT.glob("docs/*.md")) for name in tables.PLACE.findall(page.read_text())]
    assert sorted(asked) == sorted(tables.TEXTS)


def test_a_page_is_filled(tables: ModuleType) -> None:
    source = ["# Counters\n\n<!-- made: counters -->\n"]
    tables.fill(None, "metrics", source)
    assert source[0].startswith("# Counters\n\n| name | counts |")


def test_every_setting_counter_sample_and_error_is_there(tables: ModuleType) -> None:
    assert re.findall(r"\{setting\} (\w+)", tables.settings_text()) == list(SETTINGS)
    assert all(f"| `{name}` |" in tables.counters_text() for name in COUNTERS)
    assert all(f"| `{name}` |" in tables.samples_text() for name in METRICS)
    sections = re.findall(r"^## (\w+)$", tables.errors_text(), re.MULTILINE)
    assert {"LtcError", "ExecutionError", "FallbackWarning"} <= set(sections)
    assert all(hasattr(errors, name) for name in sections)


def test_changes_and_interfaces_are_there(tables: ModuleType) -> None:
    changes, interfaces = tables.TEXTS["changes"](), tables.TEXTS["interfaces"]()
    for path in (
        "set_default_dtype",
        "_engine_run_backward",
        "preserve_rng_state",
        "LinearCrossEntropyOptions._adjust",
    ):
        assert f"{path}`" in changes
    assert "matmul" in changes
    assert interfaces.count("\n") > 100
    assert "`torch._C._acc.create_empty_tensor` | 2.11 on" in interfaces


def test_every_message_has_the_anchor_that_texts_link_to(tables: ModuleType) -> None:
    anchors = [title.lower() for title in re.findall(r"^## (\w+)$", tables.messages_text(), re.MULTILINE)]
    assert len(anchors) == len(MESSAGES)
    for known in MESSAGES.values():
        page, _, anchor = known.link.partition("#")
        assert (ROOT / page).is_file()
        assert anchor in anchors
