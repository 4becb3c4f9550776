"""Makes the two pictures of the report that the documentation shows, anew: `make screenshots`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.chromium import FLAGS, ROOT, chromium_path

WIDTH, HEIGHT = 1360, 1460
COLOURS = 160


def make_report(path: Path) -> None:
    variables = {"LTC_REPORT": str(path), "LTC_CACHE_DIR": "off", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "examples/bad_habits.py"]
    subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, check=True, capture_output=True, timeout=300)
    # The picture is for everybody: the folder that it was made in is nobody's concern.
    path.write_text(path.read_text(encoding="utf-8").replace(f"{ROOT}/", ""), encoding="utf-8")


def picture(page: bytes, path: Path) -> None:
    """Save it with few colours, which is a quarter of the size."""
    image = Image.open(io.BytesIO(page)).convert("RGB")
    image.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        make_report(report)
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page.goto(report.as_uri())
            page.wait_for_function("() => window.reportTimeline")
            page.wait_for_timeout(300)
            picture(page.screenshot(), ROOT / "docs" / f"report-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
