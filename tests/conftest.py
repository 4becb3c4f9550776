"""Settings for all tests: programs are compiled when they are due, and nothing is kept on disk.

So that a test can count what was compiled and see what ran. `LTC_TEST_TIERS=background` runs them with the default
instead: what they compute must be the same. Tests that count compilations then do not apply.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

TIERS = os.environ.get("LTC_TEST_TIERS", "blocking")


@pytest.fixture(autouse=True)
def tiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The settings, here and for processes that a test starts."""
    monkeypatch.setenv("LTC_TIERS", TIERS)
    monkeypatch.setenv("LTC_CACHE_DIR", "off")
    # Imported late: some tests look at what importing the package does.
    settings = pytest.importorskip("torch_ltc.config").settings
    with settings.scope(tiers=TIERS, cache_dir="off"):
        yield
