"""`%load_ext torch_ltc`: tensors without a sync, and cells that say what they did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.semantics.support import observe
from torch_ltc.debug.report import Report

pytest.importorskip("IPython")
from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def shell(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance()
    made.history_manager.enabled = False
    made.run_line_magic("load_ext", "torch_ltc")
    made.run_cell("import torch")
    yield made
    made.run_line_magic("unload_ext", "torch_ltc")
    InteractiveShell.clear_instance()


def text(shell: InteractiveShell, value: Any) -> str:
    return shell.display_formatter.format(value)[0]["text/plain"]


def test_tensors_are_shown_without_a_sync(shell: InteractiveShell) -> None:
    x = torch.ones(3).to("ltc") * 2
    with observe() as seen:
        shown = text(shell, x)
    assert seen.syncs == []
    assert "pending: float32[3]" in shown
    assert "aten::mul" in shown
    assert x.sum().item() == 6.0
    assert text(shell, x) == repr(x)
    assert text(shell, torch.ones(2)) == "tensor([1., 1.])"


def test_a_cell_says_what_it_did(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%%ltc\nx = torch.ones(3).to('ltc')\nfor _ in range(2):\n    value = (x * 3).sum().item()")
    shown = capsys.readouterr().out
    assert "1 program" in shown
    assert "program " in shown
    assert "2 calls, 2 runs" in shown
    assert "count" in shown
    assert shell.user_ns["value"] == 9.0
    report = shell.run_cell_magic("ltc", "--report", "(x * 3).sum().item()")
    assert isinstance(report, Report)
    assert "<iframe" in shell.display_formatter.format(report)[0]["text/html"]
    assert shell.run_cell_magic("ltc", "--other", "1") is None
    assert "%%ltc --report" in capsys.readouterr().out


def test_an_error_of_a_cell_is_shown(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%%ltc\n1 / 0")
    assert "ZeroDivisionError" in capsys.readouterr().out
