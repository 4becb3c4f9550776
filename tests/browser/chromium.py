"""Where Chromium is, how it is started, and a page in it that notes what it should not do."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# The scripts whose reports are looked at, with their arguments.
SCRIPTS = {"digits": ["digits.py", "--epochs", "2", "--no-eager"], "bad_habits": ["bad_habits.py"]}


def chromium_path() -> str:
    """Chromium of the system; without one, a sentence on how to get it."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.fail("no Chromium found\n  try: apt-get install chromium, or another way to have `chromium` on the PATH")


@dataclass
class Opened:
    """An open page, the errors that it reported and the addresses that it asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def goto(self, path: Path) -> Opened:
        self.page.goto(path.as_uri())
        self.page.wait_for_function("() => window.reportTimeline || !document.getElementById('timeline-chart')")
        return self

    def visible_text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()
