"""The seam to PyTorch: its table, its probes, its patches, and that nothing goes around it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_ltc
from torch_ltc.backends.inductor import random_state
from torch_ltc.errors import LtcError, LtcWarning, UnsupportedTorchError
from torch_ltc.pytorch import entries
from torch_ltc.pytorch.entries import Entry, Interface, Patch, Registration, Table, failing_probes, takes
from torch_ltc.pytorch.headers import Header
from torch_ltc.pytorch.patches import Changes, Patches, changes
from torch_ltc.pytorch.table import DEVICE_NAME, compatibility_table, table

SOURCE = Path(torch_ltc.__file__).parent
SEAM = {*SOURCE.glob("pytorch/*.py"), *SOURCE.glob("backends/*/private.py")}
# Imported by `import torch`: it must not load the package. Both names are in the table.
AUTOLOAD = SOURCE.parent / "torch_ltc_autoload.py"
# Private attributes of objects that are not PyTorch's, or whose entry is that of their class.
OBJECTS = {
    "_ltc": "our own mark on a tensor",
    "_untyped_storage": "torch.TypedStorage",
    "_getframe": "sys", "_exit": "os",
    "_is_owned": "threading.RLock", "_release_save": "threading.RLock", "_acquire_restore": "threading.RLock",
}  # fmt: skip
assert random_state.__name__  # registers what the backend adds to the table


# ---- the table ----------------------------------------------------------------------------------------------------


# PyTorch's test modules warn about packages that are not there.
@pytest.mark.filterwarnings("ignore::ImportWarning")
@pytest.mark.parametrize("entry", table.entries(Entry), ids=lambda entry: entry.path)
def test_pytorch_is_as_expected(entry: Entry) -> None:
    """Fails on a PyTorch that has changed; the message says which feature breaks."""
    problem = entry.probe()
    assert problem is None, problem


def test_entries_say_why_and_what_breaks() -> None:
    for entry in table.entries(Entry):
        assert entry.why, entry
        assert entry.without, entry
        assert entry.since <= (entry.until or entry.since)


def test_a_second_entry_for_a_path_is_an_error() -> None:
    own = Table()
    own.add(Interface("torch.a", "x", "y"))
    with pytest.raises(LtcError, match=r"torch\.a is in the table already"):
        own.add(Patch("torch.a", "x", "y"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Interface("torch._C._never", "x", "all views"), "_never.*without it: all views"),
        (Interface("torch._never.module.name", "x", "y"), "ModuleNotFoundError"),
        (Interface("torch.__version__", "x", "y"), r"torch\.__version__ is not as expected; without it: y"),
        (Interface("torch.nn.Module._apply", "x", "y", check=takes("self", "other")), "not as expected"),
    ],
)
def test_a_failing_probe_says_what_breaks(entry: Entry, message: str) -> None:
    problem = entry.probe()
    assert problem is not None
    assert re.search(message, problem)


def test_entries_of_other_versions_are_not_probed() -> None:
    assert Interface("torch._never", "x", "y", since=(99, 0)).probe() is None
    assert Interface("torch._never", "x", "y", until=(1, 0)).probe() is None
    assert Patch("torch._never", "x", "y", optional=True).probe() is None
    assert Patch("torch._never", "x", "y").probe() is not None


def test_failing_probes_import_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Table()
    module = "torch.distributed.tensor.debug._op_coverage"
    own.add(
        Interface(f"{module}.get_inductor_decomp_graphs", "x", "y"),
        Interface(f"{module}.never", "x", "the feature"),
    )
    monkeypatch.setattr(entries, "table", own)
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert failing_probes() == [f"{module}.never is not as expected; without it: the feature"]
    assert module not in sys.modules


def test_failing_probes_are_none_here() -> None:
    began = time.perf_counter()
    assert failing_probes() == []
    # Reported, not judged: a timing is no test.
    print(f"probes took {time.perf_counter() - began:.3f} s")


def test_a_header_without_a_name_fails_its_probe() -> None:
    problem = Header("c10/core/Device.h", "x", "the guard", names=("Device", "Never")).probe()
    assert problem == "c10/core/Device.h lacks Never; without it: the guard"
    assert Header("c10/never.h", "x", "y").probe() is not None


def test_every_header_that_the_extension_includes_has_an_entry() -> None:
    files = [*(SOURCE / "native").glob("*.cpp"), *(SOURCE / "native").glob("*.h")]
    included = {name for file in files for name in re.findall(r"#include <((?:ATen|c10|torch)/.*)>", file.read_text())}
    assert included == {entry.path for entry in table.entries(Header)}


# ---- nothing goes around it ---------------------------------------------------------------------------------------


def is_private(path: str) -> bool:
    parts = path.split(".")
    return parts[:2] != ["torch", "ops"] and any(p.startswith("_") and not p.endswith("__") for p in parts[1:])


def torch_paths(text: str) -> Iterator[tuple[int, str]]:
    """Every dotted path into PyTorch that the module uses, with its line."""
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for imported in node.names:
                if imported.name.split(".")[0] == "torch":
                    names[imported.asname or "torch"] = imported.name if imported.asname else "torch"
                    yield node.lineno, imported.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for imported in node.names:
                names[imported.asname or imported.name] = f"{node.module}.{imported.name}"
                yield node.lineno, f"{node.module}.{imported.name}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (path := dotted(node, names)):
            yield node.lineno, path


def dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return None


def object_attributes(text: str) -> Iterator[tuple[int, str]]:
    """Private attributes of objects that are not `self`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            owner = node.value
            ours = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            # An operator of a namespace: its schema is public.
            operator = ast.unparse(owner) in ("aten", "torch.ops.aten", "torch.ops.mkldnn")
            if not ours and not operator:
                yield node.lineno, node.attr


