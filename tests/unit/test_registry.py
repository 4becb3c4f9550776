"""Backends by name."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import torch_ltc
from torch_ltc.errors import BackendError, UnknownBackendError
from torch_ltc.lowering.interface import Backend, Computation
from torch_ltc.lowering.registry import ENTRY_POINTS, Registry, registry
from torch_ltc.program.instruction import Program


class Nothing(Backend):
    name = "nothing"

    def compile(self, program: Program) -> Computation:
        raise NotImplementedError


def test_backends_in_the_box_are_registered() -> None:
    assert {"interpreter", "torchscript"} <= set(registry.names())
    assert registry.reference is registry.get("interpreter")


def test_registered_backend_is_found_by_its_name() -> None:
    own = Registry()
    backend = Nothing()
    own.register(backend, reference=True)
    assert own.get("nothing") is backend
    assert own.reference is backend
    assert own.names() == ["nothing"]


def test_a_second_backend_of_a_name_is_refused() -> None:
    own = Registry()
    own.register(Nothing())
    with pytest.raises(BackendError, match="a backend named 'nothing' is registered already"):
        own.register(Nothing())


def test_unknown_backend_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        UnknownBackendError, match=r"no backend named 'x'\n  try: one of: inductor, interpreter, null, torchscript, xla"
    ):
        registry.get("x")


def test_a_registry_without_a_reference_says_so() -> None:
    with pytest.raises(BackendError, match="no reference backend"):
        _ = Registry().reference


def test_a_class_is_registered_as_an_object_of_it() -> None:
    own = Registry()
    made = own.register(Nothing)
    assert isinstance(made, Nothing)
    assert own.get("nothing") is made


@pytest.mark.parametrize(
    "thing", [object(), 3, dict, lambda program: program], ids=["object", "int", "type", "function"]
)
def test_what_is_no_backend_is_refused(thing: object) -> None:
    with pytest.raises(BackendError, match=r"register\(\) got .*, which is no Backend\n  try: derive"):
        Registry().register(thing)  # type: ignore[arg-type]


def test_a_backend_without_a_name_is_refused() -> None:
    class Nameless(Backend):
        def compile(self, program: Program) -> Computation:
            raise NotImplementedError

    with pytest.raises(BackendError, match="Nameless has no name\n  try: set the class attribute"):
        Registry().register(Nameless)


def test_a_backend_is_made_ready_when_it_is_first_asked_for() -> None:
    ready: list[str] = []

    class Heavy(Nothing):
        def initialize_aten_bindings(self) -> None:
            ready.append(self.name)

    own = Registry()
    own.register(Heavy)
    assert ready == []
    assert own.used() == []
    own.get("nothing")
    own.get("nothing")
    assert ready == ["nothing"]
    assert own.used() == [own.get("nothing")]


def test_a_backend_whose_bindings_fail_is_not_ready() -> None:
    class Broken(Nothing):
        def initialize_aten_bindings(self) -> None:
            raise ImportError("no such library")

    own = Registry()
    own.register(Broken)
    for _ in range(2):
        with pytest.raises((BackendError, ImportError), match="no such library"):
            own.get("nothing")
    assert own.used() == []


def test_a_forgotten_backend_is_unknown_and_its_name_free() -> None:
    own = Registry()
    own.register(Nothing)
    own.unregister("nothing")
    assert own.names() == []
    with pytest.raises(UnknownBackendError):
        own.get("nothing")
    own.register(Nothing)
    assert own.names() == ["nothing"]
    with pytest.raises(UnknownBackendError):
        own.unregister("never")


def test_a_promised_backend_is_imported_when_it_is_first_asked_for() -> None:
    own = Registry()
    own.promise("null", "torch_ltc.backends.null:NullBackend")
    own.promise("gone", "torch_ltc.backends.gone:GoneBackend")
    assert own.names() == ["gone", "null"]
    assert own.get("null").name == "null"
    assert own.get("null") is own.get("null")
    with pytest.raises(BackendError, match="'gone' cannot be loaded: No module named") as caught:
        own.get("gone")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert own.names() == ["gone", "null"]
    for name in ("null", "gone"):
        with pytest.raises(BackendError, match=f"'{name}' is registered already"):
            own.register(type("Other", (Nothing,), {"name": name}))


def test_origin_says_where_a_backend_comes_from() -> None:
    own = Registry()
    own.register(Nothing)
    own.promise("gone", "torch_ltc.backends.gone:GoneBackend")
    assert [own.origin(name) for name in ("nothing", "gone", "never")] == ["registered", "built-in", "unknown"]


PACKAGE = """
import torch_ltc

class Ours(torch_ltc.Backend):
    name = "ours"
    def compile(self, program):
        raise torch_ltc.errors.CompileError("not today")

made = Ours()
number = 3

class Misnamed(Ours):
    name = "another"
"""
GROUP = """
[torch_ltc.backends]
ours = their_package:Ours
missing = their_missing_package:Backend
nothing = their_package:absent
number = their_package:number
misnamed = their_package:Misnamed
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which a package with backends is installed."""
    (tmp_path / "their_package.py").write_text(PACKAGE)
    information = tmp_path / "their_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(GROUP.replace("torch_ltc.backends", ENTRY_POINTS))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def run(script: str, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_installed_backends_are_found_by_their_entry_points(installed: dict[str, str]) -> None:
    lines = run(
        """
        import sys, torch_ltc
        from torch_ltc.lowering.registry import registry
        print({"ours", "missing", "nothing", "number", "misnamed", "interpreter"} <= set(registry.names()))
        print("their_package" in sys.modules)
        print(registry.origin("ours"))
        torch_ltc.use_backend("ours")
        print(registry.get("ours").name, torch_ltc.config.settings.backend)
        """,
        installed,
    )
    assert lines == ["True", "False", "installed: their_package:Ours", "ours ours"]


def test_a_broken_entry_point_is_an_error_of_its_own(installed: dict[str, str]) -> None:
    lines = run(
        """
        import torch_ltc
        from torch_ltc.lowering.registry import registry
        for name in ("missing", "nothing", "number", "misnamed"):
            try:
                torch_ltc.use_backend(name)
            except torch_ltc.errors.BackendError as error:
                print(str(error).splitlines()[0])
        print(torch_ltc.config.settings.backend, "ours" in registry.names(), registry.get("ours").name)
        """,
        installed,
    )
    assert lines == [
        "the backend 'missing' cannot be loaded: No module named 'their_missing_package'",
        "the backend 'nothing' cannot be loaded: module 'their_package' has no attribute 'absent'",
        "the entry point 'number' got 3, which is no Backend",
        "the entry point 'misnamed' gives a backend named 'another'",
        "torchscript True ours",
    ]


def test_the_environment_chooses_an_installed_backend(installed: dict[str, str]) -> None:
    script = "import torch_ltc; print(torch_ltc.config.settings.backend)"
    assert run(script, {**installed, "LTC_BACKEND": "ours"}) == ["ours"]


def test_an_unknown_backend_in_the_environment_is_an_error_at_import(installed: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import torch_ltc"]
    environment = {**installed, "LTC_BACKEND": "ourss"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode != 0
    assert "UnknownBackendError: there is no backend named 'ourss'" in done.stderr
    assert (
        "one of: inductor, interpreter, misnamed, missing, nothing, null, number, ours, torchscript, xla" in done.stderr
    )


def test_the_names_at_the_top_of_the_package() -> None:
    made = torch_ltc.register_backend(type("Temporary", (Nothing,), {"name": "temporary"}))
    try:
        assert registry.get("temporary") is made
    finally:
        registry.unregister("temporary")
