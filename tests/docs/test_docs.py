"""The documentation agrees with the repository: links, commands, code and generated pages."""

import itertools
import re
import textwrap
from pathlib import Path

import pytest

from scripts import generate_docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^([ ]*)```(\w*)[^\n]*\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


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
        elif anchor and file.suffix == ".md" and anchor not in headings(file.read_text()):
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


def test_generated_pages_are_up_to_date() -> None:
    assert generate_docs.stale() == [], "run `make docs`"


def test_every_public_module_has_a_page_with_its_docstring() -> None:
    modules = list(generate_docs.read_modules())
    assert {"torch_ltc.config", "torch_ltc.errors", "torch_ltc.events"} <= {module.name for module in modules}
    assert [module.name for module in modules if not module.doc] == []


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