@functools.cache
def own_names() -> frozenset[str]:
    """Private names that the package defines itself."""
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return frozenset(found)


FILES = sorted({*SOURCE.rglob("*.py"), AUTOLOAD} - SEAM)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE.parent)))
def test_private_interfaces_are_used_through_the_seam(file: Path) -> None:
    text = file.read_text()
    used = [f"line {line}: {path}" for line, path in torch_paths(text) if is_private(path)]
    if file == AUTOLOAD:
        known = {entry.path for entry in table.entries(Interface)}
        assert {path.split(": ")[1] for path in used} <= known
        return
    assert used == [], "re-export it from torch_ltc/pytorch/private.py, with an entry in table.py"
    listed = {entry.path.rpartition(".")[2] for entry in table.entries(Entry)} | set(OBJECTS) | own_names()
    unlisted = [f"line {line}: {name}" for line, name in object_attributes(text) if name not in listed]
    assert unlisted == [], "a private attribute of PyTorch's objects needs an entry in table.py"


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch._C._len_torch_function_stack()",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch._inductor.config as config",
        "import torch as t\nt.nn.Module._apply",
    ],
)
def test_private_uses_are_recognised(line: str) -> None:
    assert any(is_private(path) for _, path in torch_paths(line))


def test_public_uses_are_left_alone() -> None:
    text = "import torch\ntorch.ops.aten._to_copy.default\ntorch.__version__\ntorch.nn.functional.linear"
    assert not any(is_private(path) for _, path in torch_paths(text))
    assert [name for _, name in object_attributes("x._hidden\nself._own\naten._conj\nx.__dict__")] == ["_hidden"]


def test_the_seam_exports_nothing_without_an_entry() -> None:
    known = {entry.path for entry in table.entries(Entry)}
    unknown = [
        f"{file.name}:{line}: {path}"
        for file in SEAM
        for line, path in torch_paths(file.read_text())
        if is_private(path)
        and not any(path == entry or path.startswith(f"{entry}.") for entry in known)
        # Modules that are loaded for their names in the table.
        and not any(entry.path.startswith(f"{path}.") for entry in table.entries(Entry))
    ]
    assert unknown == []


# ---- changes ------------------------------------------------------------------------------------------------------


def owner() -> Any:
    class Owner:
        @staticmethod
        def greet(name: str = "you") -> str:
            return f"hello {name}"

    return Owner


def louder(original: Any) -> Any:
    def greet(*args: Any) -> str:
        return f"{original(*args)}!"

    return greet


def test_undone_attributes_are_the_objects_that_they_were() -> None:
    changed = owner()
    before = vars(changed)["greet"]
    with Patches() as patches:
        patches.wrap(changed, "greet", louder)
        patches.wrap(changed, "greet", louder)
        assert changed.greet() == "hello you!!"
    assert vars(changed)["greet"] is before


def test_inherited_attributes_are_inherited_again() -> None:
    changed = type("Child", (owner(),), {})
    with Patches() as patches:
        patches.put(changed, "greet", lambda: "hi")
        assert changed.greet() == "hi"
    assert "greet" not in vars(changed)


def test_what_another_package_has_wrapped_stays_and_passes_calls_on() -> None:
    changed = owner()
    patches = Patches()
    patches.wrap(changed, "greet", louder)
    ours = changed.greet
    changed.greet = staticmethod(lambda *args: f"<{ours(*args)}>")
    assert changed.greet() == "<hello you!>"
    assert patches.undo() is False
    assert changed.greet() == "<hello you>"
    assert changed.greet("all") == "<hello all>"


