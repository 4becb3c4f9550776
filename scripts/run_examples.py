"""Runs the Python blocks of the README and of docs/, and writes what the examples among them print below them.

An example is a `python` block that a `text` block follows: what it prints, and the warnings that it shows, is the text.
Any other `python` block only has to run. Each runs as "train.py" in a namespace of its own, after everything known was
forgotten. A block that begins with the name of a file, as `# train.py`, runs by the `ltc` command in the text below it.
Cells of a notebook share a namespace. Durations and figures that depend on the machine are compared as if they were
equal.

    python scripts/run_examples.py          # write
    python scripts/run_examples.py --check  # run everything, and name what fails or prints another text
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import itertools
import linecache
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import torch_ltc
from torch_ltc import events, metrics
from torch_ltc.compile import program_cache
from torch_ltc.config import SETTINGS, settings
from torch_ltc.debug.history import history
from torch_ltc.device.fallback import reset_warnings

ROOT = Path(__file__).resolve().parent.parent
# The page on backends is one program from its first block to its last: tests/docs/test_writing_a_backend.py runs it.
PAGES = tuple(
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md")))
    if page.name != "writing_a_backend.md"
)
BLOCK = re.compile(
    r"^```(?P<kind>python|\{code-cell\})\n(?::.*\n)*(?P<code>(?:(?!```).*\n)*)```\n(?:\n```text\n(?P<text>(?:(?!```).*\n)*)```)?",
    re.MULTILINE,
)
NAME = "train.py"
# What differs from run to run: durations, rates, sizes of memory, identities of programs after a restart. From one
# processor or version of PyTorch to another: the last digits of a float32, and what they are allowed to be.
VARYING = (
    (re.compile(r"(?<=\b\d\.\d{3})\d+"), "#"),
    # It is there only with the extension.
    (re.compile(r"'NativeHits': \d+, "), ""),
    (re.compile(r"(?<=\(allowed: )[\d.e-]+"), "#"),
    (re.compile(r"\b[\d,]+(\.\d+)? ?(us|ms|s|ns|B|KB|MB|GB|KiB|MiB|GiB)\b"), "# s"),
    (re.compile(r"\b\d+(\.\d+)? ?%"), "# %"),
    (re.compile(r"(?<=_seconds_sum ).*|(?<=quantile=\"0\.\d\"} ).*"), "#"),
    # The last digits of results, and with them the tolerance, differ from processor to processor.
    (re.compile(r"\b(\d+\.\d{4})\d+\b"), r"\1"),
    (re.compile(r"\(allowed: [^)]*\)"), "(allowed: #)"),
    (re.compile(r"\b\d+(\.\d+)?e-\d+\b"), "#"),
    (re.compile(r" +"), " "),
)
NUMBER = re.compile(r"\d+(\.\d+)?")
# What a block needs beside the package, by what it mentions.
NEEDS = {"xla": "jax", "jax": "jax", "sklearn": "sklearn", "onnx": "onnx", "lightning": "lightning"}


@dataclass(frozen=True, slots=True)
class Block:
    """A block of Python on a page, with the text that stands below it, None when there is none."""

    page: Path
    line: int
    code: str
    text: str | None
    cell: bool

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, if it says so."""
        named = re.match(r"# (\w+\.py)\n", self.code)
        return named[1] if named else None

    @property
    def runs(self) -> bool:
        """Whether everything that it needs is installed."""
        return all(
            importlib.util.find_spec(package) is not None for word, package in NEEDS.items() if word in self.code
        )

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def printed(code: str, names: dict[str, object] | None = None, tiers: str = "blocking") -> str:
    """What an example prints, warnings included, in a folder of its own; `names` is a namespace that lives on."""
    if names is None:
        with contextlib.closing(_Namespace()) as fresh:
            return printed(code, fresh.names, tiers)
    out = io.StringIO()
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, _left_as_found(tiers):
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = lambda message, kind, *rest: print(f"{kind.__name__}: {message}")
                exec(compile(code, NAME, "exec"), names)
                torch_ltc.sync(wait=True)
        finally:
            os.chdir(before)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip() + "\n"


