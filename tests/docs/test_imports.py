"""No module imports from a test module or a conftest: what tests share is in `tests/support` or a module of its own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests", "benchmarks", "examples", "scripts")


def imported_modules(source: str) -> set[str]:
    """The full names of what a file imports; `from a import b` may name the module `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def misplaced_imports(source: str) -> list[str]:
    """The imports from modules that hold tests or fixtures."""
    return sorted(name for name in imported_modules(source) if re.match(r"tests\.(\w+\.)*(test_\w+|conftest)\b", name))


def test_no_module_imports_from_a_test_module() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = {str(file.relative_to(ROOT)): misplaced_imports(file.read_text()) for file in files}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_the_check_recognises_every_form() -> None:
    assert misplaced_imports("from tests.unit.test_cache import entry") == [
        "tests.unit.test_cache",
        "tests.unit.test_cache.entry",
    ]
    assert misplaced_imports("from tests.cli import conftest") == ["tests.cli.conftest"]
    assert misplaced_imports("def run():\n    import tests.unit.test_cache") == ["tests.unit.test_cache"]
    assert misplaced_imports("from tests.support.backends import record\nimport test_other") == []