def test_changes_are_made_once_and_again_after_they_were_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    own, target, log = Table(), SimpleNamespace(greet=lambda: "hello"), []
    own.add(Patch("target.greet", "x", "y"), Registration("a hook", "x", "y"))
    monkeypatch.setattr("torch_ltc.pytorch.patches.table", own)
    monkeypatch.setattr("torch_ltc.pytorch.patches.resolve", lambda path: target)
    monkeypatch.setattr("torch_ltc.pytorch.entries.resolve", lambda path: target)
    made = Changes()
    made.replaces("target.greet")(louder)
    for _ in range(2):
        made.install()
        assert target.greet() == "hello!"
    with pytest.raises(LtcError, match="changed already"):
        made.replaces("target.greet")(louder)

    @made.registers("a hook")
    def hook() -> Any:
        # Installed already: made at once.
        log.append("on")
        return lambda: log.append("off")

    assert log == ["on"]
    assert made.uninstall() == []
    assert (target.greet(), log) == ("hello", ["on", "off"])
    made.install()
    assert (target.greet(), log) == ("hello!", ["on", "off", "on"])


def test_changes_without_an_entry_are_an_error() -> None:
    with pytest.raises(LtcError, match=r"torch\.add has no Patch in the table"):
        Changes().replaces("torch.add")
    with pytest.raises(LtcError, match="has no Registration"):
        Changes().registers("torch.Tensor.data")


def test_a_missing_attribute_is_refused_unless_it_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Table()
    own.add(Patch("torch.never", "x", "the feature"), Patch("torch.perhaps", "x", "y", optional=True))
    monkeypatch.setattr("torch_ltc.pytorch.patches.table", own)
    made = Changes()
    made.replaces("torch.perhaps")(louder)
    made.install()
    with pytest.raises(UnsupportedTorchError, match=r"PyTorch has no torch\.never; without it: the feature"):
        made.replaces("torch.never")(louder)


def test_every_change_of_the_table_is_made() -> None:
    expected = {entry.path for kind in (Patch, Registration) for entry in table.entries(kind)}
    assert set(changes.known()) == expected - {DEVICE_NAME}


def test_uninstall_leaves_pytorch_as_it_was() -> None:
    """In a process of its own: what PyTorch has before the import is what it has after `uninstall`."""
    script = """
        import os
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch
        from torch.optim import optimizer

        def state():
            owners = (torch, torch._C, torch.Tensor, torch.UntypedStorage, torch.TypedStorage, torch.nn.Module,
                      torch.accelerator, torch._utils, torch._tensor_str, torch.utils.dlpack, torch.autograd,
                      torch.autograd.graph)
            found = {(str(o), name): value for o in owners for name, value in vars(o).items()
                     if "ltc" not in name and not name.startswith("__abstract")}
            found["hooks"] = len(optimizer._global_optimizer_post_hooks)
            found["gradients"] = torch._C._dispatch_has_kernel_for_dispatch_key(
                "aten::linear_backward", "CompositeExplicitAutograd")
            return found

        before = state()
        import torch_ltc
        missing = object()
        installed = state()
        changed = {key for key, value in installed.items() if before.get(key, missing) is not value}
        assert len(changed) > 48, changed
        torch_ltc.uninstall()
        after = state()
        differs = [key for key in before if key != "hooks" and after.get(key, missing) is not before[key]]
        assert differs == [], differs
        extra = [key for key in after.keys() - before.keys() if "torch_ltc" in str(after[key])]
        assert extra == [], extra
        assert after["hooks"] == before["hooks"]
        assert torch.UntypedStorage(4).nbytes() == 4
        torch_ltc.uninstall()
        torch_ltc.install()
        torch_ltc.install()
        again = state()
        assert again["hooks"] == installed["hooks"]
        model = torch.nn.Linear(2, 2)
        parameter = model.weight
        assert model.to("ltc").weight is parameter
        x = torch.ones(2, 2, device="ltc", requires_grad=True)
        model(x).sum().backward()
        print(torch.Generator(device="ltc").device, x.grad.cpu().shape, torch.save(x, os.devnull))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ltc:0 torch.Size([2, 2]) None"


def test_uninstall_names_what_another_package_has_wrapped() -> None:
    ours = torch.Tensor.__deepcopy__
    try:
        torch.Tensor.__deepcopy__ = lambda self, memo: ours(self, memo)  # type: ignore[method-assign]
        with pytest.warns(LtcWarning, match=r"torch\.Tensor\.__deepcopy__ was wrapped by another package"):
            torch_ltc.uninstall()
    finally:
        torch.Tensor.__deepcopy__ = ours.__wrapped__  # type: ignore[method-assign]
        torch_ltc.install()
    assert torch.Tensor.__deepcopy__ is not ours


def test_the_table_of_changes_names_every_change() -> None:
    text = compatibility_table()
    assert text.count("| `torch.UntypedStorage.nbytes`, `__len__`, `cpu`") == 1
    for entry in table.entries(Patch):
        assert f"`{entry.path}`" in text or f"`{entry.path.rpartition('.')[2]}`" in text
    assert "LinearCrossEntropyOptions._adjust` (torch 2.13)" in text
