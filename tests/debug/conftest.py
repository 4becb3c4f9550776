"""Every test begins with an empty history, and leaves one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_ltc
from torch_ltc.debug.history import history


@pytest.fixture(autouse=True)
def fresh_history() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    history.clear()
    yield
    torch_ltc.sync(wait=True)
    history.clear()
