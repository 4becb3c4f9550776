"""A headless Chromium, the reports of two examples, and a page that notes whatever it should not do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.chromium import FLAGS, ROOT, SCRIPTS, Opened, chromium_path

if TYPE_CHECKING:
    from playwright.sync_api import Browser


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