class _Namespace:
    """A namespace for one example, or for the cells of one notebook, as a new process would have it."""

    def __init__(self) -> None:
        _forget()
        self.names: dict[str, object] = {"__name__": "__main__"}

    def close(self) -> None:
        """Let go of everything in it: a backend that stays registered holds the namespace."""
        self.names.clear()


@contextlib.contextmanager
def _left_as_found(tiers: str) -> Iterator[None]:
    """A scope in which nothing is kept on disk, and at whose end settings and listeners are what they were."""
    now = {name: getattr(settings, name) for name in SETTINGS}
    listeners = dict(events._subscriptions)
    try:
        with settings.scope(**{**now, "tiers": tiers, "cache_dir": "off"}):
            yield
    finally:
        events._subscriptions.clear()
        events._subscriptions.update(listeners)


def _forget() -> None:
    """Begin as a new process would, as far as text shows it."""
    gc.collect()
    torch_ltc.sync(wait=True)
    torch.ltc.reset_peak_memory_stats()
    torch_ltc.ir_cache.reset()
    program_cache._identities = itertools.count(1)
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


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of Python on a page, in order."""
    content = page.read_text()
    for match in BLOCK.finditer(content):
        line = content.count("\n", 0, match.start()) + 1
        yield Block(page, line, match["code"], match["text"], match["kind"] != "python")


def examples(page: Path) -> list[tuple[str, str]]:
    """Code and text of each example that prints what stands below it."""
    return [(block.code, block.text) for block in blocks(page) if block.text is not None and block.file is None]


def run_command(block: Block) -> str | None:
    """Run a block that is a file by the command in the text below it; what is wrong, None if nothing is."""
    command, _, expected = (block.text or "").partition("\n")
    if not command.startswith("$ ltc run "):
        return "no text that begins with '$ ltc run' stands below it"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / (block.file or NAME)).write_text(block.code)
        done = subprocess.run(
            [sys.executable, "-m", "torch_ltc", *shlex.split(command)[2:]],
            cwd=folder,
            env={**os.environ, "LTC_CACHE_DIR": folder, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    # The last line is a summary on stderr, whose findings depend on the machine.
    expected = "".join(line for line in expected.splitlines(keepends=True) if not line.startswith("torch_ltc: "))
    if done.returncode == 0 and NUMBER.sub("#", done.stdout) == NUMBER.sub("#", expected):
        return None
    return f"{command} ends with {done.returncode} and prints\n{done.stdout}{done.stderr}"


def run_block(block: Block, notebook: dict[str, object]) -> str | None:
    """Run a block in this process; what is wrong, None if nothing is. Only what is compared waits for compilers."""
    tiers = "background" if block.text is None else "blocking"
    text = printed(block.code, notebook if block.cell else None, tiers)
    return None if block.text is None or same(block.text, text) else f"prints another text now:\n{text}"


def problems(page: Path) -> Iterator[str]:
    """Run everything on a page, and say what fails or prints another text."""
    with contextlib.closing(_Namespace()) as notebook:
        for block in blocks(page):
            if not block.runs:
                continue
            try:
                wrong = run_command(block) if block.file else run_block(block, notebook.names)
            except Exception:
                wrong = traceback.format_exc()
            if wrong is not None:
                yield f"{block}: {wrong}"


def rewrite(page: Path) -> None:
    """Put what the examples print now into the page."""

    def filled(match: re.Match[str]) -> str:
        if match["text"] is None or match["code"].startswith("# "):
            return match[0]
        text = printed(match["code"])
        return match[0] if same(match["text"], text) else match[0][: match.start("text") - match.start()] + text + "```"

    page.write_text(BLOCK.sub(filled, page.read_text()))


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when a block fails or prints another text"
    )
    parser.add_argument("pages", nargs="*", type=Path, help="pages, by default all of them")
    options = parser.parse_args()
    pages = [page.resolve() for page in options.pages] or PAGES
    if not options.check:
        for page in pages:
            rewrite(page)
        return 0
    wrong = [problem for page in pages for problem in problems(page)]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
