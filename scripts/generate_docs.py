"""Writes the pages of docs/ that are made from the code: settings, errors, metrics, messages, one page a module.

The pages of modules are read from the source text, so that nothing is registered or run to document it; settings and
metrics come from their tables. `tests/docs` fails when a page differs from what this writes.

    python scripts/generate_docs.py          # write
    python scripts/generate_docs.py --check  # name the pages that are out of date
"""

import argparse
import ast
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_ltc import errors
from torch_ltc.config import SETTINGS
from torch_ltc.debug.messages import MESSAGES
from torch_ltc.metrics import COUNTERS, METRICS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
NOTE = "<!-- Made by scripts/generate_docs.py from the code: change the code, then run `make docs`. -->\n\n"
UNITS = {"ns": "time", "bytes": "bytes", "": "number"}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Entry:
    """One public name of a module: its heading, what it does, and the same for its public members."""

    name: str
    heading: str
    summary: str
    members: tuple["Entry", ...] = ()


@dataclass(frozen=True, slots=True)
class Module:
    """One module: its dotted name, its docstring and its public names in the order of the source."""

    name: str
    doc: str
    entries: tuple[Entry, ...]
    exports: tuple[tuple[str, str], ...]

    @property
    def page(self) -> str:
        """The file name of its page in docs/api."""
        return f"{self.name}.md"


def pages() -> dict[Path, str]:
    """Every generated page, by its path under the root of the repository."""
    modules = list(read_modules())
    found = {
        Path("docs/settings.md"): settings_page(),
        Path("docs/errors.md"): errors_page(),
        Path("docs/metrics.md"): metrics_page(),
        Path("docs/messages.md"): messages_page(),
        Path("docs/keywords.md"): keywords_page(modules),
        Path("docs/api/README.md"): index_page(modules),
    }
    for module in modules:
        found[Path("docs/api") / module.page] = module_page(module)
    return found


def stale(root: Path = ROOT) -> list[str]:
    """The generated pages that differ from the code, are missing, or belong to no module."""
    expected = pages()
    wrong = [
        str(path) for path, text in expected.items() if not (root / path).exists() or (root / path).read_text() != text
    ]
    return sorted(wrong + [str(path) for path in leftovers(expected, root)])


def leftovers(expected: Mapping[Path, str], root: Path = ROOT) -> list[Path]:
    """The pages in docs/api of modules that are no more."""
    present = (path.relative_to(root) for path in sorted((root / "docs/api").glob("*.md")))
    return [path for path in present if path not in expected]


