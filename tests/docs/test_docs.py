"""The documentation agrees with the repository: links, commands, code and generated pages."""

import ast
import itertools
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MADE = ("_build", "generated")
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"]
    if not set(MADE) & set(page.relative_to(ROOT).parts)
)
MOST_README_LINES = 150
FENCE = re.compile(r"^([ ]*)```(\w*)[^\n]*\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def with_included(page: Path) -> str:
    """The text of a page, and that of the file which it includes, if it does."""
    text = page.read_text()
    included = re.search(r"^```\{include\} (\S+)$", text, re.MULTILINE)
    return text if included is None else (page.parent / included[1]).read_text()


def headings(text: str) -> set[str]:
    """The anchors of a page, as the usual renderers make them from its headings."""
    plain = FENCE.sub("", text)
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?) *$", plain, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = next(number for number in itertools.count() if anchor + f"-{number}" * bool(number) not in found)
        found.add(anchor + f"-{number}" * bool(number))
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or ROOT not in [file, *file.parents]:
            broken.append(target)
        elif anchor and file.suffix == ".md" and anchor not in headings(with_included(file)):
            broken.append(target)
    return broken


def named_targets(text: str) -> set[str]:
    """The targets of `make` in code, inline or fenced; prose may make what it likes."""
    code = [body for _, _, body in FENCE.findall(text)] + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return {target for piece in code for target in re.findall(r"(?:^|[\s;&$])make ([a-z][\w-]*)", piece)}


def python_blocks(text: str) -> list[str]:
    return [textwrap.dedent(body) for _, language, body in FENCE.findall(text) if language in ("python", "py")]


def test_the_readme_is_there() -> None:
    assert ROOT / "README.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_named_in_the_docs_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named_targets(page.read_text()) - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_blocks_compile(page: Path) -> None:
    for block in python_blocks(page.read_text()):
        compile(block, str(page), "exec")


def test_every_module_has_a_docstring() -> None:
    """They are what the pages of modules begin with."""
    without = [path for path in ROOT.glob("src/**/*.py") if ast.get_docstring(ast.parse(path.read_text())) is None]
    assert without == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < MOST_README_LINES


def test_every_page_is_in_the_navigation() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    named = set(re.findall(r"^[\w/]+$", index, re.MULTILINE))
    pages = {page.stem for page in ROOT.glob("docs/*.md")} - {"index"}
    assert pages <= named
    assert f"({'decisions/index'}.md)" in index


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs" / "decisions" / "index.md").read_text()
    decisions = [path.name for path in ROOT.glob("docs/decisions/0*.md")]
    assert [name for name in decisions if f"({name})" not in index] == []


def test_checks_recognise_what_they_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One title\n[a](missing.md) [b](#one-title) [c](#other) [d](page.md#one-title) [e](https://example.org)\n"
        "`make nothing` but make sure\n```bash\nmake never\n```\n```python\nx = (\n```\n"
    )
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert broken_links(page) == ["missing.md", "#other"]
    assert named_targets(page.read_text()) == {"nothing", "never"}
    with pytest.raises(SyntaxError):
        compile(python_blocks(page.read_text())[0], "page", "exec")
