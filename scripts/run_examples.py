"""Runs the examples of docs/debugging.md and writes what they print below them.

An example is a `python` block that a `text` block follows: it runs as "train.py" in a namespace of its own, after
everything known was forgotten; what it prints, and the warnings that it shows, is the text. Durations and figures that
depend on the machine are compared as if they were equal.

    python scripts/run_examples.py          # write
    python scripts/run_examples.py --check  # name the examples whose text is another one
"""

import argparse
import contextlib
import gc
import io
import itertools
import linecache
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import torch_ltc
from torch_ltc import metrics
from torch_ltc.config import settings
from torch_ltc.debug.history import history
from torch_ltc.device.fallback import reset_warnings
from torch_ltc.runtime import cache

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "debugging.md",)
EXAMPLE = re.compile(r"^```python\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```", re.MULTILINE)
NAME = "train.py"
# What differs from run to run: durations, rates, sizes of memory, identities of programs after a restart. From one
# processor or version of PyTorch to another: the last digits of a float32, and what they are allowed to be.
VARYING = (
    (re.compile(r"(?<=\b\d\.\d{3})\d+"), "#"),
    (re.compile(r"(?<=\(allowed: )[\d.e-]+"), "#"),
    (re.compile(r"\b[\d,]+(\.\d+)? ?(us|ms|s|ns|B|KB|MB|GB|KiB|MiB|GiB)\b"), "# s"),
    (re.compile(r"\b\d+(\.\d+)? ?%"), "# %"),
    (re.compile(r"(?<=_seconds_sum ).*|(?<=quantile=\"0\.\d\"} ).*"), "#"),
    (re.compile(r" +"), " "),
)


def printed(code: str) -> str:
    """What an example prints, warnings included, in a folder of its own."""
    _forget()
    out = io.StringIO()
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    before, names = Path.cwd(), {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, settings.scope(tiers="blocking", cache_dir="off"):
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = lambda message, kind, *rest: print(f"{kind.__name__}: {message}")
                exec(compile(code, NAME, "exec"), names)
                torch_ltc.sync(wait=True)
        finally:
            # A backend that stays registered has them.
            names.clear()
            os.chdir(before)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip() + "\n"


def _forget() -> None:
    """Begin as a new process would, as far as text shows it."""
    gc.collect()
    torch_ltc.sync(wait=True)
    torch.ltc.reset_peak_memory_stats()
    torch_ltc.ir_cache.reset()
    cache._identities = itertools.count(1)
    torch.manual_seed(0)
    torch.ltc.manual_seed(0)
    reset_warnings()
    metrics.reset()
    history.clear()


def same(expected: str, actual: str) -> bool:
    """Whether two texts are equal but for what differs from run to run."""
    for pattern, sign in VARYING:
        expected, actual = pattern.sub(sign, expected), pattern.sub(sign, actual)
    return expected == actual


def examples(page: Path) -> list[tuple[str, str]]:
    """Code and text of each example."""
    return [(match[1], match[2]) for match in EXAMPLE.finditer(page.read_text())]


def rewrite(page: Path) -> None:
    """Put what the examples print now into the page."""

    def filled(match: re.Match[str]) -> str:
        text = printed(match[1])
        return match[0] if same(match[2], text) else match[0][: match.start(2) - match.start()] + text + "```"

    page.write_text(EXAMPLE.sub(filled, page.read_text()))


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not options.check:
        for page in PAGES:
            rewrite(page)
        return 0
    wrong = [code for page in PAGES for code, text in examples(page) if not same(text, printed(code))]
    for code in wrong:
        print(f"another text now:\n{code}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