def settings_page() -> str:
    """The settings, one row each."""
    rows = [
        f"| `{name}` | `{setting.default!r}` | {setting.allowed()} | `{setting.variable}` | {setting.doc} |"
        for name, setting in SETTINGS.items()
    ]
    return (
        f"{NOTE}# Settings\n\n"
        "Attributes of `torch_ltc.config.settings`. An environment variable is read when the package is imported;\n"
        "an assignment in the program wins over it, and is validated. `settings.scope(name=value)` changes settings\n"
        "inside a `with` block, `print(settings.describe())` shows what holds now and where it came from.\n\n"
        "```python\n"
        "from torch_ltc.config import settings\n\n"
        'settings.fallback = "error"\n'
        'with settings.scope(backend="interpreter"):\n'
        "    ...\n"
        "```\n\n"
        "| name | default | may be | variable | meaning |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def errors_page() -> str:
    """The error and warning classes, a section each, in the order of the source."""
    classes = [
        thing
        for thing in vars(errors).values()
        if inspect.isclass(thing) and issubclass(thing, (errors.LtcError, errors.LtcWarning))
    ]
    text = f"{NOTE}# Errors and warnings\n\nAll are in `torch_ltc.errors`.\n"
    for thing in classes:
        bases = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
        text += f"\n## {thing.__name__}\n\nA kind of {bases}.\n\n{inspect.getdoc(thing)}\n"
    return text


def messages_page() -> str:
    """docs/messages.md, a section for each id that `explain`, warnings and the doctor use."""
    parts = [
        NOTE,
        "# Messages\n\nWhat `torch_ltc.explain()`, its warnings, the finders and the doctor say has an id that never "
        "changes: LTC1xx says why a program was compiled, LTC2xx is the doctor's, LTC3xx a finder's. "
        "[Debugging](debugging.md) shows them at work.\n",
    ]
    for code, known in sorted(MESSAGES.items()):
        parts.append(f"\n## {code}\n\n**{known.name}.** {known.means}\n\nWhat to do: {known.advice}\n")
    return "".join(parts)


def metrics_page() -> str:
    """The counters and the timed metrics, one row each."""
    counters = "\n".join(f"| `{name}` | {doc} |" for name, doc in COUNTERS.items())
    timers = "\n".join(f"| `{name}` | {UNITS[unit]} | {doc} |" for name, (unit, doc) in METRICS.items())
    return (
        f"{NOTE}# Metrics\n\n"
        "`torch_ltc.metrics.metrics_report()` prints all of them, `snapshot()` returns them as plain values, and\n"
        "`reset()` forgets them. A counter that is 0 is not listed, and its `counter_value` is None.\n\n"
        f"## Counters\n\n| name | counts |\n|---|---|\n{counters}\n\n"
        f"## Samples\n\n| name | unit | measures |\n|---|---|---|\n{timers}\n"
    )


def read_modules() -> Iterator[Module]:
    """Every module of the package that is not private, sorted by name."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not any(part.startswith("_") for part in name.split(".")):
            yield read_module(name, ast.parse(path.read_text()))


def read_module(name: str, tree: ast.Module) -> Module:
    """What the source text of one module says."""
    exports = tuple(
        (node.module, alias.asname or alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_ltc")
        for alias in node.names
        if node.module is not None and (alias.asname or alias.name) in exported_names(tree)
    )
    entries = tuple(entry for node in tree.body if (entry := read_entry(node)) is not None)
    return Module(name, ast.get_docstring(tree) or "", entries, exports)


def exported_names(tree: ast.Module) -> set[str]:
    """The names in `__all__`; none when the module has none."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(node, ast.Assign):
            return set(ast.literal_eval(node.value))
    return set()


def read_entry(node: ast.stmt, in_class: bool = False) -> Entry | None:
    """The public name that a statement of a module or class defines; None when it defines none."""
    if isinstance(node, FunctionNode) and not node.name.startswith("_"):
        is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
        result = f": {ast.unparse(node.returns)}" if node.returns is not None else ""
        return Entry(node.name, node.name + (result if is_property else signature(node)), summary(node))
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        bases = f"({', '.join(ast.unparse(base) for base in node.bases)})" if node.bases else ""
        members = tuple(entry for child in node.body if (entry := read_entry(child, in_class=True)) is not None)
        return Entry(node.name, f"class {node.name}{bases}", summary(node), members)
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        name = node.target.id
        if not name.startswith("_") and (in_class or name.isupper()):
            return Entry(name, f"{name}: {ast.unparse(node.annotation)}", "")
    return None


def signature(node: FunctionNode) -> str:
    """The arguments, without self, and the result of a function."""
    arguments = ast.unparse(node.args)
    if arguments == "self" or arguments.startswith("self, "):
        arguments = arguments[len("self, ") :]
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({arguments}){result}"


def summary(node: FunctionNode | ast.ClassDef) -> str:
    """The first paragraph of the docstring of a function or class, on one line."""
    return first_paragraph(ast.get_docstring(node) or "")


def first_paragraph(doc: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(doc.split("\n\n")[0].split())


def module_page(module: Module) -> str:
    """The page of one module."""
    text = f"{NOTE}# {module.name}\n\n{module.doc}\n"
    if module.exports:
        text += "\n## Names from other modules\n\n"
        text += "".join(f"- [`{name}`]({origin}.md)\n" for origin, name in sorted(module.exports, key=lambda e: e[1]))
    for entry in module.entries:
        text += f"\n## {entry.name}\n\n```text\n{entry.heading}\n```\n"
        text += f"\n{entry.summary}\n" if entry.summary else ""
        text += "\n" if entry.members else ""
        text += "".join(f"- `{item.heading}`{': ' if item.summary else ''}{item.summary}\n" for item in entry.members)
    return text


def index_page(modules: list[Module]) -> str:
    """The list of all modules, with the first sentence of each."""
    rows = "".join(f"| [{module.name}]({module.page}) | {first_paragraph(module.doc)} |\n" for module in modules)
    head = "# Modules\n\nEvery name: [keyword index](../keywords.md).\n\n| module | what it owns |\n|---|---|\n"
    return f"{NOTE}{head}{rows}"


def keywords_page(modules: list[Module]) -> str:
    """Every public name of every module, sorted, with the page that it stands on."""
    found: set[tuple[str, str, str]] = set()
    for module in modules:
        for entry, anchor in zip(module.entries, anchors(module), strict=True):
            found.add((entry.name, module.name, anchor))
            found.update((f"{entry.name}.{member.name}", module.name, anchor) for member in entry.members)
    rows = "".join(
        f"| `{name}` | [{module}](api/{module}.md#{anchor}) |\n"
        for name, module, anchor in sorted(found, key=lambda item: (item[0].lower(), item))
    )
    return f"{NOTE}# Keyword index\n\n| name | module |\n|---|---|\n{rows}"


def anchors(module: Module) -> list[str]:
    """The anchor of each entry's heading; names that differ only in case are numbered, as renderers do."""
    seen: Counter[str] = Counter()
    found = []
    for entry in module.entries:
        name = entry.name.lower()
        found.append(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def main() -> int:
    """Write the pages, or with --check only name those that are out of date."""
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a page is out of date")
    if parser.parse_args().check:
        wrong = stale()
        print("\n".join(f"out of date: {path}" for path in wrong) or "all generated pages are up to date")
        return 1 if wrong else 0
    expected = pages()
    for path, text in expected.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    for path in leftovers(expected):
        (ROOT / path).unlink()
    print(f"wrote {len(expected)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
