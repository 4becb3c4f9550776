"""The page on compatibility has the table of changes that the code has."""

from pathlib import Path

from torch_ltc.backends.inductor import random_state
from torch_ltc.pytorch.table import compatibility_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def test_the_page_lists_what_the_import_changes() -> None:
    assert random_state.__name__  # registers what the backend changes
    section = PAGE.read_text().partition("## What `import torch_ltc` changes in PyTorch\n")[2]
    assert compatibility_table() in section, "paste torch_ltc.pytorch.table.compatibility_table() into the page"
