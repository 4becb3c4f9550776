"""A headless Chromium, the reports of two examples, and a page that notes whatever it should not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # Not on top: most environments of the other tests do not have it.
    driver = pytest.importorskip("playwright.sync_api")
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports that the examples leave at their end, by name."""
    folder = tmp_path_factory.mktemp("reports")
    made: dict[str, Path] = {}
    for name, (script, *arguments) in SCRIPTS.items():
        made[name] = folder / f"{name}.html"
        variables = {"LTC_REPORT": str(made[name]), "LTC_CACHE_DIR": "off", "PYTHONPATH": str(ROOT / "src")}
        subprocess.run(
            [sys.executable, str(ROOT / "examples" / script), *arguments],
            env={**os.environ, **variables},
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=300,
        )
    return made


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


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Opens a file in a fresh profile; an error or a request of the page fails the test at its end."""
    pages: list[Opened] = []

    def open_file(path: Path, width: int = 1360, height: int = 900, scheme: str = "light") -> Opened:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        made = Opened(page)
        pages.append(made)
        page.on("console", lambda said: made.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: made.errors.append(str(error)))
        page.on("request", lambda request: made.requests.append(request.url))
        return made.goto(path)

    yield open_file
    for made in pages:
        allowed = made.page.url.split("#")[0]
        made.page.close()
        assert made.errors == []
        assert set(made.requests) == {allowed}
